"""EngineClient: the HTTP process's end of the channel, for asyncio. It starts the engine process and talks to it.

Messages of the engine are read at once, so that a slow client cannot block the engine. Outputs wait in the
ClientRequestOutputStream of their request, whose size is bounded by the request's max_tokens.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from headstart.config.options import EngineOptions
from headstart.core.batch import RequestStepOutput
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo, EngineStats
from headstart.core.errors import ConfigError, EngineDeadError, HeadstartError, InvalidRequestError, RequestFailedError
from headstart.core.request import Request
from headstart.engine.request_recorder import RequestRecorder
from headstart.engine.wire import (
    Abort,
    CallResult,
    EngineCall,
    EngineFailed,
    EngineUpdate,
    FrameSplitter,
    LongStep,
    Message,
    Ready,
    Refused,
    StartEngine,
    Stop,
    Submit,
    UnsentRequests,
    decode_from_engine,
    encode_frame,
)

Build = Callable[[EngineOptions], tuple[Engine, EngineInfo]]
PATIENCE = 3.0  # factor on the announced duration of a long step
SEND_BYTES = 64 << 10  # handed to the socket before the engine has read them; more waits in the outbox
STOP_SECONDS = 8.0  # for the running step, and for a store that writes nothing to be given up
WRITING_SECONDS = 60.0  # more, if blocks of the store are pending


class TenantPendingTotals(NamedTuple):
    """The submitted requests of a tenant that have no first token yet."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts


class ClientRequestOutputStream:
    """The engine outputs of the requests of one client request, in order of arrival."""

    def __init__(self) -> None:
        self._outputs: list[tuple[float, RequestStepOutput]] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    async def next_batch(self, timeout: float) -> list[tuple[float, RequestStepOutput]]:
        """Return the outputs since the last call, each with its monotonic time of arrival.

        Returns [] after `timeout` seconds without outputs. Raises the error passed to `fail`.
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

    def push(self, output: RequestStepOutput, at: float) -> None:
        """Add an output that arrived at monotonic time `at`."""
        self._outputs.append((at, output))
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Make the current and every later `batch` raise `error`; the first error is kept."""
        self._error = self._error or error
        self._arrived.set()


class EngineClient:
    """A client of an engine in its own process. All methods must be called from the event loop that started it."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.last_heard = time.monotonic()
        self.expected_by = self.last_heard  # latest time of the next message, as announced by the engine
        self.dead: EngineDeadError | None = None
        self.died = asyncio.Event()
        self.on_step: Callable[[EngineStats], None] | None = None
        self.recorder: RequestRecorder | None = None
        self._streams: dict[str, ClientRequestOutputStream] = {}
        self._waiting: dict[str, Request] = {}  # requests without a first token
        self.queued: dict[str, TenantPendingTotals] = {}  # requests without a first token, of each tenant that has any
        self._outbox = UnsentRequests()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()

    async def start(self, build: Build, options: EngineOptions) -> EngineInfo:
        """Start the process and wait until the engine is built.

        `build` must be a module-level function, since it is sent by name. Raises ConfigError with the reason if the
        engine cannot be built with these options, EngineDeadError if its process ends for another reason.
        """
        ours, theirs = socket.socketpair()
        try:
            self._process = _spawn(theirs.fileno())
        finally:
            theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Receiver(self), sock=ours)
        self._transport.set_write_buffer_limits(SEND_BYTES)
        self._send(StartEngine(build.__module__, build.__qualname__, options))
        return await self._ready

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None before it is started."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the engine process, None while it runs."""
        return None if self._process is None else self._process.returncode

    def seconds_since_heartbeat_due(self, now: float) -> float:
        """Return the seconds since a message was due; 0 during a long step that the engine announced."""
        return max(now - max(self.last_heard, self.expected_by), 0.0)

    @property
    def num_awaiting_first_token(self) -> int:
        """Number of submitted requests without a first token."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the submitted requests without a first token."""
        return sum(each.num_tokens for each in self.queued.values())

    def submit(self, requests: Sequence[Request]) -> ClientRequestOutputStream:
        """Send the requests to the engine and return the stream of their outputs. Raises EngineDeadError."""
        if self.dead is not None:
            raise self.dead
        stream = ClientRequestOutputStream()
        for request in requests:
            assert request.request_id not in self._streams, f"request id {request.request_id} is in use"
            self._streams[request.request_id] = stream
            self._waiting[request.request_id] = request
            self._count(request, 1)
        if self.recorder is not None and self.info is not None:
            self.recorder.record_submitted(requests, self.info.block_size, time.monotonic())
        for message in Submit.messages_from_requests(requests):
            self._outbox.push(message)
        self.send_queued_requests()
        return stream

    def send_queued_requests(self) -> None:
        """Send requests until the socket has enough of them. Called again when the engine has read these."""
        assert self._transport is not None, "the engine process was never started"
        while self._transport.get_write_buffer_size() <= SEND_BYTES:
            message = self._outbox.pop()
            if message is None:
                return
            self._send(message)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Abort those of the requests that have not finished; their blocks are freed after the running step."""
        alive = tuple(each for each in request_ids if self._forget(each) and not self._outbox.remove_request(each))
        if alive and self.dead is None:
            self._send(Abort(alive))

    async def call(self, name: str, argument: Any = None) -> Any:
        """Execute one of engine_calls.CALLS in the engine between two steps, and return its result: plain values.

        Raises InvalidRequestError if the call is refused, RequestFailedError if it fails, and EngineDeadError.
        """
        if self.dead is not None:
            raise self.dead
        self._num_calls += 1
        call_id = self._num_calls
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(EngineCall(call_id, name, argument))
        try:
            return await answer
        finally:
            del self._calls[call_id]

    def kill(self) -> None:
        """Kill the engine process; pending writes are lost. `close` must still be called."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Stop the engine process. If it has loaded, it has time to write the pending blocks of its store."""
        process, transport = self._process, self._transport
        if process is None:
            return
        if transport is not None and not transport.is_closing():
            if self.info is None:  # still loading: it does not read messages
                process.kill()
            else:
                self._send(Stop())
        self._die("the engine was closed")
        is_writing = self.stats.store is not None and self.stats.store.num_pending
        await asyncio.to_thread(_end, process, STOP_SECONDS + (WRITING_SECONDS if is_writing else 0.0))
        if transport is not None:
            transport.close()

    # ------------------------------------------------------------------------------------------------ receiving

    def handle_frame(self, payload: bytes) -> None:
        """Process one frame from the engine."""
        self.last_heard = time.monotonic()
        message = decode_from_engine(payload)
        match message:
            case EngineUpdate(outputs, stats):
                self._take_news(outputs, stats)
            case Ready(info):
                self.info = info
                if not self._ready.done():
                    self._ready.set_result(info)
            case EngineFailed(message, is_config):
                self._fail_start(ConfigError(message) if is_config else EngineDeadError(message))
                self._die(message)
            case Refused(request_id, message, param, code):
                self._refuse(request_id, message, param, code)
            case LongStep(seconds):
                self.expected_by = self.last_heard + PATIENCE * seconds
                return
            case CallResult():
                self._take_answer(message)
        self.expected_by = self.last_heard

    def connection_lost(self) -> None:
        """Mark the engine as dead. Called when the channel is closed, whether or not the engine reported an error."""
        self._die("the engine process ended unexpectedly")

    def _take_news(self, outputs: list[RequestStepOutput], stats: EngineStats) -> None:
        if self.on_step is not None and stats.num_steps > self.stats.num_steps:
            self.on_step(stats)
        self.stats = stats
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # aborted while this output was in flight
                continue
            if output.token_ids or output.finish_reason is not None:
                self._begun(output.request_id)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            if self.recorder is not None:
                self.recorder.record_output(output, self.last_heard)
            stream.push(output, self.last_heard)

    def _take_answer(self, answer: CallResult) -> None:
        waiting = self._calls.get(answer.call_id)
        if waiting is None or waiting.done():  # the caller was cancelled
            return
        if answer.error is None:
            waiting.set_result(answer.value)
        else:
            waiting.set_exception(_error(answer.error, answer.param, answer.code))

    def _refuse(self, request_id: str, message: str, param: str | None, code: str | None) -> None:
        stream = self._streams.get(request_id)
        self._forget(request_id)
        if stream is not None:
            stream.fail(_error(message, param, code))

    def _forget(self, request_id: str) -> bool:
        if self.recorder is not None:
            self.recorder.record_end(request_id, time.monotonic())
        self._begun(request_id)
        return self._streams.pop(request_id, None) is not None

    def _begun(self, request_id: str) -> None:
        """Note that a request does not wait any longer."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        """Add a request to those that wait, or remove it."""
        before = self.queued.get(request.tenant, TenantPendingTotals())
        after = TenantPendingTotals(before.num_requests + sign, before.num_tokens + sign * len(request.prompt))
        if after.num_requests:
            self.queued[request.tenant] = after
        else:
            del self.queued[request.tenant]

    def _die(self, reason: str) -> None:
        """Fail all streams and calls that wait for the engine; the first reason is kept."""
        if self.dead is not None:
            return
        self.dead = EngineDeadError(reason)
        for stream in dict.fromkeys(self._streams.values()):
            stream.fail(self.dead)
        self._streams.clear()
        self._waiting.clear()
        self.queued.clear()
        self._outbox = UnsentRequests()
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
    """The asyncio protocol that passes whole frames to the client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._splitter = FrameSplitter()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._client.handle_frame(payload)
        except (ValueError, msgspec.DecodeError):
            assert self._transport is not None
            self._transport.close()  # the frame boundaries are lost

    def resume_writing(self) -> None:
        self._client.send_queued_requests()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.connection_lost()


def _error(message: str, param: str | None, code: str | None) -> HeadstartError:
    """Return what the engine reports: a mistake of the client if it has a code."""
    return RequestFailedError(message) if code is None else InvalidRequestError(message, param=param, code=code)


def _spawn(descriptor: int) -> "subprocess.Popen[bytes]":
    """Start the engine process: same modules, own process group (so it gets no Ctrl-C), its stdout on stderr."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headstart.engine.engine_process", str(descriptor)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=2,
        process_group=0,
    )


def _end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait up to `seconds` for the process to exit, then kill it."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
