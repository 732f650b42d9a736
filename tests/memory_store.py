"""A BlockStore in memory whose latencies and failures are a test's to choose: the null one, for laws and by hand.

Nothing in it knows time: a load arrives some polls later, a block that was offered is read some polls later, by then
perhaps overwritten. Several engines may share one `Shelf`, as replicas share a folder.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from headstart.core.cache.block_store import BlockKey, BlockLoadPart, BlockSource, Data, StoreStats
from headstart.core.cache.hashing import BlockHash

Shelf = dict[BlockHash, tuple[BlockKey, bytes]]


@dataclass
class Habits:
    """The behaviour of a store; each function is asked once per occasion."""

    write_delay: Callable[[], int] = lambda: 0  # polls until an offered block is read
    load_delay: Callable[[], int] = lambda: 0  # polls until the next piece of a load
    piece: Callable[[], int] = lambda: 1_000  # blocks in the next piece
    fails: Callable[[], bool] = lambda: False  # whether the next piece is the last, and is empty
    expected: Callable[[int], float] = lambda num: 0.0


@dataclass
class _Job:
    load_id: int
    keys: list[BlockKey]
    polls: int


@dataclass
class _Offer:
    block: int
    version: int
    key: BlockKey
    polls: int


@dataclass
class MemoryStore:
    """See the module. `shelf` holds what is stored, `log` what was asked."""

    shelf: Shelf = field(default_factory=dict)
    habits: Habits = field(default_factory=Habits)
    loads: list[list[BlockKey]] = field(default_factory=list)
    cancelled: list[tuple[int, bool]] = field(default_factory=list)  # loads, and whether they were late
    used: list[list[BlockHash]] = field(default_factory=list)
    kept: set[BlockHash] = field(default_factory=set)
    num_waits: int = 0
    num_loaded: int = 0
    num_failed: int = 0
    num_overwritten: int = 0
    is_closed: bool = False
    _jobs: list[_Job] = field(default_factory=list)
    _offers: list[_Offer] = field(default_factory=list)
    _source: BlockSource | None = None

    def start_writing_from(self, source: BlockSource) -> None:
        self._source = source

    def contains(self, name: BlockHash) -> bool:
        return name in self.shelf

    def should_write(self, name: BlockHash) -> bool:
        return not self.contains(name)

    def expected_load_seconds(self, num_blocks: int, first: BlockHash | None = None) -> float:
        return self.habits.expected(num_blocks)

    def begin_load(self, keys: Sequence[BlockKey]) -> int:
        self.loads.append(list(keys))
        self._jobs.append(_Job(len(self.loads), list(keys), self.habits.load_delay()))
        return len(self.loads)

    def cancel_load(self, load_id: int, *, is_late: bool) -> None:
        self.cancelled.append((load_id, is_late))
        self._jobs = [job for job in self._jobs if job.load_id != load_id]

    def poll_loads(self) -> list[BlockLoadPart]:
        self._write()
        found: list[BlockLoadPart] = []
        for job in self._jobs:
            if job.polls:
                job.polls -= 1
                continue
            found.append(self._piece(job))
        self._jobs = [job for job in self._jobs if not any(f.load_id == job.load_id and f.is_last for f in found)]
        return found

    def release_loaded(self, loaded: BlockLoadPart) -> None:
        for data in loaded.data:
            assert isinstance(data, bytearray)
            data[:] = b"\xaa" * len(data)  # a reader that kept it sees the change

    def wait_for_any_load(self, timeout: float) -> None:
        self.num_waits += 1

    def offer_block(self, block: int, version: int, key: BlockKey) -> None:
        self._offers.append(_Offer(block, version, key, self.habits.write_delay()))

    def mark_used(self, names: Sequence[BlockHash]) -> None:
        self.used.append(list(names))

    def set_pinned_blocks(self, names: Iterable[BlockHash]) -> None:
        self.kept = set(names)

    def discard_corrupt(self, names: Sequence[BlockHash]) -> None:
        for name in names:
            self.shelf.pop(name, None)
        self._offers = [offer for offer in self._offers if offer.key.block_hash not in names]

    def clear(self) -> None:
        self.shelf.clear()

    def stats(self) -> StoreStats:
        return StoreStats(num_blocks=len(self.shelf), num_pending=len(self._offers))

    def close(self, max_seconds: float = float("inf")) -> None:
        self.is_closed = True

    def flush(self) -> None:
        """Writes everything that was offered."""
        for offer in self._offers:
            offer.polls = 0
        self._write()

    def _write(self) -> None:
        due = [offer for offer in self._offers if not offer.polls]
        self._offers = [offer for offer in self._offers if offer.polls]
        for offer in self._offers:
            offer.polls -= 1
        for offer in due:
            assert self._source is not None
            data: Data | None = self._source(offer.block, offer.version)
            if data is None:
                self.num_overwritten += 1
            else:
                self.shelf[offer.key.block_hash] = offer.key, bytes(data)

    def _piece(self, job: _Job) -> BlockLoadPart:
        if self.habits.fails():
            self.num_failed += 1
            return BlockLoadPart(job.load_id, (), True)
        asked = job.keys[: max(self.habits.piece(), 1)]
        data: list[Data] = []
        for key in asked:
            held = self.shelf.get(key.block_hash)
            if held is None or held[0] != key:
                break
            data.append(bytearray(held[1]))
        self.num_loaded += len(data)
        job.keys = job.keys[len(data) :]
        job.polls = self.habits.load_delay()
        return BlockLoadPart(job.load_id, tuple(data), len(data) < len(asked) or not job.keys)


NEVER = Habits(expected=lambda num: inf)
