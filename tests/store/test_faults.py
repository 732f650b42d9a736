"""A disk that fails at its n-th call, in every way (T-35), and two stores on one folder under random use: never a wrong
byte, never an exception in the engine's thread, and afterwards everything works again."""

import errno
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
from stored import (
    BLOCK_BYTES,
    ERRORS,
    MAX_BYTES,
    READING,
    SHAPE,
    WRITING,
    Clock,
    Disk,
    Pool,
    contents,
    key,
    keys,
    load,
    name,
    names,
    settled,
    until,
)

from headstart.core.cache.block_store import BlockLoadPart, Data
from headstart.core.cache.hashing import BlockHash
from headstart.store import block_loader as loader
from headstart.store import writer
from headstart.store.disk import DiskStore

NUM_CALLS = 60


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rounds, so that many fit into a test."""
    monkeypatch.setattr(writer, "ROUND_SECONDS", 0.001)


class Sick:
    """A store on a disk that fails on request, and a clock that is moved over its pauses."""

    def __init__(self, folder: Path, files: Disk | None = None) -> None:
        self.files, self.clock, self.pool = files or Disk(), Clock(), Pool()
        self.store = DiskStore(folder, SHAPE, MAX_BYTES, files=self.files, clock=self.clock)
        self.store.start_writing_from(self.pool)

    def use(self, first: int, num: int) -> None:
        """Offers and loads while the disk may fail: whatever comes back is right."""
        for number in range(first, first + num):
            self.pool.offer(self.store, number)
            self.store.mark_used(names(number - 1, number))
            assert until(lambda: not (stats := self.store.stats()).num_pending or bool(stats.degraded))
            for wanted in (range(max(0, number - 1), number + 1), range(first, number + 1)):
                found = load(self.store, keys(*wanted))
                assert found == contents(*wanted)[: len(found)]

    def recovers(self, first: int, num: int) -> bool:
        """Whether everything, offered again, can be loaded, and nothing is degraded any more."""

        def try_again() -> bool:
            self.clock.now += 31.0
            self.pool.offer(self.store, *(n for n in range(first, first + num) if not self.store.contains(name(n))))
            return not self.store.stats().degraded and all(
                self.store.contains(name(number)) for number in range(first, first + num)
            )

        return until(try_again) and load(self.store, keys(*range(first, first + num))) == contents(
            *range(first, first + num)
        )


@pytest.mark.parametrize("lasts", [True, False], ids=["for good", "once"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
def test_a_disk_that_fails_at_any_call_is_survived(tmp_path: Path, error: int, lasts: bool) -> None:
    sick, num_reached = Sick(tmp_path), 0
    for n in range(1, NUM_CALLS + 1):
        sick.files.fail(error, n, 1 << 60 if lasts else n, calls=WRITING + READING)
        sick.use(8 * n, 8)
        num_reached += sick.files.num_calls >= n
        sick.files.heal()
        assert sick.recovers(8 * n, 8), (n, sick.store.stats())
    assert num_reached == NUM_CALLS
    assert sick.store.stats().num_degraded > 0 and sick.store.stats().misses["corrupt"] == 0
    sick.store.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
def test_every_system_call_may_fail_while_a_store_is_opened(tmp_path: Path, error: int) -> None:
    sick = Sick(tmp_path)
    sick.pool.offer(sick.store, *range(1, 9))
    sick.store.close()
    for n in range(1, 12):
        sick.files.fail(error, n)
        again = Sick(tmp_path, sick.files)
        again.use(1, 8)
        again.files.heal()
        assert again.recovers(1, 8), n
        again.store.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
def test_a_disk_that_takes_nothing_is_told_as_degraded_and_its_blocks_still_load(tmp_path: Path, error: int) -> None:
    sick = Sick(tmp_path)
    sick.pool.offer(sick.store, 1, 2)
    assert settled(sick.store)
    sick.files.fail(error, calls=WRITING)
    sick.pool.offer(sick.store, *range(3, 2000))
    assert until(lambda: bool(sick.store.stats().degraded))
    degraded = sick.store.stats().degraded
    assert degraded.startswith("writing: ") and errno.errorcode[error] in degraded
    assert load(sick.store, keys(1, 2)) == contents(1, 2) and sick.store.expected_load_seconds(1) < float("inf")
    assert until(lambda: sick.store.stats().lost_writes["degraded"] > 0)
    assert until(lambda: sick.store.stats().num_pending <= writer.MAX_RUN_BLOCKS)
    sick.files.heal()
    assert sick.recovers(3, 20)
    sick.store.close()


def test_a_disk_that_cannot_be_read_is_not_asked_until_it_works_again(tmp_path: Path) -> None:
    sick = Sick(tmp_path)
    sick.pool.offer(sick.store, 1, 2)
    assert settled(sick.store)
    sick.files.fail(errno.EIO, calls=("preadv",))
    for _ in range(loader.MAX_ERRORS):
        assert load(sick.store, keys(1, 2)) == []
    assert sick.store.expected_load_seconds(1) == float("inf") and sick.store.stats().misses["io"] == loader.MAX_ERRORS
    assert sick.store.stats().degraded == "reading: Input/output error (EIO)"
    sick.pool.offer(sick.store, 3)
    assert settled(sick.store) and sick.store.contains(name(3))
    sick.files.heal()
    sick.clock.now += 31.0
    assert until(lambda: sick.store.expected_load_seconds(1) < float("inf")) and sick.recovers(1, 3)
    assert sick.store.stats().num_degraded == 1
    sick.store.close()


def test_reads_and_writes_that_give_half_are_finished(tmp_path: Path) -> None:
    sick = Sick(tmp_path)
    sick.files.short = True
    sick.pool.offer(sick.store, *range(1, 20))
    assert settled(sick.store) and load(sick.store, keys(*range(1, 20))) == contents(*range(1, 20))
    sick.store.close()


# Two stores, one folder, anything in any order -----------------------------------------------------------------------


class Replica:
    """One store and its engine: blocks whose content depends on who computed it and on how often, so that any mix-up
    between names, versions or buffers shows."""

    def __init__(self, folder: Path, tag: str, max_bytes: int, offered: dict[BlockHash, set[bytes]]) -> None:
        self.files, self.clock = Disk(), Clock()
        self.store = DiskStore(folder, SHAPE, max_bytes, files=self.files, clock=self.clock)
        self.store.start_writing_from(self.read)
        self.tag, self.offered = tag, offered
        self.own: dict[BlockHash, set[bytes]] = defaultdict(set)
        self.bad: dict[BlockHash, set[bytes]] = defaultdict(set)  # what must not come back to this one
        self.blocks: dict[int, tuple[int, bytes]] = {}  # version, content
        self.loads: dict[int, list[int]] = {}  # what has not come yet
        self.held: list[BlockLoadPart] = []
        self.num_loaded = 0

    def read(self, block: int, version: int) -> Data | None:
        now, content = self.blocks[block]
        return content if now == version else None

    def offer(self, number: int, block: int) -> None:
        version = self.blocks.get(block, (0, b""))[0] + 1
        stamp = f"{number} {self.tag} {block} {version}|".encode()
        content = (stamp * (BLOCK_BYTES // len(stamp) + 1))[:BLOCK_BYTES]
        for known in (self.offered, self.own):
            known[name(number)].add(content)
        self.blocks[block] = (version, content)
        self.store.offer_block(block, version, key(number))

    def load(self, numbers: list[int]) -> None:
        self.loads[self.store.begin_load(keys(*numbers))] = numbers

    def distrust(self, numbers: list[int]) -> None:
        self.store.discard_corrupt(names(*numbers))
        for number in numbers:
            self.bad[name(number)] |= self.own[name(number)]
            assert not self.store.contains(name(number))

    def poll(self, rng: Random) -> None:
        for loaded in self.store.poll_loads():
            wanted = self.loads[loaded.load_id]
            for number, data in zip(wanted, loaded.data, strict=False):
                content = bytes(data)
                assert content in self.offered[name(number)] and content not in self.bad[name(number)], number
            self.num_loaded += len(loaded.data)
            del wanted[: len(loaded.data)]
            if loaded.is_last:
                del self.loads[loaded.load_id]
            self.held.append(loaded)
        while self.held and rng.random() < 0.7:
            self.store.release_loaded(self.held.pop(rng.randrange(len(self.held))))


def act(replica: Replica, rng: Random, may_forget: bool) -> None:
    """Something an engine does, on a disk that now and then fails."""
    first = rng.randrange(40)
    run = list(range(first, first + rng.randrange(1, 8)))
    match rng.choices(range(8), [40, 40, 8, 8, 3 * may_forget, 1 * may_forget, 3, 1])[0]:
        case 0:
            for number in run:
                replica.offer(number, rng.randrange(64))  # few blocks: many are reused before they are written
        case 1:
            replica.load(run)
        case 2 if replica.loads:
            cancelled = rng.choice(list(replica.loads))
            replica.store.cancel_load(cancelled, is_late=True)
            del replica.loads[cancelled]
        case 3:
            replica.store.mark_used(names(*run))
        case 4:
            replica.distrust(run)
        case 5:
            replica.store.clear()
        case 6:
            replica.store.set_pinned_blocks(names(*run[:2]))
        case 7:
            replica.files.fail(rng.choice(ERRORS), rng.randrange(1, 9), rng.choice([9, 30]), calls=WRITING + READING)
        case _:
            replica.files.heal()


@pytest.mark.parametrize("small", [False, True], ids=["room for all", "evicting"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_two_stores_do_each_block_is_one_that_was_offered_under_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, small: bool
) -> None:
    monkeypatch.setattr(loader, "PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(loader, "LENT_BYTES", 8 * BLOCK_BYTES)
    rng, offered = Random(seed), defaultdict[BlockHash, set[bytes]](set)
    max_bytes = 30 * BLOCK_BYTES if small else MAX_BYTES
    replicas = [Replica(tmp_path, tag, max_bytes, offered) for tag in "ab"]
    for _ in range(1500):
        replica = rng.choice(replicas)
        replica.clock.now += 0.5
        act(replica, rng, may_forget=not small)
        replica.store.wait_for_any_load(rng.choice([0.0, 0.001]))
        replica.poll(rng)
    for replica in replicas:
        replica.files.heal()
        assert until(lambda replica=replica: ends(replica, rng)), replica.loads
        assert until(lambda replica=replica: has_loaded(replica, rng)), replica.store.stats()
        assert replica.store.stats().misses["corrupt"] == 0
    for replica in replicas:
        replica.store.close()


def has_loaded(replica: Replica, rng: Random) -> bool:
    """Whether it ever loaded anything; asks for more where the writer was too slow for what was asked in time."""
    if not replica.num_loaded:
        replica.offer(0, 0)
        replica.load([0])
    return ends(replica, rng) and replica.num_loaded > 0


def ends(replica: Replica, rng: Random) -> bool:
    """Whether all loads have ended; gives back what was held."""
    replica.clock.now += 31.0
    replica.poll(rng)
    return not replica.loads and not replica.held
