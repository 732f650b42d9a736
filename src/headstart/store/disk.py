"""SingleTierStore: blocks in one tier, a folder or a server; the contract is core/cache/block_store.py.

The engine's thread only appends to queues and reads dicts here, and never waits for a tier. Three threads do the rest:
two write (`writer.py`), one reads (`block_loader.py`); a disk or a server that hangs blocks only these.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from headstart.core.cache.block_store import BlockKey, BlockLoadPart, BlockSource, Data, StoreStats
from headstart.core.cache.hashing import BlockHash
from headstart.store.block_loader import LOOK_SECONDS, BlockLoad, BlockLoader, LoadedPiece
from headstart.store.catalog import SegmentCatalog
from headstart.store.files import FileSystemCalls
from headstart.store.format import StoredBlockFormat
from headstart.store.tiers.tier import StorageTier
from headstart.store.writer import BlockOffer, BlockWriter

CLOSE_SECONDS, MAX_CLOSE_SECONDS = 5.0, 60.0  # to write pending blocks: without a written one, and in all
MAX_LOADS = 1024  # in flight at once
MISSES = ("gone", "corrupt", "mismatch", "io", "slow")
KEEP = 0.7  # weight of the past at every measurement
FADE_SECONDS = 5.0  # without a load, after which the estimate begins to decay; also its half-life
PROBE_SECONDS = 2.0  # between two probes after a load that was late
STALE_SECONDS = 30.0  # after which a probe says nothing about the tier any more


class SingleTierStore:
    """A tier of blocks of one size. It ends with close(), with the interpreter, or when it is garbage-collected."""

    def __init__(
        self, tier: StorageTier, block_bytes: int, clock: Callable[[], float] = time.monotonic, *, writes: bool = True
    ) -> None:
        """Read which blocks the tier has; `writes` False: it lacks none. A tier that fails is degraded."""
        self._block_bytes, self._clock, self._writes = block_bytes, clock, writes
        self._catalog = catalog = tier
        self._writer = writer = BlockWriter(catalog, block_bytes, clock)
        self._loader = loader = BlockLoader(catalog, block_bytes, clock)
        writer.refresh_if_due()
        self._estimate = LoadTimeEstimate()
        self._loads: dict[int, BlockLoad] = {}  # loads that are awaited
        self._num_loads, self._num_requested = 0, 0  # loads and blocks, in total
        self._lent: dict[int, bytearray] = {}  # by id: buffers in use by the engine
        self._distrusted: set[BlockHash] | None = set()  # distrusted until the writer has dropped them; None: all are
        self._distrusted_until = 0
        self._misses: dict[str, int] = dict.fromkeys(MISSES, 0)
        self._loaded_blocks = 0
        self._late: BlockKey | None = None  # the first block of a load that was late, until a load is complete again
        self._probed_at = self._measured_at = float("-inf")
        self._is_closed = False
        threads = [
            threading.Thread(target=body, name=f"kv-store-{name}", daemon=True)
            for name, body in (
                ("writer", writer.run),
                ("loader", loader.run),
                ("late-writer", writer.run_overdue_rounds),
            )
        ]
        for thread in threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _end, writer, loader, catalog, threads, max_seconds=float("inf"))

    def start_writing_from(self, source: BlockSource) -> None:
        """Start writing. `source` must not refer to this store, or dropping the store would not end it."""
        self._writer.source = source

    def contains(self, block_hash: BlockHash) -> bool:
        return not self._is_distrusted(block_hash) and self._catalog.contains(block_hash)

    def should_write(self, block_hash: BlockHash) -> bool:
        return self._writes and not self.contains(block_hash)

    def expected_load_seconds(self, num_blocks: int, first: BlockHash | None = None) -> float:
        now, loader = self._clock(), self._loader
        if self._is_closed or loader.health.reason or len(self._loads) >= MAX_LOADS or loader.is_overdue(now):
            return float("inf")
        if self._late is not None:
            self._probe(self._late, now)
            if now - self._measured_at > STALE_SECONDS:
                return float("inf")
            now = self._measured_at  # until a load is complete only a probe may lower what is expected
        return self._estimate.expected(num_blocks + self._num_requested - loader.num_read, now)

    def begin_load(self, keys: Sequence[BlockKey]) -> int:
        now = self._clock()
        if len(self._loads) >= MAX_LOADS:
            self._misses["slow"] += 1
            keys = ()
        self._num_loads += 1
        self._num_requested += len(keys)
        waiting = self._num_requested - self._loader.num_read
        load = self._loads[self._num_loads] = BlockLoad(self._num_loads, keys, now, waiting, len(keys))
        if self._is_closed:
            self._end_load(load)
        else:
            self._cut(load)
            self._estimate.record_load_start(now)
            self._loader.submit(load)
        return load.load_id

    def cancel_load(self, load_id: int, *, is_late: bool) -> None:
        load = self._loads.pop(load_id, None)
        if load is not None:
            load.is_cancelled = True
        if load is not None and is_late:
            now = self._clock()
            self._misses["slow"] += 1
            self._estimate.record_load_timeout(max(1, load.num_waiting), now - load.requested_at, now)
            self._late, self._measured_at = load.keys[0] if load.keys else self._late, float("-inf")

    def poll_loads(self) -> list[BlockLoadPart]:
        self._loader.has_done.clear()
        found: list[BlockLoadPart] = []
        done = self._loader.done
        while done:
            if (loaded := self._take(done.popleft())) is not None:
                found.append(loaded)
        return found

    def release_loaded(self, loaded: BlockLoadPart) -> None:
        if loaded.data and isinstance(first := loaded.data[0], memoryview):
            buffer = self._lent.pop(id(first.obj), None)
            if buffer is not None:
                self._loader.release_buffer(buffer)

    def wait_for_any_load(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        loader = self._loader
        while True:
            loader.has_done.clear()
            self._take_unawaited()
            left = until - time.monotonic()
            if loader.done or left <= 0:
                return
            loader.has_done.wait(left)

    def offer_block(self, block: int, version: int, key: BlockKey) -> None:
        if not self._is_closed:
            self._writer.offer(BlockOffer(block, version, key, self._clock()))

    def mark_used(self, block_hashes: Sequence[BlockHash]) -> None:
        if self._writes and not self._is_closed:
            self._writer.mark_used(block_hashes)

    def set_pinned_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        self._writer.set_pinned_blocks(frozenset(block_hashes))

    def discard_corrupt(self, block_hashes: Sequence[BlockHash]) -> None:
        if self._distrusted_until <= self._writer.num_settled:
            self._distrusted = set()
        if self._distrusted is not None:
            self._distrusted.update(block_hashes)
        self._forget(block_hashes)

    def clear(self) -> None:
        self._distrusted = None
        self._forget(None)

    def stats(self) -> StoreStats:
        now, writer, catalog = self._clock(), self._writer, self._catalog
        return StoreStats(
            num_blocks=catalog.num_blocks,
            num_bytes=catalog.num_bytes,
            max_bytes=catalog.max_bytes,
            num_segments=catalog.num_segments,
            num_pending=writer.num_pending,
            pending_seconds=writer.oldest_pending_seconds(now),
            loaded_blocks=self._loaded_blocks,
            loaded_bytes=self._loaded_blocks * self._block_bytes,
            misses={**self._misses, "corrupt": self._misses["corrupt"] + catalog.num_corrupt},
            written_blocks=writer.written_blocks,
            written_bytes=writer.written_blocks * self._block_bytes,
            lost_writes=writer.num_lost_by_reason(),
            evicted_blocks=writer.evicted_blocks,
            degraded="; ".join(self._loader.fault_descriptions(now) + writer.current_fault_descriptions(now)),
            num_degraded=self._loader.health.num_degraded + writer.num_times_degraded,
            load_bytes_per_s=self._estimate.blocks_per_s() * self._block_bytes,
            write_bytes_per_s=writer.bytes_per_s,
        )

    def close(self, max_seconds: float = float("inf")) -> None:
        """Write pending blocks, for some seconds and at most `max_seconds`, and stop. Idempotent."""
        self._is_closed = True
        for load in list(self._loads.values()):
            self._end_load(load)
        if (alive := self._finalizer.detach()) is not None:
            _end(*alive[2], max_seconds=max_seconds)

    # ------------------------------------------------------------------------------------------------------------

    def _take(self, piece: LoadedPiece) -> BlockLoadPart | None:
        """Return the engine's part of a piece; None if its load is no longer awaited."""
        load, buffer = piece.load, piece.buffer
        if piece.num_blocks:
            self._measured_at = self._clock()
            learn = self._estimate.measured if load.load_id else self._estimate.record_probe
            learn(piece.num_blocks, piece.seconds, piece.latency, self._measured_at)
        is_awaited = load.load_id in self._loads
        num = min(piece.num_blocks, load.num_wanted - load.num_given) if is_awaited else 0
        data: tuple[Data, ...] = ()
        if buffer is not None and num:
            view, size = memoryview(buffer), self._block_bytes
            data = tuple(view[at : at + size] for at in range(0, num * size, size))
            self._lent[id(buffer)] = buffer
        elif buffer is not None:
            self._loader.release_buffer(buffer)
        if not is_awaited:
            return None
        load.num_given += num
        self._loaded_blocks += num
        if piece.miss is not None:
            self._misses[piece.miss] += 1
        is_last = piece.is_last or load.num_given >= load.num_wanted
        if is_last:
            load.is_cancelled = True  # the rest of it is not needed
            self._late = self._late if piece.miss else None
            del self._loads[load.load_id]
        return BlockLoadPart(load.load_id, data, is_last)

    def _probe(self, key: BlockKey, now: float) -> None:
        """Read one block, if due: after a load that was late no request pays for finding out how long loads take."""
        self._take_unawaited()
        if now - self._probed_at > PROBE_SECONDS:
            self._probed_at = now
            self._num_requested += 1
            self._loader.submit(BlockLoad(0, (key,), now, 1, 0))

    def _take_unawaited(self) -> None:
        done = self._loader.done
        while done and done[0].load.load_id not in self._loads:
            self._take(done.popleft())

    def _end_load(self, load: BlockLoad) -> None:
        """End a load of a closed store: blocks not yet handed out are not delivered."""
        load.is_cancelled, load.num_wanted = True, load.num_given
        self._loader.deliver_piece(LoadedPiece(load, None, 0, True, None, 0.0, 0.0))

    def _forget(self, block_hashes: Sequence[BlockHash] | None) -> None:
        self._distrusted_until = self._writer.queue_discard(block_hashes)
        for load in self._loads.values():
            self._cut(load)

    def _cut(self, load: BlockLoad) -> None:
        """Cut a load before its first block that must not be loaded."""
        keys = load.keys[load.num_given : load.num_wanted]
        for place, key in enumerate(keys if self._distrusted_until > self._writer.num_settled else ()):
            if self._is_distrusted(key.block_hash):
                load.num_wanted = load.num_given + place
                load.is_cancelled = not place
                return

    def _is_distrusted(self, block_hash: BlockHash) -> bool:
        if self._distrusted_until <= self._writer.num_settled:
            return False
        return self._distrusted is None or block_hash in self._distrusted


class DiskStore(SingleTierStore):
    """A folder of blocks of one shape that all processes of a machine share."""

    def __init__(
        self,
        folder: Path,
        shape: StoredBlockFormat,
        max_bytes: int,
        *,
        files: FileSystemCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the folder, created if needed. Raises ConfigError for an unusable one, and a size below one block."""
        super().__init__(
            SegmentCatalog(folder, shape, max_bytes, files or FileSystemCalls(), clock), shape.block_bytes, clock
        )


def _end(
    writer: BlockWriter, loader: BlockLoader, catalog: StorageTier, threads: list[threading.Thread], max_seconds: float
) -> None:
    """End the threads, or abandon one whose disk does not answer: they are daemons."""
    loader.stop()
    writer.stop(min(max_seconds, max(CLOSE_SECONDS, MAX_CLOSE_SECONDS)))
    last = time.monotonic() + max_seconds
    until, num_written = time.monotonic() + CLOSE_SECONDS, writer.written_blocks
    others = [thread for thread in threads if thread is not threading.current_thread()]
    while any(thread.is_alive() for thread in others) and time.monotonic() < min(until, last):
        for thread in others:
            thread.join(LOOK_SECONDS)
        if writer.written_blocks > num_written:
            until, num_written = time.monotonic() + CLOSE_SECONDS, writer.written_blocks
    if len(others) == len(threads) and not any(thread.is_alive() for thread in threads):
        with suppress(OSError):
            catalog.close()


class LoadTimeEstimate:
    """The expected duration of loads: latency + a constant + blocks waiting or requested x seconds per block. No clock.

    Loads teach the seconds per block, by an exponentially weighted average, so that the fixed costs of small ones have
    little weight in it. A probe of one block teaches latency and constant, and what a block takes at most, each at
    once: so after harm a tier is used as soon as one probe was fast. Without new measurements the estimate decays after
    some seconds, so that eventually a load is tried again; while that one is in flight, the old estimate applies to all
    others.
    """

    def __init__(self) -> None:
        self._seconds, self._blocks, self._latency, self._constant = 0.0, 0.0, 0.0, 0.0
        self._last_at = float("-inf")  # when a load was requested or measured
        self._was_raised = False  # since the last measurement

    def expected(self, num_blocks: int, now: float) -> float:
        """Return the expected seconds to load so many blocks; 0.0 as long as nothing has been measured."""
        if not self._blocks:
            return 0.0
        idle = now - self._last_at - FADE_SECONDS
        fade = 0.5 ** (idle / FADE_SECONDS) if idle > 0 else 1.0
        return (self._latency + self._constant + num_blocks * self._seconds / self._blocks) * fade

    def blocks_per_s(self) -> float:
        """Return the blocks per second while loading; 0.0: not measured."""
        return self._blocks / self._seconds if self._seconds else 0.0

    def record_load_start(self, now: float) -> None:
        """Record the start of a load."""
        self._last_at = now

    def measured(self, num_blocks: int, seconds: float, latency: float, now: float) -> None:
        """Record that `num_blocks` were read in `seconds`, by a load that had waited for `latency` before."""
        if self._blocks:
            latency = KEEP * self._latency + (1 - KEEP) * latency
            self._constant = min(self._constant, seconds)
        self._add(num_blocks, seconds - self._constant, latency, now)

    def record_probe(self, num_blocks: int, seconds: float, latency: float, now: float) -> None:
        """Record that a probe read `num_blocks` in `seconds`, constant included, after it had waited for `latency`."""
        if not self._blocks:
            self._add(num_blocks, seconds, latency, now)
        self._seconds = min(self._seconds, self._blocks * seconds / num_blocks)
        self._constant = max(0.0, seconds - num_blocks * self._seconds / self._blocks)
        self._add(0, 0.0, latency, now)

    def record_load_timeout(self, num_blocks: int, seconds: float, now: float) -> None:
        """Record that a load was given up after `seconds`, within which `num_blocks` should have been read."""
        if not self._blocks:
            self._blocks = float(num_blocks)
        per_block = self._seconds / self._blocks * (1 if self._was_raised else 2)
        self._seconds = self._blocks * max(per_block, seconds / num_blocks)
        self._was_raised = True
        self._last_at = now

    def _add(self, num_blocks: int, seconds: float, latency: float, now: float) -> None:
        self._latency, self._last_at, self._was_raised = latency, now, False
        keep = KEEP if num_blocks else 1.0
        self._seconds = keep * self._seconds + seconds
        self._blocks = keep * self._blocks + num_blocks
