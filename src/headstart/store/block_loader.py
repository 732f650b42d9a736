"""Loader: one thread that reads blocks into buffers of its own, in pieces and in the requested order.

`disk.py` has the engine's side of a load; this module has the thread and the queues between the two. A disk that hangs
blocks only this thread, and `is_overdue` reports it. While reading is paused, this thread retries the last failed block
by itself, so that no request has to.
"""

import queue
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple

from headstart.core.cache.block_store import BlockKey
from headstart.store.segment import ReadResult
from headstart.store.store_health import SideHealth, describe_error, write_stderr_line
from headstart.store.tiers.tier import StorageTier

PIECE_BYTES = 2 << 20
"""Bytes read by one call and handed over at once, to within one block."""
LENT_BYTES = 32 << 20
"""The maximum bytes read and not yet given back; at least two pieces."""
MAX_ERRORS = 3  # consecutive loads that end with a disk error
LONGEST_PAUSE = 4.0  # seconds: an attempt while reading is paused costs no request anything
OVERDUE_SECONDS = 1.0  # for one piece
LOOK_SECONDS = 0.05  # between two checks of whether a pause is over, or a load that waits for a buffer was cancelled


@dataclass(slots=True, eq=False)
class BlockLoad:
    """One load. Only the engine's thread changes it."""

    load_id: int
    keys: Sequence[BlockKey]
    requested_at: float
    num_waiting: int  # blocks requested and not yet read at the time of this request, its own included
    num_wanted: int  # leading blocks; fewer than requested if others must not be loaded
    num_given: int = 0
    is_cancelled: bool = False


class LoadedPiece(NamedTuple):
    """The next blocks of a load, at the start of `buffer`; `miss`: the reason if the load ends early."""

    load: BlockLoad
    buffer: bytearray | None
    num_blocks: int
    is_last: bool
    miss: str | None
    seconds: float  # spent reading
    latency: float  # from the request of the load, or the end of the previous one, to its first read


class BlockLoader:
    """The thread's body, and its queues to the engine's thread, none of which blocks that thread."""

    def __init__(self, catalog: StorageTier, block_bytes: int, clock: Callable[[], float]) -> None:
        self.health = SideHealth("reading", max_errors=MAX_ERRORS, longest=LONGEST_PAUSE)
        self.done: deque[LoadedPiece] = deque()
        self.has_done = Event()
        self.num_read = 0  # blocks of all loads that are read or given up
        self._catalog, self._block_bytes, self._clock = catalog, block_bytes, clock
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        self._num_buffers = max(2, LENT_BYTES // (self._piece_blocks * block_bytes))
        self._num_made = 0
        self._requests: queue.SimpleQueue[BlockLoad | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._last_failed: BlockKey | None = None
        self._reading_since = self._idle_since = float("inf")
        self._is_ending = False

    def submit(self, load: BlockLoad) -> None:
        """Start a load; its pieces arrive in `done`, one of them the last, even if the load is cancelled."""
        self._requests.put(load)

    def deliver_piece(self, piece: LoadedPiece) -> None:
        """Append a piece to `done`."""
        self.done.append(piece)
        self.has_done.set()

    def release_buffer(self, buffer: bytearray) -> None:
        """Release a piece's buffer for reuse."""
        self._free.put(buffer)

    def is_overdue(self, now: float) -> bool:
        """Return whether the current read has taken so long that it may never end."""
        return now - self._reading_since > OVERDUE_SECONDS

    def fault_descriptions(self, now: float) -> list[str]:
        """Return descriptions of the current faults."""
        if self.health.failure_text:
            return [self.health.failure_text]
        since = now - self._reading_since
        return [f"{self.health.side}: no answer for {since:.0f} s"] if self.is_overdue(now) else []

    def stop(self) -> None:
        """Stop as soon as the current read has ended."""
        self._is_ending = True
        self._requests.put(None)

    # The thread. ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve loads until `stop`."""
        self._idle_since = self._clock()
        while not self._is_ending:
            try:
                load = self._requests.get(timeout=LOOK_SECONDS if self.health.reason else None)
            except queue.Empty:
                self._retry()
                continue
            if load is not None:
                self._serve(load)
                self._idle_since = self._clock()

    def _serve(self, load: BlockLoad) -> None:
        """Hand over all pieces of a load; in every case one of them is the last."""
        latency = max(0.0, self._clock() - max(load.requested_at, self._idle_since))
        num, miss = 0, "io" if self.health.reason else None
        ahead = load.keys[: self._piece_blocks]
        while num < len(load.keys) and miss is None and (buffer := self._buffer(load)) is not None:
            end = num + 2 * self._piece_blocks
            keys, ahead = ahead, load.keys[num + self._piece_blocks : end]
            found, seconds = self._read(keys, buffer, ahead)
            num, miss = num + found.num_blocks, found.miss
            self.num_read += found.num_blocks
            is_last = miss is not None or num == len(load.keys)
            self.deliver_piece(LoadedPiece(load, buffer, found.num_blocks, is_last, miss, seconds, latency))
            if is_last:
                break
        else:
            self.deliver_piece(LoadedPiece(load, None, 0, True, miss, 0.0, latency))
        self.num_read += len(load.keys) - num

    def _read(
        self, keys: Sequence[BlockKey], buffer: bytearray, ahead: Sequence[BlockKey] = ()
    ) -> tuple[ReadResult, float]:
        """Read one piece; return the result and the seconds it took."""
        began = self._reading_since = self._clock()
        try:
            found = self._catalog.read_blocks_until_miss(keys, memoryview(buffer), ahead)
            error = found.error
        except Exception as mistake:  # an internal error: it must not end the thread
            write_stderr_line(traceback.format_exc())
            found, error = ReadResult(0, "io"), mistake
        now = self._clock()
        self._reading_since = float("inf")
        if error is None:
            self.health.record_success(now)
        else:
            self._last_failed = keys[found.num_blocks]
            self.health.record_failure(describe_error(error), now)
        return found, now - began

    def _retry(self) -> None:
        if self._last_failed is not None and self.health.may_attempt(self._clock()):
            self._read([self._last_failed], bytearray(self._block_bytes))

    def _buffer(self, load: BlockLoad) -> bytearray | None:
        """Return a free buffer as soon as there is one; None if the load was cancelled meanwhile."""
        while not load.is_cancelled and not self._is_ending:
            is_allowed = self._num_made < self._num_buffers
            try:
                return self._free.get(timeout=0.0 if is_allowed else LOOK_SECONDS)
            except queue.Empty:
                if is_allowed:
                    self._num_made += 1
                    return bytearray(self._piece_blocks * self._block_bytes)
        return None
