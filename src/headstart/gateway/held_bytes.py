"""HeldBytesBudget: the memory that the requests of one router hold, in bytes, with one bound for all of them together.

Counted are bodies to be forwarded (also those in files), texts and tokens of prompts, their block hashes, and what has
been read of answers that are forwarded in one piece. The number of requests is bounded as well (`max_num_queued_reqs`);
since a body may have 4 MiB, that bound alone is not enough.
"""

import sys

from headstart.gateway.proxy.request_reader import ParsedRequest
from headstart.http.body_reader import SPOOL_BYTES
from headstart.http.byte_budget import ByteBudget, ByteLease

MAX_HELD_BYTES = 256 << 20  # about 500 waiting prompts of 128,000 tokens as text
MAX_KEPT_BYTES = 8 << 20  # of all answers in one piece that are kept until they are complete
MIN_KEPT_BYTES = 256 << 10  # of one answer, which are kept even beyond that
LARGE_BYTES = SPOOL_BYTES  # of a body; of the prompts of larger ones only the block hashes are kept
_HASH_BYTES = 88  # of a block hash, as an object in a list
_BLOCK = 16  # tokens


class HeldBytesBudget(ByteBudget):
    """The sum over all requests in flight; no request may exceed it, not even alone: replicas' answers count, too."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        super().__init__(max_bytes, "requests in flight", admits_one=False)
        self.num_answer_bytes = 0  # part of held_bytes

    def open_reservation(self, tenant: str = "") -> "ByteReservation":
        """Return the reservation of one request, initially of 0 bytes. For use in a `with` statement."""
        return ByteReservation(self, tenant)


class ByteReservation(ByteLease):
    """The bytes that one request holds."""

    __slots__ = ("_total", "num_answer_bytes")

    def __init__(self, total: HeldBytesBudget, tenant: str) -> None:
        super().__init__(total, tenant)
        self._total = total
        self.num_answer_bytes = 0  # part of num_bytes

    def reserve_answer_bytes(self, num_bytes: int) -> bool:
        """Add `num_bytes` of an answer; return whether more of it may be kept. Raises QueueFullError."""
        self.grow(num_bytes)
        self.num_answer_bytes += num_bytes
        self._total.num_answer_bytes += num_bytes
        return self._total.num_answer_bytes <= MAX_KEPT_BYTES or self.num_answer_bytes <= MIN_KEPT_BYTES

    def release_answer_bytes(self) -> None:
        """Count the answer no longer: it is passed on as it arrives, or another replica's takes its place."""
        self.grow(-self.num_answer_bytes)
        self._total.num_answer_bytes -= self.num_answer_bytes
        self.num_answer_bytes = 0

    def release(self) -> None:
        """Hold nothing. Idempotent."""
        self.release_answer_bytes()
        super().release()


def parsed_request_bytes(reading: ParsedRequest) -> int:
    """Return the approximate number of bytes that a parsed request keeps in memory."""
    prompt = reading.request.prompt
    text = sys.getsizeof(reading.text) if reading.text is not None else 0
    tokens = len(prompt.token_ids) * prompt.token_ids.itemsize
    return len(reading.body) + text + tokens + prompt.num_tokens // _BLOCK * _HASH_BYTES
