"""Catalog: one folder of segments as one index of blocks, shared with other processes through the file system alone.

Every process writes its own segments and reads those of all. A fault in a file or an entry is counted by reason and
skipped; the rest of its file is served. Only the threads named at each method may call it.

The victim of an eviction is chosen from file times: the least recently used segment by its mtime, which every process
that uses one of its blocks renews. Blocks of a victim that are valuable to this process are first written again to its
own segment.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path

from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.store import segment as segments
from headstart.store.files import Files, prepare_folder
from headstart.store.folder import CORRUPT, Folder
from headstart.store.format import MAX_SEGMENT_BYTES, MAX_SLOTS, Header, Shape
from headstart.store.index import Index
from headstart.store.segment import ReadResult, Segment, SegmentWriter
from headstart.store.segment_eviction import Eviction

MIN_SEGMENT_BYTES = 8 << 20


class Catalog:
    """The blocks of one shape in a folder, and the space for more.

    `contains`, `read` and `used` may be called from any thread; all else from one thread at a time. `num_blocks`,
    `num_bytes`, `num_segments`, `max_bytes` and `skipped` may be read from any thread.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        max_bytes: int,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the folder if needed, but read nothing: see `refresh`.

        Raises ConfigError for an unusable folder, and for a size below a single block.
        """
        smallest = Header(shape, 1, bytes(8)).file_bytes
        if smallest > max_bytes:
            raise ConfigError(f"--kv-store-size {max_bytes} holds not even one block; give at least {smallest} bytes")
        prepare_folder(folder)
        self._shape, self._files = shape, files or Files()
        self._index = Index()
        self._folder = Folder(folder.resolve(), shape, self._files, self._index, clock)
        self._eviction = Eviction(self._folder, self._index, self._files, max_bytes, self._write)
        self._writer: SegmentWriter | None = None
        self._unmarked: list[tuple[Segment, int]] = []  # discarded here, but not yet marked for other processes

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """The bytes of all segments in the folder, of any shape."""
        return self._folder.num_bytes

    @property
    def num_segments(self) -> int:
        """The number of segment files, of any shape."""
        return len(self._folder.known) + len(self._folder.others)

    @property
    def max_bytes(self) -> int:
        """The bound of `num_bytes`: the configured size, or what the disk allowed at the last call of `make_room`."""
        return self._eviction.max_bytes

    @property
    def skipped(self) -> Mapping[str, int]:
        """Files and entries that are not served, by reason, each counted once."""
        return self._folder.skipped

    @property
    def num_corrupt(self) -> int:
        """The number of damaged ones among them."""
        return sum(self.skipped.get(reason, 0) for reason in CORRUPT)

    def contains(self, block_hash: BlockHash) -> bool:
        return self._index.contains(block_hash)

    def refresh(self) -> None:
        """Index what other processes wrote, and drop what they evicted. Creates the folder if it vanished.

        Raises OSError if that fails as a whole; a single faulty file is counted in `skipped`.
        """
        self._folder.refresh()

    def read(self, keys: Sequence[BlockKey], buffer: memoryview) -> ReadResult:
        """Read blocks from the first on, each verified against its key, until one is unavailable.

        `buffer` has space for all; after the blocks that count its content is undefined. A block that does not match
        its key is dropped. Raises nothing.
        """
        block_bytes = self._shape.block_bytes
        assert len(buffer) >= len(keys) * block_bytes, (len(buffer), len(keys), block_bytes)
        done, miss = 0, "gone"
        while done < len(keys):
            run = self._index.run(keys, done)
            if run is None:
                return ReadResult(done, miss)
            segment, slot, length = run
            part = buffer[done * block_bytes : (done + length) * block_bytes]
            found = segments.read_blocks(self._files, segment, slot, keys[done : done + length], part)
            if found.num_blocks:
                self._index.mark_used(segment, slot, found.num_blocks)
                self._folder.touch(segment)
            done += found.num_blocks
            if found.error is not None:
                return ReadResult(done, found.miss, found.error)
            if found.miss is not None:  # another copy may exist
                self._index.forget(keys[done].block_hash, segment, slot + found.num_blocks)
            miss = found.miss or "gone"
        return ReadResult(done)

    def append(self, blocks: Sequence[tuple[BlockKey, Data]]) -> int:
        """Write those that are not stored yet; return their number. Does not check `max_bytes`.

        Raises OSError; then some of them may have been written, and `contains` reports which.
        """
        new = {key.block_hash: (key, data) for key, data in blocks if not self._index.contains(key.block_hash)}
        self._write(list(new.values()))
        return len(new)

    def make_room(self, num_bytes: int, *, kept: Container[BlockHash]) -> int:
        """Evict until so many bytes of blocks can be appended; return the number of blocks dropped.

        Blocks in `kept` are not dropped, unless another process evicts them. Raises OSError: ENOSPC if there is still
        no space, EAGAIN if another process has been evicting for too long.
        """
        self._drop_evicted_writer()
        room = self._eviction.room()  # first, since the size of new segments depends on it
        needed = num_bytes + self._overhead(num_bytes)
        if room >= needed + 2 * self._header(bytes(8)).file_bytes:
            return 0  # otherwise it depends on what others wrote meanwhile
        own = self._writer.path.name if self._writer is not None else ""
        return self._eviction.make_room(needed, own, kept)

    def used(self, block_hashes: Iterable[BlockHash]) -> None:
        """Mark blocks, and their files, as used now: a request uses them."""
        for block_hash in block_hashes:
            for segment, slot in self._index.places(block_hash):
                self._index.mark_used(segment, slot, 1)
                self._folder.touch(segment)

    def discard(self, block_hashes: Iterable[BlockHash]) -> None:
        """Drop these and mark them in their files, so that other processes do not load them either.

        Raises OSError; then unmarked ones are dropped here all the same, and marked by the next call.
        """
        for block_hash in block_hashes:
            for segment, slot in self._index.places(block_hash):
                self._index.forget(block_hash, segment, slot)
                self._unmarked.append((segment, slot))
        while self._unmarked:
            with contextlib.suppress(FileNotFoundError):
                segments.discard_entry(self._files, *self._unmarked[0])
            del self._unmarked[0]

    def clear(self) -> None:
        """Delete all segments, of every model and process. Raises OSError."""
        self._close_writer()
        for name in self._folder.list():
            self._folder.unlink(name)

    def close(self) -> None:
        """End writing; what was written stays. Calling it twice is harmless."""
        self._close_writer()

    def _write(self, blocks: Sequence[tuple[BlockKey, Data]]) -> None:
        done = 0
        while done < len(blocks):
            writer = self._writer_with_room()
            part = blocks[done : done + writer.room]
            writer.append(part)
            segment = self._folder.known[writer.path.name]
            self._index.add(segment, [key.block_hash for key, _ in part])
            segment.num_bytes = writer.header.payload_offset(writer.num_blocks)
            done += len(part)
        self._folder.measure()

    def _writer_with_room(self) -> SegmentWriter:
        self._drop_evicted_writer()
        if self._writer is not None and not self._writer.room:
            self._close_writer()
        if self._writer is None:
            header = self._header(secrets.token_bytes(8))
            self._writer = SegmentWriter(self._files, self._folder.path, header)
            self._folder.begin(self._writer.path, header)
        return self._writer

    def _drop_evicted_writer(self) -> None:
        """Close this process's segment if another process evicted it; only then is its space free."""
        if self._writer is not None:
            name = self._writer.path.name
            if name not in self._folder.known or not self._writer.is_linked():
                self._folder.forget(name)
                self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _overhead(self, num_bytes: int) -> int:
        """Return the bytes of the tables of the new segments that so many bytes of blocks need."""
        left = num_bytes // self._shape.block_bytes - (self._writer.room if self._writer is not None else 0)
        header = self._header(bytes(8))
        return max(0, -(-left // header.num_slots)) * header.payload_start

    def _header(self, own_id: bytes) -> Header:
        """Return a new segment's header: small enough that evictions lose little, large enough that files are few."""
        max_bytes, smallest = self.max_bytes, Header(self._shape, 1, own_id).file_bytes
        wanted = min(max(max_bytes // 256, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES, max_bytes // 4)
        num_slots = (wanted - smallest) // (self._shape.entry_bytes + self._shape.block_bytes)
        return Header(self._shape, max(1, min(MAX_SLOTS, num_slots)), own_id)
