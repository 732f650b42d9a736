"""SimStore: an offload tier in virtual time: a larger, slower cache beside one pool, with least recently used eviction.

Blocks are written as soon as they are published and cost nothing to write. Loads run one after the other; the scheduler
decides as it does with a real store: load if that is expected to be faster than computing.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from headstart.core.cache.block_store import BlockKey, BlockLoadPart, BlockSource, StoreStats
from headstart.core.cache.hashing import BlockHash

BLOCK_CONTENT = b"\0"
"""The content of every simulated block: the scheduler copies it, and its size costs nothing."""


@dataclass(frozen=True, slots=True)
class OffloadTier:
    """One offload tier of a replica: main memory or a disk."""

    num_blocks: int
    tokens_per_s: float  # of loads
    latency: float = 0.0  # seconds, of each load


class SimStore:
    """A block store without content. `now` is set by its owner before each step; a load is ready at its time."""

    def __init__(self, tier: OffloadTier, block_size: int) -> None:
        self.tier = tier
        self.now = 0.0
        self.num_loaded = 0  # blocks
        self._block_size = block_size
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self._loads: deque[tuple[float, BlockLoadPart]] = deque()  # (ready at, blocks), in order of time
        self._free_at = 0.0
        self._num_loads = 0
        self._num_evicted = 0

    @property
    def next_load_ready_at(self) -> float:
        """The time at which the next load is complete; inf: there is none."""
        return self._loads[0][0] if self._loads else inf

    def start_writing_from(self, source: BlockSource) -> None:
        """Do nothing: blocks have no content to read."""

    def contains(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def should_write(self, block_hash: BlockHash) -> bool:
        return not self.contains(block_hash)

    def expected_load_seconds(self, num_blocks: int, first: BlockHash | None = None) -> float:
        return max(self._free_at - self.now, 0.0) + self._seconds(num_blocks)

    def begin_load(self, keys: Sequence[BlockKey]) -> int:
        num = sum(1 for _ in takewhile(lambda key: key.block_hash in self._blocks, keys))
        self._num_loads += 1
        self._free_at = max(self.now, self._free_at) + self._seconds(num)
        self._loads.append((self._free_at, BlockLoadPart(self._num_loads, (BLOCK_CONTENT,) * num, is_last=True)))
        return self._num_loads

    def cancel_load(self, load_id: int, *, is_late: bool) -> None:
        """Drop a load; its transfer still takes its time."""
        self._loads = deque(entry for entry in self._loads if entry[1].load_id != load_id)

    def poll_loads(self) -> list[BlockLoadPart]:
        found: list[BlockLoadPart] = []
        while self._loads and self._loads[0][0] <= self.now:
            found.append(self._loads.popleft()[1])
            self.num_loaded += len(found[-1].data)
        return found

    def release_loaded(self, loaded: BlockLoadPart) -> None:
        """Do nothing: there is no buffer."""

    def wait_for_any_load(self, timeout: float) -> None:
        """Do nothing: the replica advances the time to `next_load_ready_at`."""

    def offer_block(self, block: int, version: int, key: BlockKey) -> None:
        self._blocks[key.block_hash] = None
        while len(self._blocks) > self.tier.num_blocks:
            self._blocks.popitem(last=False)
            self._num_evicted += 1

    def mark_used(self, block_hashes: Sequence[BlockHash]) -> None:
        """Mark a chain as used, its head last: its tail is evicted first."""
        for block_hash in reversed(block_hashes):
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)

    def set_pinned_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        """Do nothing: simulated replicas have no pinned prefixes."""

    def discard_corrupt(self, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            self._blocks.pop(block_hash, None)

    def clear(self) -> None:
        self._blocks.clear()

    def stats(self) -> StoreStats:
        return StoreStats(num_blocks=len(self._blocks), loaded_blocks=self.num_loaded, evicted_blocks=self._num_evicted)

    def close(self, max_seconds: float = float("inf")) -> None:
        """Do nothing."""

    def _seconds(self, num_blocks: int) -> float:
        return self.tier.latency + num_blocks * self._block_size / self.tier.tokens_per_s
