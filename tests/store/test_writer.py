"""Writer, round by round and without its thread: what goes first, what is lost and counted, what is tried again."""

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from stored import BLOCK_BYTES, MAX_BYTES, SHAPE, Clock, Disk, Pool, key, name, names, until

from headstart.store import writer
from headstart.store.catalog import SegmentCatalog
from headstart.store.writer import LATE_SECONDS, LOST, MAX_RUN_BLOCKS, RUN_BYTES, BlockOffer, BlockWriter


class Bench:
    """A writer whose rounds are called by hand, its disk, its pool, and a clock that stands still."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.files, self.clock, self.pool = Disk(), Clock(), Pool()
        self.catalog = SegmentCatalog(folder, SHAPE, max_bytes, self.files, self.clock)
        self.writer = BlockWriter(self.catalog, BLOCK_BYTES, self.clock)
        self.writer.source = self.pool

    def offer(self, *numbers: int) -> None:
        for number in numbers:
            self.writer.offer(BlockOffer(number, self.pool.versions.get(number, 1), key(number)))

    def has(self, *numbers: int) -> bool:
        return all(self.catalog.contains(name(number)) for number in numbers)

    def run(self) -> None:
        """Run in a thread of its own, which lowers its priority for good."""
        thread = threading.Thread(target=self.writer.run)
        thread.start()
        thread.join()

    def lost(self) -> dict[str, int]:
        return {reason: num for reason, num in self.writer.num_lost_by_reason().items() if num}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_pinned_ones_are_read_first_then_those_in_use(bench: Bench) -> None:
    bench.offer(1, 2, 3, 4)
    bench.writer.mark_used(names(3))
    bench.writer.set_pinned_blocks(frozenset(names(4)))
    assert not bench.writer.round() and bench.pool.asked == [4, 3, 1, 2] and bench.has(1, 2, 3, 4)


def test_what_is_pinned_stays_recent_for_other_processes(bench: Bench, tmp_path: Path) -> None:
    bench.offer(1)
    bench.writer.round()
    (file,) = tmp_path.glob("*.kv")

    def is_renewed_after(seconds: float) -> bool:
        os.utime(file, (1, 1))
        bench.clock.now += seconds
        bench.writer.round()
        return file.stat().st_mtime > 1

    assert not is_renewed_after(100.0)
    bench.writer.set_pinned_blocks(frozenset(names(1)))
    assert is_renewed_after(0.0) and not is_renewed_after(4.9) and is_renewed_after(0.2)


def test_a_run_is_bounded_and_the_rest_follows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.writer, "_run_blocks", 3)
    bench.offer(1, 2, 3, 4)
    assert bench.writer.num_pending == 4
    assert bench.writer.round() and bench.pool.asked == [1, 2, 3] and bench.writer.num_pending == 1
    assert not bench.writer.round() and bench.writer.written_blocks == 4 and bench.writer.num_pending == 0


def test_what_has_waited_for_long_is_written_by_the_second_thread_and_no_sooner(bench: Bench) -> None:
    bench.writer.offer(BlockOffer(1, 1, key(1), bench.clock.now))
    thread = threading.Thread(target=bench.writer.run_overdue_rounds)
    thread.start()
    bench.clock.now += 0.9 * LATE_SECONDS
    thread.join(3 * LATE_SECONDS)  # it looks several times
    assert thread.is_alive() and not bench.writer.written_blocks
    bench.clock.now += 0.2 * LATE_SECONDS
    assert until(lambda: bench.has(1))
    bench.writer.stop(0.0)
    thread.join()


def test_the_memory_of_a_run_is_bounded_unless_one_block_is_larger(bench: Bench) -> None:
    for block_bytes, num in ((1, MAX_RUN_BLOCKS), (RUN_BYTES // 3, 3), (RUN_BYTES + 1, 1)):
        assert BlockWriter(bench.catalog, block_bytes, bench.clock)._run.nbytes == num * block_bytes


def test_the_rate_of_writes_that_take_equally_long_is_theirs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(blocks: Any) -> int:
        bench.clock.now += 0.5
        return append(blocks)

    append = bench.catalog.write_new_blocks
    monkeypatch.setattr(bench.catalog, "write_new_blocks", slowly)
    for number in range(1, 6):
        bench.offer(number)
        bench.writer.round()
        assert bench.writer.bytes_per_s == pytest.approx(2 * BLOCK_BYTES)


def test_what_is_stored_is_not_read_again(bench: Bench) -> None:
    bench.offer(1)
    bench.writer.round()
    bench.offer(1)
    bench.writer.round()
    assert bench.pool.asked == [1] and bench.writer.written_blocks == 1


def test_a_block_reused_since_is_counted_and_not_written(bench: Bench) -> None:
    bench.offer(1, 2)
    bench.pool.reuse(1)
    bench.writer.round()
    assert bench.has(2) and not bench.has(1) and bench.lost() == {"overwritten": 1}


def test_more_offers_than_it_keeps_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING", 3)
    bench = Bench(tmp_path)
    bench.writer.source = None
    bench.offer(1, 2, 3, 4)
    assert bench.lost() == {"overload": 1} and bench.writer.num_pending == 3
    bench.writer.round()
    bench.offer(5)
    bench.writer.mark_used(names(1))
    bench.writer.round()
    bench.writer.source = bench.pool
    bench.writer.round()
    assert bench.lost() == {"overload": 2} and bench.pool.asked == [2, 3, 5]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE])
def test_a_failing_disk_keeps_one_run_and_all_that_is_pinned_for_the_next_try(
    bench: Bench, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.writer, "_run_blocks", 2)
    bench.files.fail(error, calls=("create", "pwritev"))
    bench.writer.set_pinned_blocks(frozenset(names(1, 2, 3)))
    bench.offer(1, 2, 3, 4, 5, 6, 7)
    assert not bench.writer.round()
    assert bench.lost() == {"degraded": 2} and bench.writer.num_pending == 5
    assert errno.errorcode[error] in bench.writer.current_fault_descriptions(bench.clock.now)[0]
    bench.pool.asked.clear()
    bench.files.heal()
    bench.writer.round()
    assert not bench.pool.asked  # it is paused
    bench.clock.now += 1.0
    while bench.writer.round():
        pass
    assert bench.has(1, 2, 3, 6, 7) and bench.writer.current_fault_descriptions(bench.clock.now) == []
    assert bench.writer.num_times_degraded == 1


def test_without_anything_to_write_it_finds_out_by_itself_that_the_disk_works_again(bench: Bench) -> None:
    bench.files.fail(errno.EIO, calls=("create",))
    bench.offer(1)
    bench.writer.round()
    bench.pool.reuse(1)
    bench.files.heal()
    for _ in range(3):
        bench.clock.now += 30.0
        bench.writer.round()
    assert bench.writer.current_fault_descriptions(bench.clock.now) == [] and not bench.has(1)


def test_forgetting_comes_before_what_was_offered_later(bench: Bench) -> None:
    bench.offer(1, 2)
    bench.writer.round()
    bench.offer(3)
    order = bench.writer.queue_discard(names(1, 3))
    bench.offer(1)
    assert bench.writer.num_settled < order
    bench.writer.round()
    assert bench.writer.num_settled == order and bench.has(1, 2) and not bench.has(3)
    assert bench.pool.asked == [1, 2, 1]


def test_nothing_is_written_before_a_failed_order_to_forget_has_been_carried_out(bench: Bench) -> None:
    bench.offer(1)
    bench.writer.round()
    bench.files.fail(errno.EROFS, calls=("unlink",))
    order = bench.writer.queue_discard(None)
    bench.offer(1, 2)
    bench.writer.round()
    assert (
        bench.writer.num_settled < order
        and bench.pool.asked == [1]
        and bench.writer.current_fault_descriptions(bench.clock.now)
    )
    bench.files.heal()
    bench.clock.now += 30.0
    bench.writer.round()
    assert bench.writer.num_settled == order and bench.has(1, 2) and bench.pool.asked == [1, 1, 2]


def test_a_block_that_could_not_be_marked_as_forgotten_is_marked_by_the_next_try(bench: Bench, tmp_path: Path) -> None:
    bench.offer(1)
    bench.writer.round()
    bench.files.fail(errno.EIO, 2, 2, calls=("pread", "pwritev"))
    order = bench.writer.queue_discard(names(1))
    bench.writer.round()
    assert bench.writer.num_settled < order
    bench.files.heal()
    bench.clock.now += 1.0
    bench.writer.round()
    other = Bench(tmp_path)
    other.writer.round()
    assert bench.writer.num_settled == order and not other.has(1)


def test_a_source_that_fails_pauses_writing_and_no_more(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(block: int, version: int) -> None:
        raise RuntimeError("no such block")

    bench.writer.source = broken
    bench.offer(1)
    bench.writer.round()
    assert bench.writer.current_fault_descriptions(bench.clock.now) == ["writing: RuntimeError: no such block"]
    bench.writer.source = bench.pool
    bench.offer(2)
    bench.clock.now += 1.0
    bench.writer.round()
    assert bench.has(2) and "Traceback" in capsys.readouterr().err


def test_a_folder_that_cannot_be_listed_does_not_keep_it_from_writing(bench: Bench) -> None:
    bench.files.fail(errno.EIO, calls=("list", "stat"))
    for number in range(1, 5):
        bench.offer(number)
        bench.writer.round()
        bench.clock.now += 0.1
    assert bench.has(1, 2, 3, 4) and "other processes" in bench.writer.current_fault_descriptions(bench.clock.now)[0]
    bench.files.heal()
    bench.clock.now += 30.0
    bench.writer.round()
    assert bench.writer.current_fault_descriptions(bench.clock.now) == []


def test_what_does_not_fit_beside_pinned_blocks_is_lost_and_the_store_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_bytes=12 * BLOCK_BYTES)
    bench.writer.set_pinned_blocks(frozenset(names(*range(30))))
    for number in range(30):
        bench.offer(number)
        bench.clock.now += 31.0
        bench.writer.round()
    assert "ENOSPC" in bench.writer.current_fault_descriptions(bench.clock.now)[0]
    assert bench.catalog.num_bytes <= 12 * BLOCK_BYTES and bench.has(0, 1, 2)


def test_a_round_without_end_is_told_as_degraded(bench: Bench) -> None:
    seen: list[str] = []

    def slow(block: int, version: int) -> None:
        bench.clock.now += 60.0
        seen.extend(bench.writer.current_fault_descriptions(bench.clock.now))

    bench.writer.source = slow
    bench.offer(1)
    bench.writer.round()
    assert seen == ["writing: no answer for 60 s"] and not bench.writer.current_fault_descriptions(bench.clock.now)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_only_the_thread_that_writes_gets_a_lower_priority(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(bench.writer, "round", lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    bench.writer.stop(5.0)
    bench.run()
    assert seen == [min(before + writer.NICE, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_how_long_the_first_in_line_waits_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits() -> float:
        return bench.writer.oldest_pending_seconds(bench.clock.now)

    monkeypatch.setattr(bench.writer, "_run_blocks", 1)
    assert waits() == 0.0
    for number in (1, 2):
        bench.writer.offer(BlockOffer(number, 1, key(number), bench.clock.now))
        bench.clock.now += 3.0
    assert waits() == 6.0  # also before the thread has seen them
    bench.writer.mark_used(names(2))
    bench.writer.round()
    assert bench.has(2) and waits() == 6.0
    bench.writer.round()
    bench.clock.now += 1.0
    assert bench.has(1) and waits() == 0.0


def test_stopping_writes_what_is_pending(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.writer, "_run_blocks", 1)
    bench.offer(1, 2, 3)
    bench.writer.stop(5.0)
    bench.run()
    assert bench.has(1, 2, 3) and bench.lost() == {}


def test_stopping_gives_up_when_its_time_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.writer, "_run_blocks", 1)

    def slow(block: int, version: int) -> bytes:
        bench.clock.now += 3.0
        return bytes(BLOCK_BYTES)

    bench.writer.source = slow
    bench.offer(1, 2, 3)
    bench.writer.stop(5.0)
    bench.run()
    assert bench.has(1, 2) and not bench.has(3) and bench.lost() == {"closing": 1}


def test_every_way_to_lose_a_block_is_always_listed(bench: Bench) -> None:
    assert bench.writer.num_lost_by_reason() == dict.fromkeys(LOST, 0)
