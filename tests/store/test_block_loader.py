"""Loader: pieces in order, bounded buffers, and a disk that fails is tried again by the loader itself."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import BLOCK_BYTES, MAX_BYTES, PATIENCE, SHAPE, Clock, Disk, content, keys, until

from headstart.core.cache.block_store import BlockKey
from headstart.store import block_loader as loader
from headstart.store.block_loader import BlockLoad, BlockLoader, LoadedPiece
from headstart.store.catalog import SegmentCatalog


class Bench:
    """A loader with its thread, over a catalog of the blocks 1 to 8, two blocks a piece, three pieces lent at most."""

    def __init__(self, folder: Path) -> None:
        self.files, self.clock = Disk(), Clock()
        self.catalog = SegmentCatalog(folder, SHAPE, MAX_BYTES, self.files, self.clock)
        self.catalog.write_new_blocks([(key, content(key.block_hash)) for key in keys(*range(1, 9))])
        self.loader = BlockLoader(self.catalog, BLOCK_BYTES, self.clock)
        self.thread = threading.Thread(target=self.loader.run, daemon=True)
        self.thread.start()
        self._num = 0

    def ask(self, wanted: list[BlockKey]) -> BlockLoad:
        self._num += 1
        load = BlockLoad(self._num, wanted, self.clock(), len(wanted), len(wanted))
        self.loader.submit(load)
        return load

    def pieces(self, num: int) -> list[LoadedPiece]:
        """The next so many."""
        assert until(lambda: len(self.loader.done) >= num), self.loader.done
        return [self.loader.done.popleft() for _ in range(num)]

    def give_back(self, *pieces: LoadedPiece) -> None:
        for piece in pieces:
            assert piece.buffer is not None
            self.loader.release_buffer(piece.buffer)

    def misses(self, wanted: list[BlockKey]) -> str | None:
        """Why a load of one piece ended."""
        self.ask(wanted)
        (piece,) = self.pieces(1)
        if piece.buffer is not None:
            self.give_back(piece)
        return piece.miss


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(loader, "PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(loader, "LENT_BYTES", 6 * BLOCK_BYTES)
    made = Bench(tmp_path)
    yield made
    made.loader.stop()
    made.thread.join(PATIENCE)
    assert not made.thread.is_alive()


def test_a_load_comes_in_pieces_and_only_the_last_says_so(bench: Bench) -> None:
    bench.ask(keys(1, 2, 3, 4, 5))
    found = bench.pieces(3)
    assert [(piece.num_blocks, piece.is_last, piece.miss) for piece in found] == [
        (2, False, None),
        (2, False, None),
        (1, True, None),
    ]
    assert found[2].buffer is not None and found[2].buffer[:BLOCK_BYTES] == content(keys(5)[0].block_hash)
    assert bench.loader.num_read == 5


def test_it_waits_for_a_buffer_and_uses_it_again(bench: Bench) -> None:
    bench.ask(keys(*range(1, 9)))
    first = bench.pieces(3)
    assert not until_more(bench)
    bench.give_back(first[0])
    (fourth,) = bench.pieces(1)
    assert fourth.is_last and fourth.buffer is first[0].buffer


def test_a_load_cancelled_while_it_waits_for_a_buffer_ends(bench: Bench) -> None:
    load = bench.ask(keys(*range(1, 9)))
    held = bench.pieces(3)
    load.is_cancelled = True
    (end,) = bench.pieces(1)
    assert (end.num_blocks, end.is_last, end.buffer, end.miss) == (0, True, None, None)
    bench.give_back(*held)
    assert bench.misses(keys(1)) is None and bench.loader.num_read == 9


def test_single_errors_are_misses_and_three_in_a_row_pause_it(bench: Bench) -> None:
    bench.files.fail(errno.EIO, calls=("preadv",))
    assert [bench.misses(keys(1)) for _ in range(2)] == ["io", "io"] and not bench.loader.health.reason
    assert bench.misses(keys(1)) == "io" and "EIO" in bench.loader.fault_descriptions(bench.clock.now)[0]
    num_calls = bench.files.num_calls
    assert bench.misses(keys(1)) == "io" and bench.files.num_calls == num_calls  # not even tried


def test_it_tries_again_by_itself_and_says_when_it_works(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.files.fail(errno.EMFILE, calls=("open",))
    assert [bench.misses(keys(2)) for _ in range(3)] == ["io"] * 3
    bench.files.heal()
    bench.clock.now += 1.0
    assert until(lambda: not bench.loader.health.reason) and bench.misses(keys(2)) is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "reading is paused" in lines[0] and "reading works again" in lines[1]


def test_a_mistake_of_ours_is_a_miss_and_does_not_end_the_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(bench.catalog, "read_blocks_until_miss", None)
        assert bench.misses(keys(1)) == "io"
    assert bench.misses(keys(1)) is None and "Traceback" in capsys.readouterr().err


def test_a_disk_that_does_not_answer_is_overdue(bench: Bench) -> None:
    bench.files.gate.clear()
    bench.ask(keys(1))
    assert until(lambda: bench.files.num_hanging == 1) and not bench.loader.is_overdue(bench.clock.now + 0.9)
    assert bench.loader.is_overdue(bench.clock.now + 1.1)
    assert bench.loader.fault_descriptions(bench.clock.now + 60.0) == ["reading: no answer for 60 s"]
    bench.files.gate.set()
    bench.pieces(1)
    assert not bench.loader.is_overdue(bench.clock.now + 60.0)


def until_more(bench: Bench) -> bool:
    """Whether another piece comes within a moment."""
    return bench.loader.has_done.wait(0.0) and bool(bench.loader.done)
