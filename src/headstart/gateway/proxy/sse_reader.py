"""Relayed event streams: complete events only, the time of the first token, and the engine's final usage.

An event is relayed when it is complete; engines write complete events, so nothing waits. One that is long is relayed as
it arrives, and only its beginning and its end are read. Of the others only the event with the usage is decoded: JSON
escapes quotation marks inside text, so generated text cannot fake the usage key.
"""

import re
from typing import Any, NamedTuple

import msgspec

from headstart.apis.api import LINES, OPENAI_END, StreamEnding
from headstart.gateway.proxy.upstream import InvalidReplicaResponseError
from headstart.router.routing_request import ReportedTokenUsage

KEPT_EVENT_BYTES = 1 << 20
"""Most bytes of an event that are kept until it is complete; see HeldBytesBudget.

A prompt of 128,000 tokens echoed with 20 alternatives each is one event of 137 MB.
"""
BEGINNING_BYTES = 4_096  # of a long event
TAIL_BYTES = 16 << 10  # of a long event, or of a long answer, whose usage is at its end
MAX_COMMENT_BYTES = 1 << 20  # between two events with data; engines send a few bytes of comments every few seconds
MAX_COUNT = 2**31 - 1  # tokens: more than any real answer has
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_DATA = re.compile(rb"^data:", re.MULTILINE)
_END = re.compile(rb"\r?\n\r?\n")
_LONG = re.compile(rb"(?:(?:event|id|retry):[^\n]*\n){0,3}data:\s*\{")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Tokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None  # of the Responses and the Messages API
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None  # of the Messages API, where input_tokens are those behind
    cache_creation_input_tokens: int | None = None

    def counts(self) -> tuple[int, int | None, int | None]:
        """Return the prompt's tokens, those of them that were cached, and the output's tokens; None: not reported."""
        if self.input_tokens is None:
            details, prompt = self.prompt_tokens_details, self.prompt_tokens
            output = self.output_tokens if self.completion_tokens is None else self.completion_tokens
            return prompt, details.cached_tokens if details else None, output
        if self.cache_read_input_tokens is None:
            details = self.input_tokens_details
            return self.input_tokens, details.cached_tokens if details else None, self.output_tokens
        cached = self.cache_read_input_tokens
        return self.input_tokens + cached + (self.cache_creation_input_tokens or 0), cached, self.output_tokens


class _Inner(msgspec.Struct):
    usage: _Tokens | None = None


class _UsageBody(msgspec.Struct):
    usage: _Tokens | None = None
    choices: list[msgspec.Raw] | None = None
    response: _Inner | None = None  # of an event of the Responses API
    message: _Inner | str | None = None  # of an event of the Messages API


class ReportedUsage(NamedTuple):
    """The usage that an engine reports at the end of a request; `usage` only with the number of cached tokens."""

    usage: ReportedTokenUsage | None = None
    output_tokens: int | None = None


_DECODER = msgspec.json.Decoder(_UsageBody)


def read_usage(document: bytes) -> ReportedUsage:
    """Return the usage in a complete answer or in the data of an event; empty for anything else."""
    try:
        return _checked_usage(_DECODER.decode(document))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ReportedUsage()


def read_usage_at_end(tail: bytes) -> ReportedUsage:
    """Return the usage in the tail of a complete answer, from the last usage object on; empty if there is none."""
    found = list(_USAGE.finditer(tail))
    return read_usage(b"{" + tail[found[-1].start() :]) if found else ReportedUsage()


class SSEStreamReader:
    """One event stream with an end as `end` says.

    `hides_usage`: the router requested the usage event, not the client.
    """

    def __init__(self, end: StreamEnding = OPENAI_END, *, hides_usage: bool = False) -> None:
        self.reported = ReportedUsage()
        self.has_data = False  # an event with data was seen: from now on the client has part of this answer
        self.is_done = False
        self.first = b""  # the data of the first event with data
        self.num_comment_bytes = 0  # since the last event with data
        self.num_rest_bytes = 0  # of an incomplete event
        self.num_events = 0  # with data; counted in streams of named events only
        self.is_mid_event = False  # a part of a long event was relayed, and its end not yet
        self._seam = b""  # the last bytes of that part
        self._tail = bytearray()
        self._is_last = False  # the long event ends the stream
        self._is_named = end.is_named
        self._end = end.last
        self._hides_usage = hides_usage
        self._rest = bytearray()

    def feed_and_take_relayable(self, piece: bytes) -> bytes:
        """Process a piece of the stream; return the bytes that may be relayed, perhaps none.

        Raises InvalidReplicaResponseError for what is long and no event, and for comments between two events that
        exceed their bound.
        """
        if self.is_mid_event:
            return self._pass_part(piece)
        if self._rest or not piece.endswith(b"\n\n"):
            piece = self._cut(piece)
        if piece:
            self._scan(piece)
            if self.num_comment_bytes > MAX_COMMENT_BYTES:
                raise InvalidReplicaResponseError(f"{MAX_COMMENT_BYTES} bytes of comments without an event")
            if b'"usage"' in piece and _USAGE.search(piece):
                piece = self._without_usage(piece)
        return piece + self._begin_long() if self.num_rest_bytes > KEPT_EVENT_BYTES else piece

    def _begin_long(self) -> bytes:
        """Return the beginning of an event that is too long to be kept. Raises InvalidReplicaResponseError if it has
        no data."""
        beginning, part = bytes(self._rest[:BEGINNING_BYTES]), bytes(self._rest)
        found = _LONG.match(beginning)
        if found is None:
            raise InvalidReplicaResponseError(f"more than {KEPT_EVENT_BYTES} bytes that begin like no event")
        if not self.has_data:
            self.has_data, self.first = True, beginning[found.end() - 1 :]
        self.num_comment_bytes = 0
        self.num_events += self._is_named
        self._is_last = self._is_named and self._end.search(beginning) is not None
        self._rest, self.num_rest_bytes = bytearray(), 0
        self.is_mid_event, self._seam, self._tail = True, part[-3:], bytearray(part[-TAIL_BYTES:])
        return part

    def _pass_part(self, piece: bytes) -> bytes:
        """Return a part of a long event, and what follows its end as `feed` does."""
        found = _END.search(self._seam + piece)
        end = len(piece) if found is None else found.end() - len(self._seam)
        self._tail += piece[:end]
        del self._tail[:-TAIL_BYTES]
        if found is None:
            self._seam = (self._seam + piece)[-3:]
            return piece
        self.is_mid_event, self._seam = False, b""
        self._add(read_usage_at_end(bytes(self._tail).rstrip()))
        self.is_done = self.is_done or self._is_last
        return piece[:end] + (self.feed_and_take_relayable(piece[end:]) if end < len(piece) else b"")

    def flush(self) -> bytes:
        """Return the incomplete rest at the end of the stream."""
        rest, self._rest = bytes(self._rest), bytearray()
        self.num_rest_bytes = 0
        if rest:
            self._scan(rest)
        return rest

    def _cut(self, piece: bytes) -> bytes:
        """Return the complete events in the kept rest and `piece`; keep what follows them. Looks at every byte once."""
        rest = self._rest
        overlap = min(len(rest), 3)  # of a terminator that is one byte longer
        end = _last_end(bytes(rest[len(rest) - overlap :]) + piece) - overlap
        if end <= 0:
            rest += piece
            whole = b""
        else:
            whole = bytes(rest) + piece[:end]
            self._rest = rest = bytearray(piece[end:])
        self.num_rest_bytes = len(rest)
        return whole

    def _scan(self, piece: bytes) -> None:
        if not (self.has_data and piece.startswith(b"data:")):
            data = _DATA.search(piece)
            if data is None:
                self.num_comment_bytes += len(piece)
                return
            if not self.has_data:
                self.has_data = True
                end = _END.search(piece, data.start())
                self.first = _data_of(piece[data.start() : end.start() if end is not None else len(piece)])
        self.num_comment_bytes = 0
        if self._is_named:
            self.num_events += len(_DATA.findall(piece))
        if (self._is_named or b"[DONE]" in piece) and self._end.search(piece):
            self.is_done = True

    def _without_usage(self, piece: bytes) -> bytes:
        """Read the usage; remove its event if the client did not request it."""
        kept, start = list[bytes](), 0
        for end in [match.end() for match in _END.finditer(piece)]:
            event, start = piece[start:end], end
            if not (_USAGE.search(event) and self._read(event) and self._hides_usage):
                kept.append(event)
        return b"".join([*kept, piece[start:]])

    def _read(self, event: bytes) -> bool:
        """Return whether the event contains the usage and nothing else."""
        try:
            decoded = _DECODER.decode(_data_of(event))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        self._add(_checked_usage(decoded))
        return decoded.usage is not None and decoded.choices == []

    def _add(self, reported: ReportedUsage) -> None:
        if reported != ReportedUsage():
            before = self.reported
            output = before.output_tokens if reported.output_tokens is None else reported.output_tokens
            self.reported = ReportedUsage(reported.usage or before.usage, output)


def _data_of(event: bytes) -> bytes:
    lines = event.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))


def _last_end(piece: bytes) -> int:
    """Return the end of the last complete event in `piece`; 0: there is none."""
    return max((at + len(end) for end in (b"\n\n", b"\r\n\r\n") if (at := piece.rfind(end)) >= 0), default=0)


def _checked_usage(decoded: Any) -> ReportedUsage:
    inner = decoded.response or (decoded.message if isinstance(decoded.message, _Inner) else None)
    usage = decoded.usage or (inner.usage if inner is not None else None)
    if usage is None:
        return ReportedUsage()
    return _plausible(*usage.counts())


class _Counts(msgspec.Struct):
    prompt_eval_count: int = 0
    prompt_eval_cached_count: int | None = None
    eval_count: int | None = None


_LINE_DECODER = msgspec.json.Decoder(_Counts)


class JSONLinesReader:
    """One stream of lines. Ollama's last line has the counts of tokens."""

    is_mid_event = False  # no part of a line is relayed
    num_comment_bytes = 0  # there are no comments

    def __init__(self, end: StreamEnding) -> None:
        self.reported = ReportedUsage()
        self.has_data = False
        self.is_done = False
        self.first = b""
        self.num_rest_bytes = 0
        self.num_events = 0
        self._end = end.last
        self._rest = b""

    def feed_and_take_relayable(self, piece: bytes) -> bytes:
        """Process a piece of the stream; return its complete lines. Raises InvalidReplicaResponseError for an
        endless line."""
        whole, newline, self._rest = (self._rest + piece).rpartition(b"\n")
        self.num_rest_bytes = len(self._rest)
        if self.num_rest_bytes > KEPT_EVENT_BYTES:
            raise InvalidReplicaResponseError(f"more than {KEPT_EVENT_BYTES} bytes without a line's end")
        for line in filter(None, map(bytes.strip, whole.split(b"\n"))):
            self.num_events += 1
            if not self.has_data:
                self.has_data, self.first = True, line
            if self._end.search(line):
                self.is_done = True
                self.reported = read_ollama_usage(line)
        return whole + newline

    def flush(self) -> bytes:
        """Return the incomplete rest at the end of the stream."""
        rest, self._rest, self.num_rest_bytes = self._rest, b"", 0
        return rest


def read_ollama_usage(line: bytes) -> ReportedUsage:
    """Return the counts in the last line, or in a whole answer; empty for anything else."""
    try:
        counts = _LINE_DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ReportedUsage()
    return _plausible(counts.prompt_eval_count, counts.prompt_eval_cached_count, counts.eval_count)


def read_answer_usage(end: StreamEnding, document: bytes) -> ReportedUsage:
    """Return the usage in a complete answer of an API."""
    return read_ollama_usage(document) if end.media_type == LINES else read_usage(document)


def make_stream_reader(end: StreamEnding, *, hides_usage: bool) -> SSEStreamReader | JSONLinesReader:
    """Return the reader of a stream of an API."""
    return JSONLinesReader(end) if end.media_type == LINES else SSEStreamReader(end, hides_usage=hides_usage)


def _plausible(prompt: Any, cached: int | None, output: int | None) -> ReportedUsage:
    is_true = cached is not None and 0 <= cached <= prompt <= MAX_COUNT and prompt > 0
    return ReportedUsage(
        ReportedTokenUsage(prompt, cached) if is_true and cached is not None else None,
        output if output is not None and 0 <= output <= MAX_COUNT else None,
    )
