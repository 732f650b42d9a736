"""PrefixIndex: the router's estimate of one replica's prefix cache, approximate or from KV events."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headstart.core.cache.hashing import BlockHash
from headstart.router.index.first_blocks import FirstBlockTable


@dataclass(slots=True, eq=False)
class Reservation:
    """The state of one request in flight in a prefix index; passed back with every later event of the request."""

    block_hashes: list[BlockHash]
    hit: int  # blocks predicted to be cached when it was sent
    sure: int = field(init=False)  # of those, cached unless evicted: not still being computed by another request
    blocks: MutableSequence[int] = field(init=False)  # of the approximate index's pool
    serials: MutableSequence[int] = field(init=False)  # last uses of the hit's blocks, before this one
    missing: int = 0  # blocks of its prompt for which there was no space
    evicted: bool = False  # the first block after the hit was evicted before
    doubtful: bool = False  # that block was dropped by an inferred reset, and may be cached
    num_losses: int = 0  # noticed before it was sent
    guess: "Reservation | None" = None  # of the approximate index beside a KV event index
    reported: bool = False
    epoch: int = 0

    def __post_init__(self) -> None:
        self.sure, self.blocks, self.serials = self.hit, [], []  # factories of fields cost three times as much


class PrefixIndex(Protocol):
    """The index of one replica's cache. `block_hashes` are the hashes of a prompt's full blocks, from the first on.

    `number` is that in the router's table of first blocks. `handle` is that of its blocks in compiled code, which can
    match many indexes at once; 0: it is asked by `match`.
    """

    first_blocks: FirstBlockTable
    number: int
    handle: int

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return whether the block is predicted to be there."""
        ...

    def num_cached_prefix_blocks(self, block_hashes: list[BlockHash], now: float, near: int = 0) -> int:
        """Return the number of leading blocks predicted to be cached. Has no visible effect.

        `near` is a guess, which makes it faster if it is right: other replicas often have as many.
        """
        ...

    def record_sent(self, block_hashes: list[BlockHash], now: float) -> Reservation:
        """Record a request sent to the replica."""
        ...

    def record_prefilled(self, reservation: Reservation, now: float) -> None:
        """Record its first token: its prompt is computed."""
        ...

    def record_finished(self, reservation: Reservation, block_hashes: list[BlockHash], now: float) -> None:
        """Record its successful end; `block_hashes` include the blocks of its output, where known."""
        ...

    def record_failed(self, reservation: Reservation, num_kept: int = 0) -> None:
        """Record its failure; of the blocks it was to compute, the leading `num_kept` blocks are expected to be there.

        Which blocks were computed is not known.
        """
        ...

    def on_hit_reported(self, reservation: Reservation, num_blocks: int, now: float) -> None:
        """Record the reported number of its leading blocks that were cached."""
        ...

    def expected_evicted_reusable_blocks(self, num_blocks: int) -> float:
        """Return how many blocks evicted for `num_blocks` new ones should be requested again. Changes nothing."""
        ...

    def count_in_use_and_prefix(self, block_hashes: list[BlockHash]) -> tuple[int, int]:
        """Return the blocks that requests in flight use, and how many leading ones of `block_hashes` are among them."""
        ...

    @property
    def num_unreserved_blocks(self) -> float:
        """Blocks that requests in flight neither hold nor wait for; below 0: so many are waited for; inf: not known."""
        ...

    @property
    def cache_capacity_blocks(self) -> int:
        """Number of blocks of the cache, as far as known."""
        ...

    @property
    def prompt_based_index_or_self(self) -> "PrefixIndex":
        """The index to ask about prompts whose hashes the replica's events cannot contain."""
        ...

    @property
    def relies_on_unusable_events(self) -> bool:
        """Whether it depends on events of which none is usable: then `prompt_based_index_or_self` is better."""
        ...

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def on_cache_reset(self) -> None:
        """Record that the replica was told to empty its cache, and did."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return its mode and size as plain values, for /v1/fleet."""
        ...
