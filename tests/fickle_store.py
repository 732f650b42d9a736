"""Test doubles around a real store: one that is slow and fails in every way it may, and one that lies (a planted bug).

Latencies are counted in polls, not slept, and all chance comes from an rng, so that a run can be had again.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from headstart.core.cache.block_store import BlockKey, BlockLoadPart, BlockSource, BlockStore, StoreStats
from headstart.core.cache.hashing import BlockHash
from headstart.store.format import HEADER_BYTES, decode_segment_header

LOAD_SECONDS = 300.0


@dataclass
class Troubles:
    """Probabilities of each behaviour, per call; what did happen is counted below."""

    slow: float = 0.5  # a load waits for some polls
    very_slow: float = 0.05  # and so long that no request should still wait for it
    short: float = 0.1  # a load ends early
    spoil: float = 0.1  # something on disk is overwritten before a load: a bit, or a kilobyte
    refuse: float = 0.05  # expected_seconds says inf
    boast: float = 0.02  # contains says yes to what is not there
    unwritten: float = 0.05  # an offer is lost
    late: float = 0.4  # an offer is passed on many polls later, when its block may hold something else
    flush: float = 0.2  # an offer is waited for until it is on disk

    loads: int = 0
    loaded_blocks: int = 0
    shortened: int = 0
    spoilt: int = 0
    delayed: int = 0
    cancelled: int = 0
    misses: int = 0


@dataclass(eq=False)
class _Load:
    """One load as its caller sees it."""

    load_id: int
    parts: deque[BlockLoadPart]
    polls: int  # before the next part is handed over


@dataclass(eq=False)
class _Late:
    """An offer that is held back for so many polls."""

    polls: int
    block: int
    version: int
    key: BlockKey


@dataclass
class FickleStore:
    """A BlockStore over `inner`. What it hands out is a copy of its own that turns to garbage after `release_loaded`.

    A `direct` one adds no latencies and shortens no loads: `inner` does what it does, in its own time.
    """

    inner: BlockStore
    folder: Path
    rng: Random
    troubles: Troubles = field(default_factory=Troubles)
    is_direct: bool = False
    _loads: deque[_Load] = field(default_factory=deque[_Load], init=False)
    _late: list[_Late] = field(default_factory=list[_Late], init=False)
    _handed_out: list[BlockLoadPart] = field(default_factory=list[BlockLoadPart], init=False)

    def start_writing_from(self, source: BlockSource) -> None:
        self.inner.start_writing_from(source)

    def contains(self, name: BlockHash) -> bool:
        return self.inner.contains(name) or self._happens(self.troubles.boast)

    def should_write(self, name: BlockHash) -> bool:
        return not self.contains(name)

    def expected_load_seconds(self, num_blocks: int, first: BlockHash | None = None) -> float:
        return float("inf") if self._happens(self.troubles.refuse) else 0.0

    def begin_load(self, keys: Sequence[BlockKey]) -> int:
        """Loads at once, but tells later."""
        troubles = self.troubles
        troubles.loads += 1
        if self._happens(troubles.spoil):
            self._spoil(self.rng.choice(keys).block_hash)
        if self.is_direct:
            return self.inner.begin_load(keys)
        asked = list(keys)
        if self._happens(troubles.short):
            troubles.shortened += 1
            asked = asked[: self.rng.randrange(len(asked) + 1)]
        load_id = self.inner.begin_load(asked or list(keys[:1]))
        parts = self._whole(load_id) if asked else []
        if not asked:
            self._whole(load_id)
        parts = [part for loaded in parts for part in self._cut(loaded)] or [BlockLoadPart(load_id, (), True)]
        parts[-1] = parts[-1]._replace(is_last=True)
        troubles.loaded_blocks += sum(len(part.data) for part in parts)
        troubles.misses += len(keys) > sum(len(part.data) for part in parts)
        self._loads.append(_Load(load_id, deque(parts), self._delay()))
        return load_id

    def cancel_load(self, load_id: int, *, is_late: bool = True) -> None:
        self.troubles.cancelled += is_late
        if self.is_direct:
            self.inner.cancel_load(load_id, is_late=is_late)
        self._loads = deque(load for load in self._loads if load.load_id != load_id)

    def poll_loads(self) -> list[BlockLoadPart]:
        """One tick: the oldest load comes nearer by one poll."""
        ready: list[BlockLoadPart] = []
        self._pass_on()
        if self.is_direct:
            ready = [self._copied(loaded) for loaded in self.inner.poll_loads()]
        while self._loads:
            load = self._loads[0]
            if load.polls:
                load.polls -= 1
                break
            ready.append(load.parts.popleft())
            if load.parts:
                load.polls = self.rng.choice([0, 0, 1, 3])
            else:
                self._loads.popleft()
        self._handed_out += ready
        return ready

    def release_loaded(self, loaded: BlockLoadPart) -> None:
        found = [index for index, other in enumerate(self._handed_out) if other is loaded]
        assert len(found) == 1, "handed back twice, or never handed out"
        del self._handed_out[found[0]]
        for data in loaded.data:
            view = memoryview(data)
            view[:] = b"\xff" * len(view)  # NaN, for a reader that kept it

    def wait_for_any_load(self, timeout: float) -> None:
        if self.is_direct:
            self.inner.wait_for_any_load(timeout)
        elif self._loads:
            self._loads[0].polls = 0

    def offer_block(self, block: int, version: int, key: BlockKey) -> None:
        if self._happens(self.troubles.unwritten):
            return
        if self._happens(self.troubles.late):
            self._late.append(_Late(self.rng.randint(1, 40), block, version, key))
            return
        self.inner.offer_block(block, version, key)
        if self._happens(self.troubles.flush):
            give_up = time.monotonic() + LOAD_SECONDS
            while not self.inner.contains(key.block_hash) and self.inner.stats().num_pending:
                assert time.monotonic() < give_up, "an offer is neither written nor lost"
                time.sleep(0.002)

    def mark_used(self, names: Sequence[BlockHash]) -> None:
        self.inner.mark_used(names)

    def set_pinned_blocks(self, names: Iterable[BlockHash]) -> None:
        self.inner.set_pinned_blocks(names)

    def discard_corrupt(self, names: Sequence[BlockHash]) -> None:
        self.inner.discard_corrupt(names)

    def clear(self) -> None:
        self.inner.clear()

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self, max_seconds: float = float("inf")) -> None:
        self.inner.close(max_seconds)

    def check_idle(self) -> None:
        """Nothing is owed to either side any more."""
        assert not self._handed_out, "a load was never handed back"

    def _pass_on(self) -> None:
        """Passes on the late offers that are due."""
        for late in self._late:
            late.polls -= 1
            if not late.polls:
                self.inner.offer_block(late.block, late.version, late.key)
        self._late = [late for late in self._late if late.polls]

    def _happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _delay(self) -> int:
        if self._happens(self.troubles.very_slow):
            self.troubles.delayed += 1
            return 10_000
        if self._happens(self.troubles.slow):
            self.troubles.delayed += 1
            return self.rng.randint(1, 12)
        return 0

    def _whole(self, load_id: int) -> list[BlockLoadPart]:
        """All of one load of the inner store, copied."""
        parts: list[BlockLoadPart] = []
        give_up = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < give_up:
            self.inner.wait_for_any_load(0.01)
            for loaded in self.inner.poll_loads():
                assert loaded.load_id == load_id, "of a load that is over"
                parts.append(self._copied(loaded))
            if parts and parts[-1].is_last:
                return parts
        raise AssertionError("a load never ended")

    def _copied(self, loaded: BlockLoadPart) -> BlockLoadPart:
        copy = loaded._replace(data=tuple(map(bytearray, loaded.data)))
        self.inner.release_loaded(loaded)
        return copy

    def _cut(self, loaded: BlockLoadPart) -> list[BlockLoadPart]:
        """The same in pieces."""
        data, pieces = loaded.data, list[BlockLoadPart]()
        while data:
            size = self.rng.randint(1, len(data))
            pieces.append(BlockLoadPart(loaded.load_id, data[:size], False))
            data = data[size:]
        return pieces

    def _spoil(self, name: BlockHash) -> None:
        """Overwrites a bit, or up to a kilobyte, of the entry or the content of a block on disk."""
        for path in sorted(self.folder.glob("*.kv")):
            raw = path.read_bytes()
            at = raw.find(name, HEADER_BYTES)
            if at < 0:
                continue
            header = decode_segment_header(raw[:HEADER_BYTES], bytes.fromhex(path.stem))
            size = header.shape.table_entry_bytes
            first, num = at - (at - HEADER_BYTES) % size, size
            if self._happens(0.8):
                first, num = header.payload_offset((at - HEADER_BYTES) // size), header.shape.block_bytes
            first += self.rng.randrange(num)
            was = raw[first : first + self.rng.choice([1, 1024])] or b"\0"
            now = bytes([was[0] ^ 1 << self.rng.randrange(8)]) if len(was) == 1 else self.rng.randbytes(len(was))
            with path.open("r+b") as file:
                file.seek(first)
                file.write(now)
            self.troubles.spoilt += 1


@dataclass
class LyingStore(FickleStore):
    """The planted bug: the right name with another block's content. `lies` counts how often."""

    lies: int = 0
    _others: list[bytes] = field(default_factory=list[bytes], init=False)

    def poll_loads(self) -> list[BlockLoadPart]:
        ready = super().poll_loads()
        for loaded in ready:
            for data in loaded.data:
                self._lie(memoryview(data))
        return ready

    def _lie(self, data: memoryview) -> None:
        own = bytes(data)
        strangers = [other for other in self._others if other != own]
        if strangers:
            data[:] = self.rng.choice(strangers)
            self.lies += 1
        self._others.append(own)
