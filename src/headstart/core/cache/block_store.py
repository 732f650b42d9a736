"""The seam between the engine and a block store outside the pool. No disk, no threads.

A store is a cache, never the source of truth: any irregularity of a block is a counted miss, and the block is
computed. A load names hash, parent hash and tokens, and returns only a block that agrees in all three. Every method is
called from the engine's thread, returns at once (except `wait`) and never raises.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headstart.core.cache.hashing import BlockHash

Data = bytes | bytearray | memoryview
BlockSource = Callable[[int, int], Data | None]
"""Map (block, version) to the block's content in canonical form, or to None if the block has been reallocated since.
Callable from any thread, while the engine computes.
"""


class BlockKey(NamedTuple):
    """The full identity of a block: its hash, its parent's hash, and its packed token ids."""

    block_hash: BlockHash
    parent: BlockHash
    tokens: bytes


class BlockLoadPart(NamedTuple):
    """The next blocks of one load, verified and in order. After `is_last` the remaining ones are misses."""

    load_id: int
    data: tuple[Data, ...]  # one per block, canonical form; valid until `BlockStore.release_loaded`
    is_last: bool


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot; counters run since start. Units: blocks, bytes, seconds.

    `misses` and `lost_writes` are counted by reason; see docs/store.md for what each means.
    """

    num_blocks: int = 0  # loadable: of this model and block size
    num_bytes: int = 0  # of all files in the folder, of all processes
    max_bytes: int = 0  # current size limit: the configured one, or less on a disk that is nearly full
    num_segments: int = 0
    num_pending: int = 0  # blocks waiting to be written
    pending_seconds: float = 0.0  # since the first of them was computed: what a kill would lose
    loaded_blocks: int = 0  # the hits
    loaded_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict[str, int])
    written_blocks: int = 0
    written_bytes: int = 0
    lost_writes: dict[str, int] = field(default_factory=dict[str, int])  # blocks that were offered and not written
    evicted_blocks: int = 0  # removed to stay below max_bytes
    degraded: str = ""  # why the store is not used at present; empty: it is used
    num_degraded: int = 0  # times that the store became degraded
    load_bytes_per_s: float = 0.0  # while loading; 0: not measured yet
    write_bytes_per_s: float = 0.0  # while writing


class BlockStore(Protocol):
    """A store of blocks outside the pool, of one model in one canonical form."""

    def start_writing_from(self, source: BlockSource) -> None:
        """Start write-behind of offered blocks, which are read from `source`."""
        ...

    def contains(self, block_hash: BlockHash) -> bool:
        """Return whether a load of this block would probably succeed; from memory, O(1)."""
        ...

    def should_write(self, block_hash: BlockHash) -> bool:
        """Return whether an offer of this block would probably be written; from memory, O(1)."""
        ...

    def expected_load_seconds(self, num_blocks: int, first: BlockHash | None = None) -> float:
        """Return the expected duration of a load of `num_blocks` begun now, queued loads included; inf: do not load.

        `first` is the first of them: it decides which tier of several they come from. 0.0 until something has been
        measured.
        """
        ...

    def begin_load(self, keys: Sequence[BlockKey]) -> int:
        """Begin to load these blocks, in order, up to the first that is not available. Returns the load's id."""
        ...

    def cancel_load(self, load_id: int, *, is_late: bool) -> None:
        """Cancel a load: it returns nothing more. `is_late`: because it took too long."""
        ...

    def poll_loads(self) -> list[BlockLoadPart]:
        """Return the blocks loaded since the last call, in the order of their loads."""
        ...

    def release_loaded(self, loaded: BlockLoadPart) -> None:
        """Release the data, which have been copied and may be overwritten."""
        ...

    def wait_for_any_load(self, timeout: float) -> None:
        """Block until `poll` would return something, or for `timeout` seconds."""
        ...

    def offer_block(self, block: int, version: int, key: BlockKey) -> None:
        """Offer a published block, which is written if there is space and time. O(1)."""
        ...

    def mark_used(self, block_hashes: Sequence[BlockHash]) -> None:
        """Mark these blocks as used: a request takes them over now, loaded or not. O(1).

        `block_hashes` are the block hashes of one chain, in a list that is not modified later.
        """
        ...

    def set_pinned_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        """Pin only these block hashes: their blocks are written first and never removed for space."""
        ...

    def discard_corrupt(self, block_hashes: Sequence[BlockHash]) -> None:
        """Discard blocks that are or may be corrupt: they are never loaded again, by this or any other process."""
        ...

    def clear(self) -> None:
        """Remove every block, of every model and process that uses the folder."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self, max_seconds: float = float("inf")) -> None:
        """Write pending blocks, for some seconds and at most `max_seconds`, and stop. Idempotent."""
        ...
