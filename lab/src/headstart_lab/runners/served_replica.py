"""A real `headstart serve` in its own processes: started, queried and killed as in production.

Requests are sent one after the other over one connection, so that no other request affects a time to first token.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

import headstart
from headstart.bench.streamed_request import StreamFailedError, parse_event_or_raise
from headstart.core.errors import ConfigError
from headstart.measurement.machine import ContentionLog, ContentionMeter
from headstart.measurement.progress_bar import QUIET, ProgressBar

START_SECONDS = 300.0
ANSWER_SECONDS = 300.0
_BANNER = re.compile(r" at (http://\S+)/v1\n +engine +(\w+) on ")
_SAMPLE = re.compile(r'^headstart:prompt_tokens_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to one prompt."""

    ttft: float  # seconds from sending to the first event with a token
    tokens: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None

    @property
    def computed_tokens(self) -> int:
        """Return the computed tokens of the prompt."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch settings of the servers of one benchmark."""

    model: str  # folder or hub id; "": the bundled model
    folder: Path  # for logs, and as working folder, so that no headstart.toml is read
    flags: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()

    def command(self, store: Path | None) -> list[str]:
        """Return the command line of a server on `store`."""
        model = str(Path(self.model).resolve()) if self.model and Path(self.model).exists() else self.model
        flags = ["--host", "127.0.0.1", "--port", "0", "--no-access-log", "--stats-interval", "0", *self.flags]
        for key in self.api_keys:
            flags += ["--api-key", key]
        if store is not None:
            flags += ["--kv-store", str(store)]
        return [sys.executable, "-m", "headstart", "serve", *([model] if model else []), *flags]


class Replica:
    """A running server. `ready_seconds`: from its start until its ready message."""

    def __init__(self, process: "subprocess.Popen[bytes]", banner: "re.Match[str]", ready_seconds: float) -> None:
        address = urlsplit(banner[1])
        assert address.hostname is not None, banner
        self.url = banner[1]
        self.dtype = banner[2]
        self.ready_seconds = ready_seconds
        self._process = process
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=ANSWER_SECONDS)

    @property
    def pid(self) -> int:
        """Return the process id of the HTTP front end, whose child the engine is."""
        return self._process.pid

    def ask(self, prompt: "array[int]", *, key: str = "", output_tokens: int = 1) -> Answer:
        """Send one greedy, streamed completion of token ids. Errors are in the answer's `error`."""
        body = {
            "prompt": prompt.tolist(),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,  # identifies tokens whose text is the same
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens, usage, start, first = list[str](), dict[str, Any](), time.perf_counter(), 0.0
        try:
            for event in self._events(body, key):
                for choice in event.get("choices", ()):
                    first = first or time.perf_counter()
                    tokens += choice["logprobs"]["tokens"]
                usage = event.get("usage") or usage
            counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), len(tokens))
            if counts != (len(prompt), output_tokens, output_tokens):
                raise StreamFailedError(f"tokens in, out, listed: {counts}, requested {len(prompt), output_tokens}")
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, StreamFailedError) as error:
            self._connection.close()
            return Answer(0.0, (), len(prompt), 0, str(error) or type(error).__name__)
        return Answer(first - start, tuple(tokens), len(prompt), usage["prompt_tokens_details"]["cached_tokens"])

    def prompt_tokens(self, *, key: str = "") -> "Counter[str]":
        """Return the prompt tokens so far by source of their KV, from /metrics: "computed", "store", ..."""
        text = self._plain("GET", "/metrics", key)
        return Counter({source: int(float(value)) for source, value in _SAMPLE.findall(text)})

    def served_model(self, *, key: str = "") -> str:
        """Return the name of the first model in its list."""
        return str(json.loads(self._plain("GET", "/v1/models", key))["data"][0]["id"])

    def reset_prefix_cache(self, *, key: str = "") -> None:
        """Clear its prefix cache. Raises StreamFailedError if it refuses because requests are in flight."""
        self._plain("POST", "/reset_prefix_cache", key)

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes so far."""
        total = 0.0
        for process in _processes(self._process.pid):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def kill(self) -> None:
        """Kill front end and engine with SIGKILL, as an out-of-memory kill would. Idempotent."""
        self._connection.close()
        _kill(self._process)

    def _plain(self, method: str, path: str, key: str) -> str:
        """Return the response body of a request without a body. Raises StreamFailedError unless it is status 200."""
        response = self._sent(method, path, None, _headers(key))
        text = response.read().decode(errors="replace")
        if response.status != 200:
            raise StreamFailedError(f"{method} {path}: HTTP {response.status}: {text[:300]}")
        return text

    def _sent(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a request on a new connection, since the server closes idle ones; return the response, not read yet."""
        self._connection.close()
        self._connection.request(method, path, body, headers)
        return self._connection.getresponse()

    def _events(self, body: dict[str, Any], key: str) -> Generator[dict[str, Any]]:
        """Yield the JSON events of one streamed completion, up to `[DONE]`."""
        headers = {"Content-Type": "application/json", **_headers(key)}
        response = self._sent("POST", "/v1/completions", json.dumps(body), headers)
        if response.status != 200:
            raise StreamFailedError(f"HTTP {response.status}: {response.read().decode(errors='replace')[:300]}")
        for line in response:
            event = parse_event_or_raise(line)
            if event is None:
                response.read()  # to the end of the chunks, so that the server's answer is complete
                return
            yield event
        raise StreamFailedError("the stream ended without [DONE]")


@contextlib.contextmanager
def replica(launch: Launch, store: Path | None) -> Generator[Replica]:
    """Start a ready server on `store` (None: without one) and kill it at the end. Raises ConfigError if it fails."""
    log = launch.folder / f"server-{time.monotonic_ns()}.log"
    source = str(Path(headstart.__file__).parents[1])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADSTART_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in (source, os.environ.get("PYTHONPATH", "")) if path)
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command(store),
            env=environment,
            cwd=launch.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        banner = _wait_ready(process, log, start + START_SECONDS)
        server = Replica(process, banner, time.perf_counter() - start)
        try:
            yield server
        finally:
            server.kill()
    finally:
        _kill(process)


def ask_in_turn(
    server: Replica,
    prompts: "Iterable[array[int]]",
    *,
    key: str = "",
    bar: ProgressBar = QUIET,
    log: ContentionLog | None = None,
) -> list[Answer]:
    """Return the answers to all prompts, sent one after the other; `log` records the CPU use of other processes."""
    meter, before, answers = ContentionMeter(), server.cpu_seconds(), list[Answer]()
    meter.start()
    for prompt in prompts:
        answers.append(server.ask(prompt, key=key))
        bar.advance()
    if log is not None:
        log.kept.append(meter.cores_used_by_others(server.cpu_seconds() - before))
    return answers


def stored_bytes(store: Path) -> int:
    """Return the bytes that the files of a store occupy on disk."""
    return sum(path.stat().st_blocks * 512 for path in store.iterdir() if path.is_file())


def problems(label: str, answers: Iterable[Answer]) -> list[str]:
    """Return the reasons why these answers are no valid measurement; empty if they are valid."""
    errors = [answer.error for answer in answers if answer.error is not None]
    return [f"{label}: {len(errors)} requests failed, the first with: {errors[0]}"] if errors else []


def differing(one: Sequence[Answer], other: Sequence[Answer]) -> int:
    """Return the number of prompts whose answers differ."""
    return sum(a.tokens != b.tokens for a, b in zip(one, other, strict=True))


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> "re.Match[str]":
    while time.perf_counter() < deadline:
        ended = process.poll() is not None
        text = log.read_text(encoding="utf-8", errors="replace")
        found = _BANNER.search(text)
        if found:
            return found
        if ended:
            raise ConfigError(f"headstart serve ended with code {process.returncode}: {text.strip()[-500:]}")
        time.sleep(0.005)
    raise ConfigError(f"headstart serve was not ready after {START_SECONDS:.0f} s; see what {log.name} says")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    everyone = _processes(process.pid)
    for one in everyone:
        with contextlib.suppress(psutil.Error):
            one.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10  # the engine is an orphan now: a zombie state counts as ended
    while any(_is_alive(one) for one in everyone) and time.monotonic() < deadline:
        time.sleep(0.01)


def _processes(pid: int) -> list[psutil.Process]:
    """Return the processes of the server: the HTTP front end and its engine, which has its own process group."""
    try:
        front = psutil.Process(pid)
        return [front, *front.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
