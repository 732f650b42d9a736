"""Several real processes on one folder: they share it through the file system alone."""

import subprocess
import sys
from pathlib import Path

from stored_blocks import SHAPE, chain, key_of, opened, read, segment_files

from headstart.store.catalog import SegmentCatalog

TESTS = str(Path(__file__).parents[1])
CHILD = f"""
import sys
from pathlib import Path
sys.path.insert(0, {TESTS!r})
from headstart.store import catalog as segment_eviction
from stored_blocks import SHAPE, chain, name_of, opened, read
segment_eviction.LOCK_TRIES = 30_000  # the other may be slow: who gives up retries later, which is not seen here
folder, max_bytes, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
catalog = opened(folder, max_bytes)
print("ready", flush=True)
for line in sys.stdin:
    verb, first, num = line.split()
    first, num = int(first), int(num)
    if verb == "write":
        for at in range(first, first + num, 10):
            catalog.make_room(10 * SHAPE.block_bytes, kept=())
            catalog.write_new_blocks(chain(min(10, first + num - at), seed, at))
        print(catalog.num_blocks, flush=True)
    elif verb == "read":
        catalog.refresh_from_other_writers()
        print(sum(read(catalog, [block])[0] for block in chain(num, 1 - seed, first)), flush=True)
    elif verb == "discard":
        catalog.refresh_from_other_writers()
        catalog.discard_blocks([name_of(at, 1 - seed) for at in range(first, first + num)])
        print("done", flush=True)
"""


class Process:
    """Another process with a catalog of its own, which does what it is told."""

    def __init__(self, folder: Path, max_bytes: int, seed: int) -> None:
        argv = [sys.executable, "-c", CHILD, str(folder), str(max_bytes), str(seed)]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "ready"

    def tell(self, verb: str, first: int = 0, num: int = 0) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{verb} {first} {num}\n")
        self._child.stdin.flush()

    def answer(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def ask(self, verb: str, first: int = 0, num: int = 0) -> int:
        self.tell(verb, first, num)
        return int(self.answer())

    def is_running(self) -> bool:
        return self._child.poll() is None

    def end(self) -> int:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        return self._child.wait(300)

    def kill(self) -> None:
        self._child.kill()
        self.end()


def test_what_one_process_appends_another_finds(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    one, two = Process(folder, 1 << 20, 0), Process(folder, 1 << 20, 1)
    for first in range(0, 60, 20):
        assert one.ask("write", first, 20) >= first + 20
        assert two.ask("read", 0, first + 20) == first + 20
        assert two.ask("write", first, 20) >= first + 20
        assert one.ask("read", 0, first + 20) == first + 20
    two.tell("discard", 5, 2)  # in a segment that the other writes
    assert two.answer() == "done"
    catalog = opened(folder, 1 << 20)
    assert read(catalog, chain(10)) == (5, "gone") and catalog.num_blocks == 118
    assert one.end() == two.end() == 0


def test_what_a_killed_process_had_appended_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    one = Process(folder, 1 << 20, 0)
    one.ask("write", 0, 30)
    one.kill()
    assert read(opened(folder, 1 << 20), chain(30)) == (30, None)


def test_two_processes_that_evict_at_once_stay_within_the_size_and_serve_nothing_wrong(tmp_path: Path) -> None:
    folder, max_bytes, num = tmp_path / "store", 256 << 10, 4000
    processes = [Process(folder, max_bytes, seed) for seed in (0, 1)]
    for process in processes:
        process.tell("write", 0, num)
    reader: SegmentCatalog = opened(folder, max_bytes)
    served, largest = 0, 0
    while all(process.is_running() for process in processes) and served < 20_000:
        reader.refresh_from_other_writers()
        largest = max(largest, _bytes_of(folder))
        for seed in (0, 1):
            for at in range(0, num, 97):
                if reader.contains(key_of(at, seed).block_hash):
                    served += read(reader, chain(1, seed, at))[0]
        if len(segment_files(folder)) and _is_done(reader, num):
            break
    assert all(int(process.answer()) > 0 for process in processes)
    assert [process.end() for process in processes] == [0, 0]
    late = opened(folder, max_bytes)
    segment_bytes = max(path.stat().st_size for path in segment_files(folder))
    assert _bytes_of(folder) <= max_bytes + 2 * segment_bytes
    assert largest <= max_bytes + 5 * segment_bytes  # listed while files came and went: no moment's true sum
    assert late.num_corrupt == 0 and late.num_blocks > 500
    found = [read(late, [block])[0] for seed in (0, 1) for block in chain(num, seed)]
    assert sum(found) == late.num_blocks
    assert SHAPE.block_bytes * late.num_blocks < late.num_bytes


def _is_done(reader: SegmentCatalog, num: int) -> bool:
    return all(reader.contains(key_of(num - 1, seed).block_hash) for seed in (0, 1))


def _bytes_of(folder: Path) -> int:
    total = 0
    for path in segment_files(folder):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
