"""llama-server over HTTP: one process, `slots` sequences, token ids in and server-sent events out.

Its prefix cache is a sequence's own last prompt, plus whole states stored in memory; sequences do not share. A reset
restarts the server: it can erase a sequence, but not its stored states.
"""

import asyncio
import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llama_cpp import __version__
from llamacpp_library import Settings
from serve import GIVEN_UP, Flight, Job

START_SECONDS = 120.0
STOP_SECONDS = 5.0  # less than a driver has to quit; then it is killed
PR_SET_PDEATHSIG = 1
HEAD = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
OPTIONS = {
    "stream": True,
    "return_tokens": True,
    "cache_prompt": True,
    "ignore_eos": True,
    "temperature": 0.0,
    "samplers": ["top_k"],
    "top_k": 1,
}


def versions() -> dict[str, str]:
    """Return the version of the package that contains the source."""
    return {"llama-cpp-python": __version__}


class ServerRunner:
    """A context manager that starts llama-server and runs jobs on it."""

    def __init__(self, program: Path, model: Path, settings: Settings) -> None:
        self._command = [str(program), "--model", str(model), *_flags(settings)]
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()
        shape = self._ask("/v1/models")["data"][0]["meta"]
        self.vocab_size: int = shape["n_vocab"]

    def __enter__(self) -> "ServerRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def try_clear_prefix_cache(self) -> bool:
        self._stop()
        self._start()
        return True

    def run(self, jobs: Sequence[Job], concurrency: int = 0, give_up_after: float | None = None) -> dict[str, Any]:
        return asyncio.run(self._run(jobs, concurrency, give_up_after))

    async def _run(self, jobs: Sequence[Job], concurrency: int, give_up_after: float | None) -> dict[str, Any]:
        start = time.perf_counter()
        free = asyncio.Semaphore(concurrency or len(jobs) or 1)
        flights = [Flight(job.at, len(job.prompt)) for job in jobs]
        tasks = [
            asyncio.create_task(self._one(job, flight, start, free if concurrency else None))
            for job, flight in zip(jobs, flights, strict=True)
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=give_up_after)
        seconds = time.perf_counter() - start
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        for error in errors:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        records = [
            flight.record(GIVEN_UP if isinstance(error, asyncio.CancelledError) else error)
            for flight, error in zip(flights, errors, strict=True)
        ]
        return {"records": records, "seconds": seconds, "computed_tokens": None}

    async def _one(self, job: Job, flight: Flight, start: float, free: asyncio.Semaphore | None) -> str | None:
        """Serve one job; return its error, if any. Closing the connection ends its request on the server."""
        if free is None:
            await asyncio.sleep(max(start + job.at - time.perf_counter(), 0.0))
            return await self._stream(job, flight, start)
        async with free:
            flight.arrival = time.perf_counter() - start
            return await self._stream(job, flight, start)

    async def _stream(self, job: Job, flight: Flight, start: float) -> str | None:
        body = json.dumps({"prompt": job.prompt, "n_predict": job.output, **OPTIONS}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            writer.write(HEAD.format(len(body)).encode() + body)
            status = (await reader.readline()).decode().split()
            if status[1:2] != ["200"]:
                return f"status {' '.join(status[1:])}: {(await reader.read(500)).decode(errors='replace')}"
            while line := await reader.readline():
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event["error"])
                flight.take(len(event.get("tokens", ())), time.perf_counter() - start)
                if event["stop"]:
                    flight.cached_tokens = event["timings"]["cache_n"]
                    made = flight.output_tokens
                    return None if made == job.output else f"{made} of {job.output} tokens received"
            return "the stream ended too early"
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [*self._command, "--port", str(self._port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, preexec_fn=_die_with_parent
        )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self._process.poll() is None, f"llama-server ended with code {self._process.returncode}"
            with suppress(OSError, urllib.error.HTTPError):
                if self._ask("/health")["status"] == "ok":
                    return
            time.sleep(0.05)
        self._stop()
        raise TimeoutError(f"llama-server was not ready after {START_SECONDS:.0f} s")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as answer:
            return json.load(answer)


def _die_with_parent() -> None:
    """In the child process: end with this driver, also if it is killed, so that no server keeps running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _flags(settings: Settings) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--threads", str(settings.threads), "--threads-batch", str(settings.threads)),
        *("--threads-http", "2", "--parallel", str(settings.slots)),
        *("--ctx-size", str(settings.slots * settings.context)),
        *("--batch-size", str(settings.batch), "--ubatch-size", str(settings.ubatch)),
        *("--flash-attn", "on" if settings.flash else "off"),
        *("--cache-type-k", settings.kv, "--cache-type-v", settings.kv),
        *(["--kv-unified"] if settings.unified else ["--no-kv-unified"]),
        *("--poll", "0", "--log-verbosity", "1", "--no-webui", "--slot-prompt-similarity", "0.1"),
        *("--fit", "off"),
    ]
