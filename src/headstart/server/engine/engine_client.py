"""EngineClient: the HTTP process's end of the channel, for asyncio. Starts the engine process and speaks with it.

Reads whatever the engine says at once, so that no slow client can hold the engine up: what it said waits in the
OutputStream of its request, which is bounded by that request's own max_tokens.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headstart.config.options import EngineOptions
from headstart.core.batch import Output
from headstart.core.engine import Engine, EngineInfo, EngineStats
from headstart.core.errors import ConfigError, EngineDeadError, HeadstartError, InvalidRequestError, RequestFailedError
from headstart.core.request import Request
from headstart.server.engine.wire import (
    Abort,
    Answer,
    Call,
    Failed,
    FrameSplitter,
    LongStep,
    Message,
    News,
    Ready,
    Refused,
    Start,
    Stop,
    Submit,
    decode_from_engine,
    encode_frame,
)

Build = Callable[[EngineOptions], tuple[Engine, EngineInfo]]
PATIENCE = 3.0  # times the time that a long step was expected to take
STOP_SECONDS = 8.0  # for the step under way, and for what the store may take to write what is pending


class OutputStream:
    """News of the requests of one client request, in the order in which they came out of the engine."""

    def __init__(self) -> None:
        self._outputs: list[tuple[float, Output]] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    async def batch(self, timeout: float) -> list[tuple[float, Output]]:
        """Returns what has come since the last call, with the monotonic time at which it came.

        Returns [] after `timeout` seconds of silence. Raises what `fail` was given.
        """
        if not self._arrived.is_set():
            try:
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        if self._error is not None:
            raise self._error
        self._arrived.clear()
        outputs, self._outputs = self._outputs, []
        return outputs

    def push(self, output: Output, at: float) -> None:
        """Adds news that came at monotonic time `at`."""
        self._outputs.append((at, output))
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Makes this and every later `batch` raise `error`; the first error stays."""
        self._error = self._error or error
        self._arrived.set()


class EngineClient:
    """An engine in a process of its own. Every method is called from the event loop that started it."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.last_heard = time.monotonic()
        self.expected_by = self.last_heard  # when it should be heard again at the latest, as far as it said
        self.dead: EngineDeadError | None = None
        self.died = asyncio.Event()
        self.on_step: Callable[[EngineStats], None] | None = None
        self._streams: dict[str, OutputStream] = {}
        self._waiting: dict[str, int] = {}  # submitted, nothing computed to its end yet: id -> prompt tokens
        self._waiting_tokens = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()

    async def start(self, build: Build, options: EngineOptions) -> EngineInfo:
        """Starts the process and waits until the engine is built.

        `build` must be a function at the top of a module: it travels as a name. Raises ConfigError with the reason if
        the engine cannot be built as asked, EngineDeadError if its process ended otherwise.
        """
        ours, theirs = socket.socketpair()
        try:
            self._process = _spawn(theirs.fileno())
        finally:
            theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Receiver(self), sock=ours)
        self._send(Start(build.__module__, build.__qualname__, options))
        return await self._ready

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the engine process, None while it runs."""
        return None if self._process is None else self._process.returncode

    def silent_seconds(self, now: float) -> float:
        """Seconds without a word since one was due: 0 during a step that the engine said would be long."""
        return max(now - max(self.last_heard, self.expected_by), 0.0)

    @property
    def num_waiting(self) -> int:
        """Requests submitted that no token came out of yet."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._waiting_tokens

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the engine process has not taken yet: it is in a step, or it hangs."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hands the requests over and returns the stream of their news. Raises EngineDeadError."""
        if self.dead is not None:
            raise self.dead
        stream = OutputStream()
        for request in requests:
            assert request.request_id not in self._streams, f"request id {request.request_id} is in use"
            self._streams[request.request_id] = stream
            self._waiting[request.request_id] = len(request.prompt)
            self._waiting_tokens += len(request.prompt)
        for message in Submit.of(requests):
            self._send(message)
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forgets those of the requests that have not finished; their blocks are free after the step under way."""
        alive = tuple(request_id for request_id in request_ids if self._forget(request_id))
        if alive and self.dead is None:
            self._send(Abort(alive))

    async def call(self, name: str, argument: Any = None) -> Any:
        """Has the engine do one of engine_calls.CALLS between two steps, and returns what it answers: plain values.

        Raises InvalidRequestError if it refuses, RequestFailedError if it could not, and EngineDeadError.
        """
        if self.dead is not None:
            raise self.dead
        self._num_calls += 1
        call_id = self._num_calls
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Call(call_id, name, argument))
        try:
            return await answer
        finally:
            del self._calls[call_id]

    def kill(self) -> None:
        """Ends the engine process at once: whatever it was about to write is lost. To be closed all the same."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Ends the engine process; gently, with time to write what waits for its store, if it listens."""
        process, transport = self._process, self._transport
        if process is None:
            return
        if transport is not None and not transport.is_closing():
            if self.info is None:  # still loading: it would not listen
                process.kill()
            else:
                self._send(Stop())
        self._die("the engine was closed")
        await asyncio.to_thread(_end, process)
        if transport is not None:
            transport.close()

    # ------------------------------------------------------------------------------------------------ what comes in

    def receive(self, payload: bytes) -> None:
        """Takes one frame from the engine."""
        self.last_heard = time.monotonic()
        message = decode_from_engine(payload)
        match message:
            case News(outputs, stats):
                self._take_news(outputs, stats)
            case Ready(info):
                self.info = info
                if not self._ready.done():
                    self._ready.set_result(info)
            case Failed(message, is_config):
                self._fail_start(ConfigError(message) if is_config else EngineDeadError(message))
                self._die(message)
            case Refused(request_id, message, param, code):
                self._refuse(request_id, message, param, code)
            case LongStep(seconds):
                self.expected_by = self.last_heard + PATIENCE * seconds
                return
            case Answer():
                self._take_answer(message)
        self.expected_by = self.last_heard

    def connection_lost(self) -> None:
        """The engine process is gone, whether or not it said goodbye."""
        self._die("the engine process ended unexpectedly")

    def _take_news(self, outputs: list[Output], stats: EngineStats) -> None:
        if self.on_step is not None and stats.num_steps > self.stats.num_steps:
            self.on_step(stats)
        self.stats = stats
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # aborted while this was on its way
                continue
            if output.token_ids or output.finish_reason is not None:
                self._waiting_tokens -= self._waiting.pop(output.request_id, 0)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.push(output, self.last_heard)

    def _take_answer(self, answer: Answer) -> None:
        waiting = self._calls.get(answer.call_id)
        if waiting is None or waiting.done():  # whoever asked has given up
            return
        if answer.error is None:
            waiting.set_result(answer.value)
        elif answer.code is None:
            waiting.set_exception(RequestFailedError(answer.error))
        else:
            waiting.set_exception(InvalidRequestError(answer.error, param=answer.param, code=answer.code))

    def _refuse(self, request_id: str, message: str, param: str | None, code: str | None) -> None:
        stream = self._streams.get(request_id)
        self._forget(request_id)
        if stream is None:
            return
        if code is None:
            stream.fail(RequestFailedError(message))
        else:
            stream.fail(InvalidRequestError(message, param=param, code=code))

    def _forget(self, request_id: str) -> bool:
        self._waiting_tokens -= self._waiting.pop(request_id, 0)
        return self._streams.pop(request_id, None) is not None

    def _die(self, reason: str) -> None:
        """Fails everything that waits for the engine; the first reason stays."""
        if self.dead is not None:
            return
        self.dead = EngineDeadError(reason)
        for stream in dict.fromkeys(self._streams.values()):
            stream.fail(self.dead)
        self._streams.clear()
        self._waiting.clear()
        self._waiting_tokens = 0
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self.dead)
        self._fail_start(self.dead)
        self.died.set()

    def _fail_start(self, error: HeadstartError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)

    def _send(self, message: Message) -> None:
        assert self._transport is not None, "the engine process was never started"
        self._transport.write(encode_frame(message))


class _Receiver(asyncio.Protocol):
    """Hands whole frames to the client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._splitter = FrameSplitter()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._client.receive(payload)
        except (ValueError, msgspec.DecodeError):
            assert self._transport is not None
            self._transport.close()  # half a frame more and nothing it says makes sense

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.connection_lost()


def _spawn(descriptor: int) -> "subprocess.Popen[bytes]":
    """Starts the engine process: same modules, own process group (Ctrl-C is ours to handle), its stdout on stderr."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headstart.server.engine.engine_process", str(descriptor)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=2,
        process_group=0,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Waits for the process, and no longer than STOP_SECONDS."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
