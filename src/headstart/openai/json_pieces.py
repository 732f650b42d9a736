"""JSON in pieces: documents whose long lists are built and encoded one slice at a time while they are sent.

`encode` returns the whole document, `pieces` yields the same bytes in pieces. A long list is a `LazilyEncodedList` in
the document, so its items exist only while their slice is encoded. `EncodingTurns` encodes one piece per iteration of
the event loop, over all long responses of the process, so that other tasks run between two pieces.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

SLICE_ITEMS = 128  # of a list whose items may be objects of 20 alternatives: some milliseconds of work
PIECE_BYTES = 64 * 1024  # smaller pieces are joined up to about this size


class LazilyEncodedList:
    """A JSON list of `shape(item)` for every item of the concatenated sequences."""

    __slots__ = ("_kept", "_key", "_parts", "_shape")

    def __init__(
        self,
        parts: Sequence[Sequence[Any]],
        shape: Callable[[Any], Any],
        *,
        kept: dict[str, bytes] | None = None,
        key: str = "",
    ) -> None:
        """With `kept`, the JSON of the first sequence is stored in it under `key`, and reused if present."""
        self._parts = parts
        self._shape = shape
        self._kept = kept
        self._key = key

    def items(self) -> list[Any]:
        """Return every item, shaped."""
        return [self._shape(item) for part in self._parts for item in part]

    def json_slices(self) -> Iterator[bytes]:
        """Yield the JSON of the items without the enclosing brackets, one slice at a time."""
        is_first = True
        for number, part in enumerate(self._parts):
            for text in self._slices_of(part, is_kept=number == 0 and self._kept is not None):
                yield text if is_first else b"," + text
                is_first = False

    def _slices_of(self, part: Sequence[Any], *, is_kept: bool) -> Iterator[bytes]:
        if is_kept and self._kept is not None and self._key in self._kept:
            if self._kept[self._key]:
                yield self._kept[self._key]
            return
        made: list[bytes] = []
        for start in range(0, len(part), SLICE_ITEMS):
            text = encode_json([self._shape(item) for item in part[start : start + SLICE_ITEMS]])[1:-1]
            if is_kept:
                made.append(text)
            yield text
        if is_kept and self._kept is not None:
            self._kept[self._key] = b",".join(made)


def _hook(value: object) -> Any:
    if isinstance(value, LazilyEncodedList):
        return value.items()
    raise NotImplementedError(type(value))


_encoder = msgspec.json.Encoder(enc_hook=_hook)


def encode_json(value: Any) -> bytes:
    """Return compact JSON on one line."""
    return _encoder.encode(value)


def iter_json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the bytes of `encode(value)` in pieces of about PIECE_BYTES, each built on demand."""
    return regroup_pieces(json_fragments(value))


def regroup_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of about PIECE_BYTES."""
    gathered = bytearray()
    for text in parts:
        gathered += text
        if len(gathered) >= PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def json_fragments(value: Any) -> Iterator[bytes]:
    """Yield the bytes of `encode(value)`, a slice of a long list or a value at a time."""
    if isinstance(value, LazilyEncodedList):
        yield b"["
        yield from value.json_slices()
        yield b"]"
    elif isinstance(value, dict):
        sign = b"{"
        for key, inner in value.items():
            yield sign + encode_json(key) + b":"
            yield from json_fragments(inner)
            sign = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator):  # over the items of a list, each built on demand
        sign = b"["
        for item in value:
            yield sign
            yield from json_fragments(item)
            sign = b","
        yield b"]" if sign == b"," else b"[]"
    else:
        yield encode_json(value)


class EncodingTurns:
    """A lock for encoding in pieces: one piece per iteration of the event loop, over all responses of the process."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def yield_pieces(self, source: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the pieces of `source`, each built on demand, and let other tasks run between them."""
        while True:
            async with self._lock:
                piece = next(source, None)
                await asyncio.sleep(0)
            if piece is None:
                return
            yield piece
