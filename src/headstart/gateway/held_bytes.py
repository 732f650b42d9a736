"""HeldBytes: what the requests of one router hold in memory, counted in bytes and bounded for all of them together.

Counted are bodies to be sent on, texts and tokens of prompts, the hashes of their blocks, and what was read of answers
that are passed on in one piece. Requests are bounded in number as well (`max_num_queued_reqs`); since a body may have
4 MiB, that alone bounds nothing.
"""

import sys
from types import TracebackType

from headstart.core.errors import QueueFullError
from headstart.gateway.proxy.request_reader import ReadRequest

MAX_HELD_BYTES = 256 << 20  # some 500 waiting prompts of 128,000 tokens as text
LARGE_BYTES = 1 << 20  # of a body, from which on only what a retry needs is kept
_NAME_BYTES = 88  # of the hash of a block, as an object in a list
_BLOCK = 16  # tokens


class HeldBytes:
    """The sum over all requests under way."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_refused = 0

    def hold(self) -> "ByteReservation":
        """Return the share of one request, nothing yet. To be used in a `with` statement."""
        return ByteReservation(self)


class ByteReservation:
    """What one request holds."""

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
        """Hold more. Raises QueueFullError if all requests together then hold too much."""
        self.set(self.num_bytes + num_bytes)

    def set(self, num_bytes: int) -> None:
        """Hold so much. Raises QueueFullError if it is more than before, and too much with all others."""
        total, change = self._total, num_bytes - self.num_bytes
        if change > 0 and total.num_bytes + change > total.max_bytes:
            total.num_refused += 1
            raise QueueFullError(
                f"requests under way hold {total.num_bytes} bytes, this one {num_bytes} more, and at most "
                f"{total.max_bytes} are held: try again later"
            )
        total.num_bytes += change
        self.num_bytes = num_bytes


def bytes_of(reading: ReadRequest) -> int:
    """Return about how many bytes a request that was read keeps in memory."""
    prompt = reading.ask.prompt
    text = sys.getsizeof(reading.text) if reading.text is not None else 0
    tokens = len(prompt.token_ids) * prompt.token_ids.itemsize
    return len(reading.body) + text + tokens + prompt.num_tokens // _BLOCK * _NAME_BYTES
