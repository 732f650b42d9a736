"""Messages between the HTTP process and the engine process: msgpack with a schema, in frames, over a Unix socket.

No data is executed: a frame that does not decode to one of these messages is an error.
"""

import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgspec

from headstart.config.options import EngineOptions
from headstart.core.batch import RequestStepOutput
from headstart.core.engine_info import EngineInfo, EngineStats
from headstart.core.errors import HeadstartError
from headstart.core.request import CacheMode, Request, RetentionHint, SamplingParams

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_RECEIVE_BYTES = 1 << 18
_NO_TOKENS = array("i")


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base class of all messages; the tag is the class name."""


class StartEngine(Message):
    """To the engine, first and once: the function and the options to build it with."""

    module: str  # of the function that builds it
    function: str
    options: EngineOptions


class SubmittedChoice(msgspec.Struct, array_like=True):
    """The fields in which one Request differs from the others of a Submit."""

    request_id: str
    prompt: int  # index
    max_tokens: int
    seed: int | None
    prompt_logprobs: int | None


class Submit(Message):
    """To the engine: requests that share all fields but those of a choice. Each prompt is sent once, as raw int32."""

    choices: list[SubmittedChoice]
    prompts: list[bytes]
    sampling: SamplingParams
    arrival: float
    domain: bytes
    adapter: str | None
    priority: int
    cache: CacheMode
    tenant: str
    retention: RetentionHint
    is_traced: bool = False
    boundary: int = 0

    @classmethod
    def messages_from_requests(cls, requests: Sequence[Request]) -> "list[Submit]":
        """Return the messages for `requests`: one message for the requests of one client request."""
        if len(requests) == 1:
            return [cls._of(requests)]
        return [cls._of(list(group)) for _, group in groupby(requests, _common)]

    @classmethod
    def _of(cls, requests: Sequence[Request]) -> "Submit":
        first = requests[0]
        places: dict[int, int] = {}  # index of each prompt by identity: the choices of one prompt share its array
        prompts: list[bytes] = []
        choices: list[SubmittedChoice] = []
        for request in requests:
            at = places.setdefault(id(request.prompt), len(prompts))
            if at == len(prompts):
                prompts.append(request.prompt.tobytes())
            own = request.sampling
            choices.append(SubmittedChoice(request.request_id, at, own.max_tokens, own.seed, own.prompt_logprobs))
        return cls(choices=choices, prompts=prompts, **{name: getattr(first, name) for name in _SHARED})

    def requests(self) -> list[Request]:
        """Return the requests of this message; the choices of one prompt share its array."""
        prompts = [array("i", prompt) for prompt in self.prompts]
        shared: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        own: list[dict[str, Any]] = [
            {"request_id": each.request_id, "prompt": prompts[each.prompt], "sampling": self._sampling(each)}
            for each in self.choices
        ]
        return [Request(**(shared | each)) for each in own]

    def _sampling(self, choice: SubmittedChoice) -> SamplingParams:
        first = self.sampling
        if (choice.max_tokens, choice.seed, choice.prompt_logprobs) == (
            first.max_tokens,
            first.seed,
            first.prompt_logprobs,
        ):
            return first
        return replace(first, max_tokens=choice.max_tokens, seed=choice.seed, prompt_logprobs=choice.prompt_logprobs)


_SHARED = tuple(name for name in Submit.__struct_fields__ if name not in ("choices", "prompts"))


def _common(request: Request) -> Request:
    """Return the fields that requests must share to be sent in one message, as a Request without the others."""
    sampling = replace(request.sampling, max_tokens=1, seed=None, prompt_logprobs=None)
    return replace(request, request_id="", prompt=_NO_TOKENS, sampling=sampling)


class Abort(Message):
    """To the engine: abort these requests. Unknown ids are ignored; no Output follows."""

    request_ids: tuple[str, ...]


class EngineCall(Message):
    """To the engine: execute one of engine_calls.CALLS between two steps; the reply is a CallResult of its id."""

    call_id: int
    name: str
    argument: Any  # of plain values


class Stop(Message):
    """To the engine: exit now."""


class Ready(Message):
    """From the engine, once: the engine is built."""

    info: EngineInfo


class EngineFailed(Message):
    """From the engine, last: it cannot start (`is_config`: because of its configuration), or it failed in a step."""

    message: str
    is_config: bool


class Refused(Message):
    """From the engine: this request is refused. `code` is OpenAI's error code if it is the client's mistake."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class EngineUpdate(Message):
    """From the engine after every step and at least every second: a heartbeat with new outputs and statistics."""

    outputs: list[RequestStepOutput]
    stats: EngineStats


class LongStep(Message):
    """From the engine: the step that begins now may take this many seconds without a heartbeat."""

    seconds: float


class CallResult(Message):
    """From the engine: the result or the error of an EngineCall. `code` is OpenAI's if it is the client's mistake."""

    call_id: int
    value: Any = None  # of plain values
    error: str | None = None
    param: str | None = None
    code: str | None = None


ToEngine = StartEngine | Submit | Abort | EngineCall | Stop
FromEngine = Ready | EngineFailed | Refused | EngineUpdate | LongStep | CallResult

_encoder = msgspec.msgpack.Encoder()
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
"""Return the message in a payload for, or from, the engine. Raises msgspec.DecodeError for anything else."""


def encode_frame(message: Message) -> bytes:
    """Return one frame: the length in four bytes, big endian, then msgpack."""
    payload = _encoder.encode(message)
    assert len(payload) <= MAX_FRAME_BYTES, f"frame of {len(payload)} bytes"
    return _LENGTH.pack(len(payload)) + payload


class PeerGoneError(HeadstartError):
    """The process at the other end of the channel has ended."""


def stats_to_builtins(stats: EngineStats) -> list[Any]:
    """Return the fields of EngineStats as plain values, for a CallResult."""
    return msgspec.to_builtins(stats)


def stats_from_values(values: list[Any]) -> EngineStats:
    """Return EngineStats from the values of `stats_to_builtins`."""
    return msgspec.convert(values, EngineStats)


class FrameSplitter:
    """A splitter of a byte stream into the payloads of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes and yield every complete payload. Raises ValueError for a length over the limit."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame claims {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
                end = start + _LENGTH.size + length
                if len(buffer) < end:
                    return
                payload = bytes(memoryview(buffer)[start + _LENGTH.size : end])
                start = end
                yield payload
        finally:
            del buffer[:start]


class EngineProcessChannel:
    """The engine's end of the socket: blocking sends, receives with a timeout."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._splitter = FrameSplitter()
        self.is_closed = False

    def send(self, message: Message) -> None:
        """Send one message; blocks while the socket buffer is full. Raises PeerGoneError if the peer has ended."""
        try:
            self._socket.settimeout(None)
            self._socket.sendall(encode_frame(message))
        except OSError as error:
            raise PeerGoneError(f"the other end of the channel is gone: {error}") from error

    def receive_payloads(self, timeout: float) -> list[bytes]:
        """Return the available payloads, waiting up to `timeout` seconds for the first byte.

        Sets `is_closed` when the peer has closed the channel.
        """
        payloads: list[bytes] = []
        self._socket.settimeout(timeout)
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except (BlockingIOError, TimeoutError):
                return payloads
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                return payloads
            payloads.extend(self._splitter.feed(data))
            self._socket.settimeout(0)


class _Letter:
    """The requests of one message that are still wanted."""

    def __init__(self, message: Submit) -> None:
        self.message: Submit | None = message  # None: all were given up
        self.wanted = {choice.request_id for choice in message.choices}


class UnsentRequests:
    """The requests that the engine process has not been sent yet, since it reads nothing during a step.

    Tenants take turns, and a request that is given up leaves nothing behind. So all that waits belongs to live
    requests, whose bytes are leased with a share per tenant (byte_budget.py).
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[_Letter]] = {}  # by tenant, the next one first
        self._letters: dict[str, _Letter] = {}  # by request id

    def push(self, message: Submit) -> None:
        """Add the requests of one message."""
        letter = _Letter(message)
        self._queues.setdefault(message.tenant, deque()).append(letter)
        self._letters |= dict.fromkeys(letter.wanted, letter)

    def remove_request(self, request_id: str) -> bool:
        """Remove a request and return whether it was here."""
        letter = self._letters.pop(request_id, None)
        if letter is None:
            return False
        letter.wanted.discard(request_id)
        if not letter.wanted:
            letter.message = None
        return True

    def pop(self) -> Submit | None:
        """Remove and return the next message, without the requests that were given up; None if there is none."""
        while self._queues:
            tenant = next(iter(self._queues))
            queue = self._queues.pop(tenant)
            letter = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            if letter.message is None:
                continue
            for request_id in letter.wanted:
                del self._letters[request_id]
            choices = [choice for choice in letter.message.choices if choice.request_id in letter.wanted]
            return msgspec.structs.replace(letter.message, choices=choices)
        return None
