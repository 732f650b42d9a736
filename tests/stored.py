"""Helpers for tests of a store on disk: blocks whose content follows from their name, a pool to offer them from, a disk
that fails on request, and waiting that ends."""

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headstart.core.cache.block_store import BlockKey, BlockLoadPart, Data
from headstart.core.cache.hashing import BlockHash
from headstart.store.disk import DiskStore
from headstart.store.files import DiskSpace, FileEntry, FileSystemCalls
from headstart.store.format import StoredBlockFormat

BLOCK_SIZE, BLOCK_BYTES = 4, 4096
SHAPE = StoredBlockFormat(hashlib.sha256(b"model").digest(), BLOCK_SIZE, BLOCK_BYTES)
MAX_BYTES = 64 << 20
PATIENCE = 300.0  # seconds until a test gives up waiting for a thread


def key(number: int) -> BlockKey:
    """Blocks of one chain: number - 1 is the parent."""
    return BlockKey(name(number), name(number - 1), number.to_bytes(4 * BLOCK_SIZE, "little"))


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def name(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % number).digest())


def names(*numbers: int) -> list[BlockHash]:
    return [name(number) for number in numbers]


def content(block_name: bytes) -> bytes:
    return block_name * (BLOCK_BYTES // len(block_name))


class Clock:
    """Time stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pool:
    """Blocks by number, each with a version, as a source of what is offered. Its block n holds the block named n."""

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self.asked: list[int] = []

    def __call__(self, block: int, version: int) -> Data | None:
        self.asked.append(block)
        return content(name(block)) if self.versions.get(block, 1) == version else None

    def reuse(self, number: int) -> int:
        """Give the block to another owner; return its new version."""
        self.versions[number] = self.versions.get(number, 1) + 1
        return self.versions[number]

    def offer(self, store: DiskStore, *numbers: int) -> None:
        for number in numbers:
            store.offer_block(number, self.versions.get(number, 1), key(number))


class Disk(FileSystemCalls):
    """Fails with `error` at the calls from the n-th to the m-th, as counted from `fail`, if `hits` agrees."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._error, self._first, self._last = 0, 0, -1
        self._hits: Callable[[str], bool] = lambda call: True
        self.short = False  # reads and writes give half of what they are asked for
        self.gate = threading.Event()  # closed: reads and writes of payloads hang
        self.gate.set()
        self.num_hanging = 0

    def fail(self, error: int, first: int = 1, last: int = 1 << 60, *, calls: Sequence[str] = ()) -> None:
        self.num_calls = 0
        self._hits = (lambda call: call in calls) if calls else (lambda call: True)
        self._error, self._first, self._last = error, first, last

    def heal(self) -> None:
        self._last, self.short = -1, False

    def _count(self, call: str) -> None:
        if self._hits(call):
            self.num_calls += 1
            if self._first <= self.num_calls <= self._last:
                raise OSError(self._error, os.strerror(self._error))

    def _pass_gate(self) -> None:
        self.num_hanging += 1
        assert self.gate.wait(PATIENCE)
        self.num_hanging -= 1

    def open_owned_regular_file(self, path: Path, *, to_write: bool = False) -> int:
        self._count("open")
        return super().open_owned_regular_file(path, to_write=to_write)

    def create(self, path: Path) -> int:
        self._count("create")
        return super().create(path)

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        self._count("pread")
        return super().pread(fd, num_bytes, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._count("preadv")
        self._pass_gate()
        whole = memoryview(buffers[0])
        return super().preadv(fd, [whole[: max(1, len(whole) // 2)]] if self.short else buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
        self._count("pwritev")
        self._pass_gate()
        whole = memoryview(buffers[0])
        return super().pwritev(fd, [whole[: max(1, len(whole) // 2)]] if self.short else buffers, offset)

    def rename(self, old: Path, new: Path) -> None:
        self._count("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._count("unlink")
        super().unlink(path)

    def touch(self, path: Path) -> None:
        self._count("touch")
        super().touch(path)

    def lstat(self, path: Path) -> FileEntry:
        self._count("stat")
        return super().lstat(path)

    def list_entries(self, folder: Path) -> list[FileEntry]:
        self._count("list")
        return super().list_entries(folder)

    def is_linked(self, fd: int) -> bool:
        self._count("is_linked")
        return super().is_linked(fd)

    def space(self, folder: Path) -> DiskSpace:
        self._count("space")
        return super().space(folder)

    def try_open_locked(self, path: Path) -> int | None:
        self._count("lock")
        return super().try_open_locked(path)


WRITING = ("create", "pwritev", "rename", "unlink", "space", "lock", "is_linked")
READING = ("open", "pread", "preadv")
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE)


def until(condition: Callable[[], bool]) -> bool:
    """Waits for a thread to get somewhere; whether it did before the patience ended."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.002)
    return True


def written(store: DiskStore, *numbers: int) -> bool:
    """Waits until these can be loaded."""
    return until(lambda: all(store.contains(name(number)) for number in numbers))


def settled(store: DiskStore) -> bool:
    """Waits until nothing is pending."""
    return until(lambda: not store.stats().num_pending)


def load(store: DiskStore, wanted: Sequence[BlockKey]) -> list[bytes]:
    """Loads these, and waits for all that come, which is checked to be in order and of this load alone."""
    load_id, found, is_last = store.begin_load(wanted), list[bytes](), False
    give_up = time.monotonic() + PATIENCE
    while not is_last and time.monotonic() < give_up:
        store.wait_for_any_load(0.5)
        for loaded in store.poll_loads():
            assert loaded.load_id == load_id and not is_last
            found += copied(store, loaded)
            is_last = loaded.is_last
    assert is_last, f"load {load_id} does not end: {store.stats()}"
    return found


def copied(store: DiskStore, loaded: BlockLoadPart) -> list[bytes]:
    """The blocks that came, given back."""
    found = [bytes(data) for data in loaded.data]
    store.release_loaded(loaded)
    return found


def contents(*numbers: int) -> list[bytes]:
    return [content(name(number)) for number in numbers]
