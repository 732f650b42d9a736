"""Relayed streams of JSON lines, with the interface of EventStream: complete lines only."""

import msgspec

from headstart.apis.api import LINES, StreamEnd
from headstart.gateway.proxy.sse_reader import KEPT_EVENT_BYTES, MAX_COUNT, EventStream, ReportedUsage, read_usage
from headstart.gateway.proxy.upstream import GarbledError
from headstart.router.routing_request import Usage


class _Counts(msgspec.Struct):
    prompt_eval_count: int = 0
    prompt_eval_cached_count: int | None = None
    eval_count: int | None = None


_DECODER = msgspec.json.Decoder(_Counts)


class LineStream:
    """One stream of lines. Ollama's last line has the counts of tokens."""

    is_mid_event = False  # no part of a line is relayed
    num_comment_bytes = 0  # there are no comments

    def __init__(self, end: StreamEnd) -> None:
        self.reported = ReportedUsage()
        self.has_data = False
        self.is_done = False
        self.first = b""
        self.num_rest_bytes = 0
        self.num_events = 0
        self._end = end.last
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Process a piece of the stream; return its complete lines. Raises GarbledError for an endless line."""
        whole, newline, self._rest = (self._rest + piece).rpartition(b"\n")
        self.num_rest_bytes = len(self._rest)
        if self.num_rest_bytes > KEPT_EVENT_BYTES:
            raise GarbledError(f"more than {KEPT_EVENT_BYTES} bytes without a line's end")
        for line in filter(None, map(bytes.strip, whole.split(b"\n"))):
            self.num_events += 1
            if not self.has_data:
                self.has_data, self.first = True, line
            if self._end.search(line):
                self.is_done = True
                self.reported = line_usage(line)
        return whole + newline

    def close(self) -> bytes:
        """Return the incomplete rest at the end of the stream."""
        rest, self._rest, self.num_rest_bytes = self._rest, b"", 0
        return rest


def line_usage(line: bytes) -> ReportedUsage:
    """Return the counts in the last line, or in a whole answer; empty for anything else."""
    try:
        counts = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ReportedUsage()
    prompt, cached, output = counts.prompt_eval_count, counts.prompt_eval_cached_count, counts.eval_count
    is_true = cached is not None and 0 <= cached <= prompt <= MAX_COUNT and prompt > 0
    return ReportedUsage(
        Usage(prompt, cached) if is_true and cached is not None else None,
        output if output is not None and 0 <= output <= MAX_COUNT else None,
    )


def answer_usage(end: StreamEnd, document: bytes) -> ReportedUsage:
    """Return the usage in a complete answer of an API."""
    return line_usage(document) if end.media_type == LINES else read_usage(document)


def stream_reader(end: StreamEnd, *, hides_usage: bool) -> EventStream | LineStream:
    """Return the reader of a stream of an API."""
    return LineStream(end) if end.media_type == LINES else EventStream(end, hides_usage=hides_usage)
