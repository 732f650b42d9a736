"""Direct writes: the same bytes as through the page cache, and nothing lost where there are none."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headstart.core.cache.block_store import Data
from headstart.store.direct import GATHER_BYTES, PAGE_BYTES, DirectFileWriter, allocate_page_aligned
from headstart.store.files import FileSystemCalls


class Watched(FileSystemCalls):
    """Notes direct writes; may refuse them, all or those from memory that is not aligned, or write only a part."""

    def __init__(
        self, refusal: int = 0, late_refusal: int = 0, part: int | None = None, *, picky: bool = False
    ) -> None:
        self.refusal, self.late_refusal, self.part, self.picky = refusal, late_refusal, part, picky
        self.written: list[int] = []

    def open_for_direct_write(self, path: Path) -> int:
        if self.refusal:
            raise OSError(self.refusal, "refused")
        return os.open(path, os.O_WRONLY)  # the system that runs the tests may have none

    def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
        if self.late_refusal:
            raise OSError(self.late_refusal, "refused")
        if self.picky and isinstance(buffers[0], bytes):
            raise OSError(errno.EINVAL, "not aligned")
        self.written.append(sum(map(len, buffers)))
        return super().pwritev(fd, [memoryview(buffers[0])[: self.part]] if self.part else buffers, offset)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"\0" * PAGE_BYTES)
    return tmp_path / "file"


def blocks(num: int, size: int = PAGE_BYTES) -> list[bytes]:
    return [bytes([number + 1]) * size for number in range(num)]


def test_payloads_come_to_lie_behind_one_another(path: Path) -> None:
    direct = DirectFileWriter(Watched(), path, PAGE_BYTES)
    assert direct.try_write(blocks(3), PAGE_BYTES)
    assert path.read_bytes() == b"\0" * PAGE_BYTES + b"".join(blocks(3))
    direct.close()
    direct.close()


def test_the_real_system_writes_the_same_or_says_that_it_does_not(path: Path) -> None:
    direct = DirectFileWriter(FileSystemCalls(), path, PAGE_BYTES)
    if direct.try_write(blocks(2), PAGE_BYTES):
        assert path.read_bytes()[PAGE_BYTES:] == b"".join(blocks(2))
    direct.close()


def test_memory_begins_on_a_page() -> None:
    for num_bytes in (1, PAGE_BYTES, 3 * PAGE_BYTES):
        view = allocate_page_aligned(num_bytes)
        address = np.frombuffer(view, np.uint8).ctypes.data
        assert len(view) == num_bytes and address % PAGE_BYTES == 0


@pytest.mark.parametrize("picky", [False, True])
def test_what_is_longer_than_the_buffer_goes_in_several_writes(path: Path, picky: bool) -> None:
    files = Watched(picky=picky)
    size = GATHER_BYTES // 2
    assert DirectFileWriter(files, path, size).try_write(blocks(5, size), PAGE_BYTES)
    assert files.written == [2 * size, 2 * size, size] and path.read_bytes()[PAGE_BYTES:] == b"".join(blocks(5, size))


def test_one_block_larger_than_the_buffer_is_written_whole(path: Path) -> None:
    size = GATHER_BYTES + PAGE_BYTES
    assert DirectFileWriter(Watched(picky=True), path, size).try_write(blocks(1, size), PAGE_BYTES)
    assert path.stat().st_size == PAGE_BYTES + size


@pytest.mark.parametrize("size", [PAGE_BYTES - 1, 512])
def test_blocks_that_are_no_whole_pages_go_another_way(path: Path, size: int) -> None:
    files = Watched()
    assert not DirectFileWriter(files, path, size).try_write(blocks(1, size), PAGE_BYTES) and not files.written


def test_an_offset_inside_a_page_goes_another_way(path: Path) -> None:
    files = Watched()
    assert not DirectFileWriter(files, path, PAGE_BYTES).try_write(blocks(1), 512) and not files.written


@pytest.mark.parametrize(
    "files", [Watched(refusal=errno.EINVAL), Watched(late_refusal=errno.EOPNOTSUPP), Watched(part=512)]
)
def test_a_file_system_that_refuses_or_stops_short_is_no_error(path: Path, files: Watched) -> None:
    direct = DirectFileWriter(files, path, PAGE_BYTES)
    assert not direct.try_write(blocks(2), PAGE_BYTES)
    assert not direct.try_write(blocks(2), PAGE_BYTES)
    direct.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_what_ails_the_disk_is_told(path: Path, error: int) -> None:
    direct = DirectFileWriter(Watched(late_refusal=error), path, PAGE_BYTES)
    with pytest.raises(OSError) as caught:
        direct.try_write(blocks(1), PAGE_BYTES)
    assert caught.value.errno == error
    direct.close()


def test_running_out_of_descriptors_is_told(path: Path) -> None:
    with pytest.raises(OSError):
        DirectFileWriter(Watched(refusal=errno.EMFILE), path, PAGE_BYTES)
