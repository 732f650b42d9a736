"""HeldBytes: the memory that the requests of one router hold, in bytes, with one bound for all of them together.

Counted are bodies to be forwarded, texts and tokens of prompts, their block hashes, and what has been read of answers
that are forwarded in one piece. The number of requests is bounded as well (`max_num_queued_reqs`); since a body may
have 4 MiB, that bound alone is not enough.
"""

import sys
from types import TracebackType

from headstart.core.errors import QueueFullError
from headstart.gateway.proxy.request_reader import ReadRequest

MAX_HELD_BYTES = 256 << 20  # about 500 waiting prompts of 128,000 tokens as text
LARGE_BYTES = 1 << 20  # of a body; of larger ones only what a retry needs is kept
_HASH_BYTES = 88  # of a block hash, as an object in a list
_BLOCK = 16  # tokens


class HeldBytes:
    """The sum over all requests in flight."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_refused = 0

    def reserve(self) -> "ByteReservation":
        """Return the reservation of one request, initially of 0 bytes. For use in a `with` statement."""
        return ByteReservation(self)


class ByteReservation:
    """The bytes that one request holds."""

    __slots__ = ("_total", "num_bytes")

    def __init__(self, total: HeldBytes) -> None:
        self._total = total
        self.num_bytes = 0

    def __enter__(self) -> "ByteReservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set(0)

    def grow(self, num_bytes: int) -> None:
        """Add `num_bytes`. Raises QueueFullError if the sum over all requests exceeds the bound."""
        self.set(self.num_bytes + num_bytes)

    def set(self, num_bytes: int) -> None:
        """Set the reservation to `num_bytes`. Raises QueueFullError if it grows and the sum exceeds the bound."""
        total, change = self._total, num_bytes - self.num_bytes
        if change > 0 and total.num_bytes + change > total.max_bytes:
            total.num_refused += 1
            raise QueueFullError(
                f"requests in flight hold {total.num_bytes} bytes, this one {num_bytes} more, and at most "
                f"{total.max_bytes} are held: try again later"
            )
        total.num_bytes += change
        self.num_bytes = num_bytes


def bytes_of(reading: ReadRequest) -> int:
    """Return the approximate number of bytes that a parsed request keeps in memory."""
    prompt = reading.request.prompt
    text = sys.getsizeof(reading.text) if reading.text is not None else 0
    tokens = len(prompt.token_ids) * prompt.token_ids.itemsize
    return len(reading.body) + text + tokens + prompt.num_tokens // _BLOCK * _HASH_BYTES
