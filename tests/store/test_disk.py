"""DiskStore: what one process offers others load, what is distrusted stays away, and nothing makes the engine wait."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from stored import (
    BLOCK_BYTES,
    MAX_BYTES,
    PATIENCE,
    SHAPE,
    Clock,
    Disk,
    Pool,
    contents,
    copied,
    key,
    keys,
    load,
    name,
    names,
    settled,
    until,
    written,
)

from headstart.core.cache.block_store import BlockKey, BlockStore, Data
from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.store import block_loader as loader
from headstart.store import disk
from headstart.store.disk import DiskStore

Open = Callable[..., DiskStore]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def opened(tmp_path: Path, pool: Pool) -> Iterator[Open]:
    """Opens stores on one folder, and closes them."""
    made: list[DiskStore] = []

    def opens(**options: object) -> DiskStore:
        store = DiskStore(tmp_path / "kv", SHAPE, MAX_BYTES, **options)  # type: ignore[arg-type]
        store.start_writing_from(pool)
        made.append(store)
        return store

    yield opens
    for store in made:
        store.close()


def test_it_is_a_block_store(opened: Open) -> None:
    store: BlockStore = opened()
    assert store.poll_loads() == [] and store.stats().num_blocks == 0


def test_what_is_offered_comes_back_in_order(opened: Open, pool: Pool) -> None:
    store = opened()
    pool.offer(store, 1, 2, 3)
    assert written(store, 1, 2, 3) and load(store, keys(1, 2, 3)) == contents(1, 2, 3)
    assert settled(store)  # blocks can be loaded before they are counted
    stats = store.stats()
    assert (stats.num_blocks, stats.written_blocks, stats.loaded_blocks) == (3, 3, 3)
    assert stats.loaded_bytes == stats.written_bytes == 3 * BLOCK_BYTES
    assert stats.load_bytes_per_s > 0 and stats.write_bytes_per_s > 0 and not stats.degraded
    assert not any(stats.misses.values()) and not any(stats.lost_writes.values())


@pytest.mark.usefixtures("patient_store")
def test_it_outlives_the_process(opened: Open, pool: Pool) -> None:
    first = opened()
    pool.offer(first, 1, 2)
    first.close()
    second = opened()
    assert second.contains(name(1)) and load(second, keys(1, 2)) == contents(1, 2)


def test_what_one_process_writes_another_loads(opened: Open, pool: Pool) -> None:
    writes, reads = opened(), opened()
    pool.offer(writes, 1, 2)
    assert written(reads, 1, 2) and load(reads, keys(1, 2)) == contents(1, 2)


def test_a_load_stops_at_the_first_block_that_is_not_there(opened: Open, pool: Pool) -> None:
    store = opened()
    pool.offer(store, 1, 3)
    assert written(store, 1, 3) and load(store, keys(1, 2, 3)) == contents(1)
    assert store.stats().misses == {**dict.fromkeys(disk.MISSES, 0), "gone": 1}


def test_a_load_of_nothing_ends(opened: Open) -> None:
    assert load(opened(), []) == []


@pytest.mark.parametrize(
    "wrong", [key(1)._replace(parent=name(7)), key(1)._replace(tokens=key(2).tokens)], ids=["parent", "tokens"]
)
def test_a_block_with_another_parent_or_other_tokens_is_a_mismatch(opened: Open, pool: Pool, wrong: BlockKey) -> None:
    store = opened()
    pool.offer(store, 1)
    assert written(store, 1) and load(store, [wrong]) == []
    assert store.stats().misses["mismatch"] == 1


def test_loads_come_in_the_order_in_which_they_were_asked_for(opened: Open, pool: Pool) -> None:
    store = opened()
    pool.offer(store, *range(1, 9))
    assert written(store, *range(1, 9))
    asked = [store.begin_load(keys(number, number + 1)) for number in range(1, 8)] + [store.begin_load([])]
    came: list[int] = []
    while len(came) < len(asked):
        store.wait_for_any_load(1.0)
        for loaded in store.poll_loads():
            assert copied(store, loaded) == contents(*range(loaded.load_id, loaded.load_id + len(loaded.data)))
            came.append(loaded.load_id)
    assert came == asked


def test_long_loads_come_in_pieces_whose_buffers_are_reused(
    opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(loader, "LENT_BYTES", 4 * BLOCK_BYTES)
    store = opened()
    pool.offer(store, *range(1, 10))
    assert written(store, *range(1, 10))
    store.begin_load(keys(*range(1, 10)))
    held, found = [], []
    while len(held) < 2:
        store.wait_for_any_load(1.0)
        held += store.poll_loads()
    store.wait_for_any_load(0.2)  # two buffers, and both are lent: nothing more can come
    assert store.poll_loads() == [] and [len(loaded.data) for loaded in held] == [2, 2]
    while held:
        loaded = held.pop(0)
        found += copied(store, loaded)
        store.release_loaded(loaded)  # twice does no harm
        if not loaded.is_last and not held:
            assert until(lambda: held.extend(store.poll_loads()) or bool(held))
    assert found == contents(*range(1, 10))


def test_a_block_reused_before_it_was_written_is_not_written(opened: Open, pool: Pool) -> None:
    store = opened()
    store.offer_block(1, 1, key(1))
    pool.reuse(1)
    pool.offer(store, 2)
    assert written(store, 2) and settled(store)
    if not store.contains(name(1)):  # else it was written before
        assert store.stats().lost_writes["overwritten"] == 1


def test_nothing_is_written_before_there_is_a_source(tmp_path: Path, pool: Pool) -> None:
    store = DiskStore(tmp_path, SHAPE, MAX_BYTES)
    pool.offer(store, 1)
    assert store.stats().num_pending == 1
    store.start_writing_from(pool)
    assert written(store, 1)
    store.close()


# What must not come back ---------------------------------------------------------------------------------------------


def test_what_is_distrusted_comes_back_in_no_process_until_it_is_offered_again(opened: Open, pool: Pool) -> None:
    store, other = opened(), opened()
    pool.offer(store, 1, 2, 3)
    assert written(store, 1, 2, 3) and written(other, 1, 2, 3)
    store.discard_corrupt(names(2, 3))
    assert store.contains(name(1)) and not store.contains(name(2)) and not store.contains(name(3))
    assert until(lambda: load(other, keys(1, 2)) == contents(1)) and not other.contains(name(2))
    store.offer_block(2, 1, key(2))
    assert written(store, 2) and load(store, keys(1, 2, 3)) == contents(1, 2)
    assert written(other, 2) and load(other, keys(2)) == contents(2)


def test_what_was_pending_when_it_was_distrusted_is_not_written(tmp_path: Path, pool: Pool) -> None:
    store = DiskStore(tmp_path, SHAPE, MAX_BYTES)
    pool.offer(store, 1, 2)
    store.discard_corrupt(names(1))
    store.start_writing_from(pool)
    assert written(store, 2) and settled(store) and not store.contains(name(1)) and pool.asked == [2]
    store.close()


def test_what_is_distrusted_during_its_load_does_not_come(opened: Open, pool: Pool) -> None:
    files = Disk()
    store = opened(files=files)
    pool.offer(store, 1, 2, 3)
    assert written(store, 1, 2, 3)
    files.gate.clear()
    first, second, third = store.begin_load(keys(1, 2, 3)), store.begin_load(keys(2, 3)), store.begin_load(keys(1))
    store.discard_corrupt(names(2))
    files.gate.set()
    found: dict[int, list[bytes]] = {}
    ends: list[int] = []
    while len(ends) < 3:
        store.wait_for_any_load(1.0)
        for loaded in store.poll_loads():
            found[loaded.load_id] = found.get(loaded.load_id, []) + copied(store, loaded)
            ends += [loaded.load_id] * loaded.is_last
    assert ends == [first, second, third]
    assert found == {first: contents(1), second: [], third: contents(1)}


def test_a_cleared_store_is_empty_in_all_processes_and_can_be_filled_again(opened: Open, pool: Pool) -> None:
    store, other = opened(), opened()
    pool.offer(store, 1)
    pool.offer(other, 2)
    assert written(store, 1, 2) and written(other, 1, 2)
    store.clear()
    assert not store.contains(name(1)) and not store.contains(name(2))
    assert until(lambda: not other.contains(name(1)) and not other.contains(name(2)))
    pool.offer(store, 1)
    assert written(store, 1) and load(store, keys(1)) == contents(1)


# A disk that is slow -------------------------------------------------------------------------------------------------


def test_before_anything_is_measured_a_load_is_thought_to_take_no_time(opened: Open) -> None:
    assert opened().expected_load_seconds(64) == 0.0


def test_after_a_late_load_probes_find_out_how_long_loads_take_and_no_request(opened: Open, pool: Pool) -> None:
    files, clock, never = Disk(), Clock(), float("inf")
    store = opened(files=files, clock=clock)
    pool.offer(store, 1)
    assert written(store, 1)
    files.gate.clear()
    load_id = store.begin_load(keys(1))
    assert until(lambda: files.num_hanging == 1)
    clock.now += 0.5
    store.cancel_load(load_id, is_late=True)
    assert store.expected_load_seconds(1) == never  # this asks for a probe
    files.gate.set()
    loader = store._loader  # type: ignore[reportPrivateUsage]
    assert until(lambda: loader.num_read == 2) and until(lambda: len(loader.done) == 2)
    assert store.expected_load_seconds(1) < never
    clock.now += 60.0  # what was measured is old: without a probe it would fade
    assert store.expected_load_seconds(1) == never
    assert until(lambda: store.expected_load_seconds(1) < never)
    assert load(store, keys(1)) == contents(1)
    clock.now += 60.0
    assert store.expected_load_seconds(1) < never


def test_a_disk_that_hangs_is_not_asked_again_and_delays_no_request(opened: Open, pool: Pool) -> None:
    files, clock = Disk(), Clock()
    store = opened(files=files, clock=clock)
    pool.offer(store, 1)
    assert written(store, 1)
    files.gate.clear()
    load_id = store.begin_load(keys(1))
    assert until(lambda: files.num_hanging == 1) and store.expected_load_seconds(1) == 0.0
    clock.now += 60.0
    assert store.expected_load_seconds(1) == float("inf")
    assert store.contains(name(1)) and "no answer" in store.stats().degraded
    pool.offer(store, 2)
    store.mark_used(names(1))
    store.cancel_load(load_id, is_late=True)
    assert store.poll_loads() == [] and store.stats().misses["slow"] == 1
    files.gate.set()
    assert until(lambda: store.expected_load_seconds(1) != float("inf")) and store.expected_load_seconds(1) > 10
    assert written(store, 2) and load(store, keys(1, 2)) == contents(1, 2)


def test_cancelled_loads_give_nothing_and_their_buffers_come_back(
    opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "PIECE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(loader, "LENT_BYTES", 2 * BLOCK_BYTES)
    store = opened()
    pool.offer(store, 1, 2, 3, 4)
    assert written(store, 1, 2, 3, 4)
    for _ in range(5):
        store.cancel_load(store.begin_load(keys(1, 2, 3, 4)), is_late=True)
    store.cancel_load(77, is_late=True)  # no such load
    assert load(store, keys(1, 2, 3, 4)) == contents(1, 2, 3, 4)
    assert store.stats().misses["slow"] == 5


def test_too_many_loads_are_not_begun(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_LOADS", 2)
    files = Disk()
    store = opened(files=files)
    asked = [store.begin_load(keys(1)) for _ in range(3)]
    assert store.expected_load_seconds(1) == float("inf") and store.stats().misses["slow"] == 1
    assert until(lambda: len(loader_done(store)) == 3)
    assert [loaded.load_id for loaded in store.poll_loads()] == asked


def loader_done(store: DiskStore) -> list[object]:
    return list(store._loader.done)


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient_store")
def test_closing_writes_what_is_pending_and_twice_does_no_harm(opened: Open, pool: Pool) -> None:
    store = opened()
    pool.offer(store, *range(1, 100))
    store.close()
    store.close()
    assert store.stats().num_pending == 0 and opened().stats().num_blocks == 99


def test_a_closed_store_ends_its_loads_and_takes_nothing_more(
    opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Disk()
    store = opened(files=files)
    pool.offer(store, 1)
    assert written(store, 1)
    files.gate.clear()
    under_way = store.begin_load(keys(1))
    monkeypatch.setattr(disk, "CLOSE_SECONDS", PATIENCE)
    threading.Timer(0.2, files.gate.set).start()
    store.close()
    afterwards = store.begin_load(keys(1))
    assert [(loaded.load_id, loaded.is_last) for loaded in store.poll_loads()] == [
        (under_way, True),
        (afterwards, True),
    ]
    pool.offer(store, 2)
    store.mark_used(names(1))
    store.set_pinned_blocks(names(1))
    store.discard_corrupt(names(2))
    store.clear()
    store.wait_for_any_load(0.0)
    assert store.expected_load_seconds(1) == float("inf") and store.stats().num_pending == 0


def test_closing_lasts_as_long_as_blocks_are_written(opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Disk):
        """Every write takes a second of a clock that `disk` alone has, and that stands still between writes."""

        at, is_writing, is_slow = 0.0, False, False

        def monotonic(self) -> float:
            self.at += self.is_writing
            return self.at

        def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
            until_then, self.is_writing = self.at + 1.0, self.is_slow
            assert not self.is_slow or until(lambda: self.at >= until_then)
            self.is_writing = False
            return super().pwritev(fd, buffers, offset)

    files = Slow()
    store = opened(files=files)
    monkeypatch.setattr(store._writer, "_run_blocks", 1)
    monkeypatch.setattr(disk, "time", files)
    files.gate.clear()
    pool.offer(store, *range(1, 11))
    files.is_slow = True
    files.gate.set()
    store.close()
    assert files.at > 2 * disk.CLOSE_SECONDS and all(store.contains(name(number)) for number in range(1, 11))


def test_closing_does_not_wait_for_a_disk_that_hangs(opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CLOSE_SECONDS", 0.1)
    files = Disk()
    store = opened(files=files)
    files.gate.clear()
    pool.offer(store, 1)
    assert until(lambda: bool(pool.asked))
    store.close()  # returns
    assert not store.contains(name(1))
    files.gate.set()


def test_closing_ends_within_the_seconds_it_is_given(opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CLOSE_SECONDS", PATIENCE)
    files = Disk()
    store = opened(files=files)
    files.gate.clear()
    pool.offer(store, 1)
    assert until(lambda: bool(pool.asked))
    too_late = threading.Timer(20.0, files.gate.set)
    too_late.start()
    store.close(0.1)
    assert not files.gate.is_set()
    too_late.cancel()
    files.gate.set()


def test_a_store_that_is_dropped_ends_its_threads(tmp_path: Path, pool: Pool) -> None:
    store = DiskStore(tmp_path, SHAPE, MAX_BYTES)
    store.start_writing_from(pool)
    pool.offer(store, 1)
    ours = store._finalizer.peek()[2][3]  # type: ignore[index]
    del store
    gc.collect()
    assert until(lambda: not any(thread.is_alive() for thread in ours))


def test_an_interpreter_that_ends_without_closing_writes_first_and_does_not_hang(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\nfrom headstart.store.disk import DiskStore\nfrom stored import *\n"
        "import patience\npatience.prefer_the_store(setattr)\n"
        f"store = DiskStore(Path({str(tmp_path)!r}), SHAPE, MAX_BYTES)\nstore.start_writing_from(Pool())\n"
        "Pool().offer(store, 1, 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)), timeout=300
    )
    store = DiskStore(tmp_path, SHAPE, MAX_BYTES)
    assert done.returncode == 0 and store.contains(name(1)) and store.contains(name(2))
    store.close()


@pytest.mark.parametrize("size", [0, 4096])
def test_a_size_that_holds_no_block_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="kv-store-size"):
        DiskStore(tmp_path, SHAPE, size)


# Pinned ones ---------------------------------------------------------------------------------------------------------


def test_pinned_blocks_stay_when_the_store_is_far_too_small_for_the_rest(tmp_path: Path, pool: Pool) -> None:
    store = DiskStore(tmp_path, SHAPE, 64 * BLOCK_BYTES)
    store.start_writing_from(pool)
    kept = list[BlockHash](names(1, 2, 3))
    store.set_pinned_blocks(iter(kept))
    pool.offer(store, 1, 2, 3)
    for first in range(10, 400, 20):
        pool.offer(store, *range(first, first + 20))
        assert settled(store)
    assert load(store, keys(1, 2, 3)) == contents(1, 2, 3)
    stats = store.stats()
    assert stats.evicted_blocks > 0 and stats.num_bytes <= stats.max_bytes == 64 * BLOCK_BYTES
    store.close()
