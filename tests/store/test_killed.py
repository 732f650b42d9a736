"""kill -9 at random moments of writing (T-36): the folder always opens, and what is read from it is right or missing.

The victims are endless_writer.py: one or two on a folder, with and without eviction, several deaths on one folder. What
they had finished a second before their death must still be there. Where nothing is to be evicted a plan has room for
all that its writers may write before they stop, however fast the machine is.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from store.endless_writer import NUM_KEPT, content_of, key_of, shape_of

from headstart.core.cache.block_store import BlockKey
from headstart.store.catalog import RESERVE_BYTES
from headstart.store.disk import DiskStore

WRITER = Path(__file__).with_name("endless_writer.py")
SECOND = 1_000_000_000  # nanoseconds
GROUP = 16  # blocks asked for in one load
PATIENCE = 300.0  # seconds
WRITER_BYTES = 1 << 30  # that each writer writes at most where nothing is to be evicted


@dataclass(frozen=True)
class Plan:
    """One folder on which writers are killed `deaths` times, each time `num_writers` of them."""

    name: str
    block_bytes: int
    evicting_bytes: int = 0  # the cap on the folder, far less than what is written; 0: nothing is evicted
    num_writers: int = 1
    deaths: int = 1
    early: float = 0.2  # share of deaths while still starting
    seconds: tuple[float, float] = (0.05, 1.7)  # from its start to any other death
    blocks: int = 30  # that each writer finishes before those seconds begin

    @property
    def max_blocks(self) -> int:
        """That each writer writes at most."""
        return sys.maxsize if self.evicting_bytes else WRITER_BYTES // self.block_bytes

    @property
    def needed_bytes(self) -> int:
        """Room on the disk for all that is written, and as much again for what surrounds it."""
        return 2 * (self.evicting_bytes or self.deaths * self.num_writers * WRITER_BYTES)

    @property
    def max_bytes(self) -> int:
        """The cap on the folder: not within reach unless the plan is to evict."""
        return self.evicting_bytes or self.needed_bytes


PLANS = [
    Plan("small blocks", 4 << 10),
    Plan("middling blocks", 64 << 10, deaths=2),
    Plan("odd size", 12_345),
    Plan("evicting", 64 << 10, 32 << 20, deaths=2, blocks=1000),
    Plan("two writers", 32 << 10, num_writers=2, deaths=2),
    Plan("two writers, evicting", 32 << 10, 48 << 20, num_writers=2, blocks=1500),
    Plan("large blocks", 1 << 20),
]


@dataclass
class Seen:
    """The remains of all the deaths of one test. `wrong` must stay empty."""

    deaths: int = 0
    finished: int = 0  # blocks of which a victim said so
    due: int = 0  # of those, more than a second before its death, and not to be evicted
    usable: int = 0  # of those due
    kept_due: int = 0  # the same of pinned blocks where one writer evicts the others
    kept_usable: int = 0
    served: int = 0
    evicted: int = 0  # blocks that were due once, where some are to be evicted
    evicted_blocks: int = 0  # by the stores' own count, where none is
    wrong: list[str] = field(default_factory=list)


class Victim:
    """A writer's process and what it has reported."""

    def __init__(self, folder: Path, plan: Plan, seed: int) -> None:
        self.seed = seed
        self.log = folder.with_name(f"{folder.name}-{seed}.log")
        self.killed_at = 0
        command = [
            sys.executable,
            str(WRITER),
        ]
        command += map(str, (folder, seed, plan.block_bytes, plan.max_bytes, plan.max_blocks))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.PIPE)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.log.read_bytes().startswith(b"ready\n"):
            assert self.process.poll() is None and time.monotonic() < deadline, self.last_words()
            time.sleep(0.005)

    def wait_finished(self, num_blocks: int) -> None:
        """Waits until it has reported so many."""
        deadline = time.monotonic() + PATIENCE
        while len(self.finished()) < num_blocks:
            assert self.process.poll() is None and time.monotonic() < deadline, self.last_words()
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.process.poll() is None, self.last_words()
        self.killed_at = time.monotonic_ns()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        self.process.kill()
        return self.process.communicate()[1].decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def finished(self) -> dict[int, int]:
        """Block -> when it was finished."""
        return {int(index): int(when) for index, when in self._lines() if index != b"evicted"}

    def evicted(self) -> int:
        """Blocks that its store has given up."""
        return max((int(number) for word, number in self._lines() if word == b"evicted"), default=0)

    def _lines(self) -> list[tuple[bytes, bytes]]:
        """Return the lines it has reported; one that was cut is none."""
        pairs = (line.split() for line in self.log.read_bytes().split(b"\n")[1:-1])
        return [(first, second) for first, second in pairs]


def load_all(store: DiskStore, keys: list[BlockKey]) -> Iterator[tuple[BlockKey, bytes]]:
    """Every block of `keys` that the store gives, asked for in groups, and on behind each one that is missing."""
    start = 0
    while start < len(keys):
        group = keys[start : start + GROUP]
        load_id, got, last = store.begin_load(group), 0, False
        deadline = time.monotonic() + PATIENCE
        while not last:
            assert time.monotonic() < deadline, "a load never ended"
            store.wait_for_any_load(0.1)
            for loaded in store.poll_loads():
                assert loaded.load_id == load_id
                for data in loaded.data:
                    yield group[got], bytes(data)
                    got += 1
                last |= loaded.is_last
                store.release_loaded(loaded)
        start += max(got, 1) if got < len(group) else got


def examine(folder: Path, plan: Plan, victims: Iterable[Victim], seen: Seen) -> None:
    """Opens the folder as the next process would and compares everything in it with what was written."""
    store = DiskStore(folder, shape_of(plan.block_bytes), plan.max_bytes)
    try:
        for victim in victims:
            finished = victim.finished()
            keys = [key_of(victim.seed, index) for index in range(max(finished, default=0) + 200)]
            index_of = {key.block_hash: index for index, key in enumerate(keys)}
            found = [key for key in keys if store.contains(key.block_hash)]
            good: set[int] = set()
            for key, data in load_all(store, found):
                seen.served += 1
                if data == content_of(key.block_hash, plan.block_bytes):
                    good.add(index_of[key.block_hash])
                else:
                    seen.wrong.append(f"{plan}: block {index_of[key.block_hash]} of writer {victim.seed}")
            old = {index for index, when in finished.items() if when < victim.killed_at - SECOND}
            kept = {index for index in old if index < NUM_KEPT}
            seen.finished += len(finished)
            if plan.evicting_bytes:
                seen.evicted += len(old - good)
                if plan.num_writers == 1:  # another's pins are not one's own
                    seen.kept_due += len(kept)
                    seen.kept_usable += len(kept & good)
            else:
                seen.due += len(old)
                seen.usable += len(old & good)
                seen.evicted_blocks += victim.evicted()
        used = sum(file.stat().st_size for file in folder.glob("*.kv"))
        segment = max(8 << 20, plan.max_bytes >> 8) + plan.block_bytes
        assert used <= plan.max_bytes + plan.num_writers * segment, f"{plan}: {used} bytes"
    finally:
        store.close()


def kill_writers(folder: Path, plan: Plan, rng: Random, seen: Seen) -> None:
    """All deaths of one plan, some of them while the victim is still starting."""
    everyone: list[Victim] = []
    free = shutil.disk_usage(folder.parent).free
    assert free > plan.needed_bytes + RESERVE_BYTES, f"{plan.name} needs {plan.needed_bytes} bytes of disk, not {free}"
    with ExitStack() as stack:
        for _ in range(plan.deaths):
            victims = [Victim(folder, plan, seed=rng.getrandbits(31)) for _ in range(plan.num_writers)]
            for victim in victims:
                stack.callback(victim.close)
            early = rng.random() < plan.early
            if not early:
                for victim in victims:
                    victim.wait_ready()
                    victim.wait_finished(plan.blocks)
            time.sleep(rng.uniform(0.1, 0.35) if early else rng.uniform(*plan.seconds))
            for victim in victims:
                victim.kill()
                time.sleep(rng.choice([0.0, 0.02]))
                seen.deaths += 1
            everyone += victims
            examine(folder, plan, victims, seen)
        examine(folder, plan, everyone, Seen(wrong=seen.wrong))


def check(seen: Seen) -> None:
    print(f"\nkilled: {seen}")
    assert seen.wrong == []
    assert seen.evicted_blocks == 0, "a plan without eviction reached its cap: it would lose just what is due"
    assert seen.due > 100 and seen.usable >= 0.95 * seen.due
    assert seen.kept_usable >= 0.95 * seen.kept_due


def test_blocks_survive_the_death_of_their_writer_and_none_is_wrong(tmp_path: Path) -> None:
    rng, seen = Random(4), Seen()
    plans = [
        Plan("long enough", 16 << 10, early=0.0, seconds=(1.05, 1.25), blocks=150),
        Plan("long enough, evicting", 64 << 10, 32 << 20, early=0.0, seconds=(1.05, 1.25), blocks=1000),
        Plan("two writers", 32 << 10, num_writers=2),
    ]
    for number, plan in enumerate(plans):
        kill_writers(tmp_path / str(number), plan, rng, seen)
    check(seen)
    assert seen.deaths == 4 and seen.kept_due > 10 and seen.evicted > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_deaths(tmp_path: Path) -> None:
    rng, seen, number = Random(9), Seen(), 0
    while seen.deaths < 100:
        kill_writers(tmp_path / str(number), PLANS[number % len(PLANS)], rng, seen)
        for file in (tmp_path / str(number)).glob("*.kv"):
            file.unlink()  # gigabytes otherwise
        number += 1
    check(seen)
    assert seen.kept_due > 20 and seen.evicted > 0
