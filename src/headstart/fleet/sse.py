"""Streams of events on their way through: whole events only, the first token's moment, and what the engine says last.

An event is passed on when its end is there; engines write whole events, so nothing waits. Nothing is decoded but the
event that carries the usage: in JSON a quotation mark inside a text is escaped, so its name cannot be faked by one.
"""

import re
from typing import Any, NamedTuple

import msgspec

from headstart.router.ask import Usage

MAX_EVENT_BYTES = 4 * 1024 * 1024  # what has no end after so much is passed on as it is
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_DONE = re.compile(rb"^data:\s*\[DONE\]", re.MULTILINE)
_DATA = re.compile(rb"^data:", re.MULTILINE)
_END = re.compile(rb"\r?\n\r?\n")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Tokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Told(msgspec.Struct):
    usage: _Tokens | None = None
    choices: list[msgspec.Raw] | None = None


class Said(NamedTuple):
    """What an engine said of one request at its end; `usage` only if it tells how much was cached."""

    usage: Usage | None = None
    output_tokens: int | None = None


_DECODER = msgspec.json.Decoder(_Told)


def said(document: bytes) -> Said:
    """What a whole answer, or the data of an event, says; nothing if it is no such thing."""
    try:
        return _said(_DECODER.decode(document))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Said()


class EventStream:
    """One stream. `hides_usage`: the client did not ask for the event that tells of usage, only the router did."""

    def __init__(self, *, hides_usage: bool = False) -> None:
        self.said = Said()
        self.has_data = False  # an event with data went by: from now on the client has a part of this very answer
        self.is_done = False
        self._hides_usage = hides_usage
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Takes in what came; returns what may be passed on, perhaps nothing."""
        if self._rest:
            piece = self._rest + piece
            self._rest = b""
        if not piece.endswith(b"\n\n"):
            end = _last_end(piece)
            if len(piece) - end > MAX_EVENT_BYTES:
                end = len(piece)
            self._rest, piece = piece[end:], piece[:end]
        if piece:
            self._look(piece)
            if _USAGE.search(piece):
                return self._without_usage(piece)
        return piece

    def close(self) -> bytes:
        """What was left without an end when the stream ended."""
        rest, self._rest = self._rest, b""
        if rest:
            self._look(rest)
        return rest

    def _look(self, piece: bytes) -> None:
        self.has_data = self.has_data or _DATA.search(piece) is not None
        self.is_done = self.is_done or _DONE.search(piece) is not None

    def _without_usage(self, piece: bytes) -> bytes:
        """Reads the usage; takes its event out if the client did not ask for it."""
        kept, start = list[bytes](), 0
        for end in [match.end() for match in _END.finditer(piece)]:
            event, start = piece[start:end], end
            if not (_USAGE.search(event) and self._read(event) and self._hides_usage):
                kept.append(event)
        return b"".join([*kept, piece[start:]])

    def _read(self, event: bytes) -> bool:
        """Whether the event tells of usage and nothing else."""
        lines = event.replace(b"\r\n", b"\n").split(b"\n")
        data = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
        try:
            told = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if told.usage is not None:
            self.said = _said(told)
        return told.usage is not None and told.choices == []


def _last_end(piece: bytes) -> int:
    """Where the last whole event in `piece` ends; 0: nowhere."""
    return max((at + len(end) for end in (b"\n\n", b"\r\n\r\n") if (at := piece.rfind(end)) >= 0), default=0)


def _said(told: Any) -> Said:
    usage = told.usage
    if usage is None:
        return Said()
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    known = Usage(usage.prompt_tokens, cached) if cached is not None and usage.prompt_tokens > 0 else None
    return Said(known, usage.completion_tokens)
