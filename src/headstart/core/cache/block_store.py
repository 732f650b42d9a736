"""The seam to blocks outside the pool: what the engine asks of a store, and what it tells it. No disk, no threads.

A store is a cache, never the truth: whatever is odd about a block is a counted miss and the block is computed. Loads
are asked for by name, parent and tokens, and only a block that agrees in all three comes back. Every method is called
from the engine's thread, returns at once (`wait` apart) and never raises.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headstart.core.cache.hashing import BlockHash

Data = bytes | bytearray | memoryview
BlockSource = Callable[[int, int], Data | None]
"""(block, version) -> its content in canonical form, or None if the block has been handed to somebody else since.
May be called from any thread, while the engine computes."""


class BlockKey(NamedTuple):
    """All that tells a block from every other: its name, its parent's name, and its packed token ids."""

    name: BlockHash
    parent: BlockHash
    tokens: bytes


class Loaded(NamedTuple):
    """The next blocks of one load, verified and in order. After `is_last` no more come: what is missing is a miss."""

    load_id: int
    data: tuple[Data, ...]  # one per block, canonical form; valid until `BlockStore.done_with`
    is_last: bool


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot; counters run since start. Units: blocks, bytes, seconds.

    `misses` and `lost_writes` are counted by reason; see docs/api.md for what each means.
    """

    num_blocks: int = 0  # that could be loaded: of this model and block size
    num_bytes: int = 0  # of all files in the folder, whosever they are
    max_bytes: int = 0  # what they may grow to now: the size asked for, or less on a disk that is nearly full
    num_segments: int = 0
    num_pending: int = 0  # blocks waiting to be written
    loaded_blocks: int = 0  # the hits
    loaded_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict[str, int])
    written_blocks: int = 0
    written_bytes: int = 0
    lost_writes: dict[str, int] = field(default_factory=dict[str, int])  # blocks that were to be written and were not
    evicted_blocks: int = 0  # given up to stay below max_bytes
    degraded: str = ""  # why it is not used right now; empty: it is
    num_degraded: int = 0  # times that this began
    load_bytes_per_s: float = 0.0  # while loading; 0: not measured yet
    write_bytes_per_s: float = 0.0  # while writing


class BlockStore(Protocol):
    """Blocks outside the pool, of one model in one canonical form."""

    def start(self, source: BlockSource) -> None:
        """Begins to write behind what is offered, reading it from `source`."""
        ...

    def contains(self, name: BlockHash) -> bool:
        """Whether a load of it would probably succeed; from memory, O(1)."""
        ...

    def expected_seconds(self, num_blocks: int) -> float:
        """How long a load of so many blocks that began now would take, those before it included; inf: do not ask.

        0.0 as long as nothing has been measured.
        """
        ...

    def load(self, keys: Sequence[BlockKey]) -> int:
        """Begins to load these, in order, and stops at the first that cannot be had. Returns the load's id."""
        ...

    def cancel(self, load_id: int, *, is_late: bool) -> None:
        """Nobody waits for it any more: nothing further comes of it. `is_late`: because it took too long."""
        ...

    def poll(self) -> list[Loaded]:
        """What has been loaded since the last call, in the order of its loads."""
        ...

    def done_with(self, loaded: Loaded) -> None:
        """Its data have been copied and may be overwritten."""
        ...

    def wait(self, timeout: float) -> None:
        """Returns as soon as `poll` would give something, or after `timeout` seconds."""
        ...

    def offer(self, block: int, version: int, key: BlockKey) -> None:
        """A block was published: write it if there is room and time. O(1)."""
        ...

    def touch(self, names: Sequence[BlockHash]) -> None:
        """A request takes these over now, loaded or not: they are in use. O(1).

        Names of one chain, in a list that is not modified later.
        """
        ...

    def keep(self, names: Iterable[BlockHash]) -> None:
        """From now on these, and only these, are pinned: written before all others and not given up."""
        ...

    def distrust(self, names: Sequence[BlockHash]) -> None:
        """These are corrupt, or may be: they must not come back, neither from here nor in another process."""
        ...

    def clear(self) -> None:
        """Forgets every block, of every model and process that uses the folder."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Writes what is pending as far as that takes no more than some seconds, and ends. Twice does no harm."""
        ...
