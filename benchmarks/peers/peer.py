"""Peer: an engine behind a driver process in its own environment, as a Runner (measurement/runner.py)."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.runner import JobsResult
from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord

GIVEN_UP = "given up"
START_SECONDS = 300.0  # until a driver is ready, compilation and warm-up included; then it is killed
GRACE_SECONDS = 60.0  # for a driver to notice the deadline after it has passed; then it is killed
QUIT_SECONDS = 20.0


class PeerError(Exception):
    """A driver died or violated the protocol and cannot be used any more."""


class LateError(PeerError):
    """A driver did not answer within its time limit and was killed."""


class GivenUpError(Exception):
    """A peer exceeded its time limit; it is ready for the next run."""


class Peer:
    """A client of one driver, with the protocol of README.md.

    `deadline`, on time.monotonic's clock, ends every run: requests in flight at that time are aborted. None: no limit.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str | None] | None = None,
        *,
        start_limit: float = START_SECONDS,
    ) -> None:
        """Start the driver and wait until it is ready, `start_limit` seconds at most. `log` receives its output.

        `environment` is merged into this process's own; None removes a variable. Raises PeerError, LateError.
        """
        merged: dict[str, str | None] = {**os.environ, **(environment or {})}
        self.log = log
        self.deadline: float | None = None
        self.label = Path(command[1]).name if len(command) > 1 else command[0]
        try:
            with log.open("ab") as stderr:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env={name: value for name, value in merged.items() if value is not None},
                    text=True,
                    start_new_session=True,  # a signal to this program's group does not reach it: `kill` ends it
                )
        except OSError as error:
            raise PeerError(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            ready = self._within(start_limit, self._read)["ready"]
        except BaseException:
            self.kill()
            raise
        self.label = ready["label"]
        self.vocab_size: int = ready["vocab_size"]
        self.reports_cached: bool = ready.get("reports_cached", True)
        self.about: dict[str, Any] = ready["about"]

    def try_clear_prefix_cache(self) -> bool:
        return bool(self._ask({"op": "reset"})["reset"])

    def run(
        self,
        jobs: Sequence[Job],
        *,
        concurrency: int = 0,
        bar: ProgressBar = QUIET,
        give_up: Callable[[RequestRecord], bool] | None = None,
    ) -> JobsResult:
        """Serve all jobs until `deadline`. `give_up` is not called: a driver sends its records only at the end.

        Raises GivenUpError if the deadline has passed, LateError if the driver did not notice that and was killed,
        PeerError if it is gone.
        """
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise GivenUpError(f"{self.label}: no time is left")
        message = {
            "op": "run",
            "jobs": [
                {"prompt": job.prompt.tolist(), "output": job.output, "at": job.at, "sampling": asdict(job.sampling)}
                for job in jobs
            ],
            "concurrency": concurrency,
            "give_up_after": left,
        }
        answer = self._ask(message)
        if len(answer["records"]) != len(jobs):
            raise PeerError(f"{self.label}: {len(answer['records'])} records for {len(jobs)} jobs")
        records = [RequestRecord(str(index), **record) for index, record in enumerate(answer["records"])]
        bar.advance(len(records))
        late = sum(record.error == GIVEN_UP for record in records)
        if late:
            raise GivenUpError(f"{self.label}: {late} of {len(records)} requests were not over in time")
        return JobsResult(records, answer["seconds"], reports_cached=self.reports_cached)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the driver and its child processes so far; 0 once it has ended."""
        try:
            process = psutil.Process(self._process.pid)
            family = [process, *process.children(recursive=True)]
            return sum(sum(member.cpu_times()[:4]) for member in family)
        except psutil.NoSuchProcess:
            return 0.0

    def close(self) -> None:
        """Let the driver end; kill it if it does not."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
                self._process.wait(QUIT_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                self.kill()
        self._process.wait()

    def kill(self) -> None:
        """End the driver and its child processes at once."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()  # a forked child keeps the pipe open, and then its reader waits on
        self._process.kill()
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0) + GRACE_SECONDS
        return self._within(left, lambda: self._exchange(message))

    def _within(self, limit: float | None, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `work`; if it takes longer than `limit` seconds, kill the driver and raise LateError."""
        if limit is None:
            return work()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self.kill()

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            return work()
        except PeerError as error:
            if is_late.is_set():
                raise LateError(f"{self.label} did not answer within {limit:.0f} s; see {self.log}") from error
            raise
        finally:
            timer.cancel()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"{self.label} is gone: {error}") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.label} ended with code {self._process.wait()}; see {self.log}")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerError(f"{self.label} sent {line[:80]!r}, which is no JSON") from error
        if "error" in answer:
            raise PeerError(f"{self.label}: {answer['error']}")
        return answer
