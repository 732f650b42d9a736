"""LMDB against append-only segment files as storage of KV blocks: writing, opening, reading, truncated files.

    python forms.py FOLDER [NUM_BLOCKS BLOCK_BYTES]        # needs `pip install lmdb`; FOLDER/store-forms is emptied
    python forms.py FOLDER cut                             # truncated files only: nothing is timed

Both sides write the same blocks in order, sync at the end (and drop the page cache where allowed), open the store
again, list every block, and read a thousand of them in random order with a checksum, twice.
"""

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import lmdb

HEAD = struct.Struct("<8s32s32sQI")  # magic, block hash, parent's block hash, length, checksum
SEGMENT_BYTES = 64 << 20
READ_IN_CHILD = """
import lmdb, sys, zlib
with lmdb.open(sys.argv[1], readonly=True, lock=False, map_size=1 << 30).begin(buffers=True) as reader:
    print(sum(zlib.crc32(value) & 1 for _, value in reader.cursor()))
"""
READ_SEGMENT_IN_CHILD = """
import mmap, os, struct, sys, zlib
head, file, how = struct.Struct("<8s32s32sQI"), os.open(sys.argv[1], os.O_RDONLY), sys.argv[2]
offset, end, index = 0, os.fstat(file).st_size, []
while offset + head.size <= end:
    magic, name, _, length, checksum = head.unpack(os.pread(file, head.size, offset))
    index.append((name, offset + head.size, length, checksum))
    offset += head.size + length
mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ) if how == "mmap" else None
print(len(index), flush=True)
sys.stdin.readline()  # meanwhile the file may be cut
served, wrong, buffer = 0, 0, bytearray(max((entry[2] for entry in index), default=0))
for name, at, length, checksum in index:
    if mapped is not None:
        content = mapped[at : at + length]
    else:
        content = memoryview(buffer)[: os.preadv(file, [memoryview(buffer)[:length]], at)]
    if len(content) == length and zlib.crc32(content) == checksum:
        served += 1
        wrong += bytes(content[:8]) != name[:8]  # by construction a block begins as its name does
print(served, wrong)
"""


class Blocks:
    """Block hashes and contents; contents overlap, so that making them costs nothing."""

    def __init__(self, num: int, size: int) -> None:
        self.num, self.size = num, size
        self._noise = os.urandom(size + num)
        self.names = [hashlib.sha256(struct.pack("q", index)).digest() for index in range(num)]
        self.sample = random.Random(0).sample(self.names, min(num, 1000))

    def content(self, index: int) -> memoryview:
        return memoryview(self._noise)[index : index + self.size]


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def drop_caches() -> None:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("cannot drop the page cache", file=sys.stderr)


def measure_lmdb(folder: Path, blocks: Blocks) -> dict[str, float]:
    empty(folder)
    map_size = blocks.num * (blocks.size + 8192) * 2 + (1 << 26)
    start = time.perf_counter()
    writer = lmdb.open(str(folder), map_size=map_size, sync=False, metasync=False)
    for first in range(0, blocks.num, 16):
        with writer.begin(write=True) as transaction:
            for index in range(first, min(first + 16, blocks.num)):
                transaction.put(blocks.names[index], bytes(blocks.content(index)))
    writer.sync(True)
    written = time.perf_counter() - start
    writer.close()
    drop_caches()
    start = time.perf_counter()
    reader = lmdb.open(str(folder), map_size=map_size, readonly=True, lock=False)
    with reader.begin() as transaction:
        assert sum(1 for _ in transaction.cursor().iternext(values=False)) == blocks.num
    started = time.perf_counter() - start

    def read() -> float:
        start = time.perf_counter()
        with reader.begin(buffers=True) as transaction:
            for name in blocks.sample:
                zlib.crc32(transaction.get(name))
        return time.perf_counter() - start

    found = figures(folder, blocks, written, started, read(), read())
    reader.close()
    return found


def measure_segments(folder: Path, blocks: Blocks) -> dict[str, float]:
    empty(folder)
    start = time.perf_counter()
    write_segments(folder, blocks)
    written = time.perf_counter() - start
    drop_caches()
    start = time.perf_counter()
    index: dict[bytes, tuple[int, int, int]] = {}  # block hash -> (file, offset, checksum)
    files = [os.open(path, os.O_RDONLY) for path in sorted(folder.iterdir())]
    for file in files:
        offset, end = 0, os.fstat(file).st_size
        while offset + HEAD.size <= end:
            _, name, _, length, checksum = HEAD.unpack(os.pread(file, HEAD.size, offset))
            index[name] = (file, offset + HEAD.size, checksum)
            offset += HEAD.size + length
    assert len(index) == blocks.num
    started = time.perf_counter() - start

    def read() -> float:
        start, buffer = time.perf_counter(), bytearray(blocks.size)
        for name in blocks.sample:
            file, offset, checksum = index[name]
            os.preadv(file, [buffer], offset)
            assert zlib.crc32(buffer) == checksum
        return time.perf_counter() - start

    found = figures(folder, blocks, written, started, read(), read())
    for file in files:
        os.close(file)
    return found


def write_segments(folder: Path, blocks: Blocks) -> None:
    """Write the segments; every segment is synced when it is full."""
    per_segment = max(SEGMENT_BYTES // (HEAD.size + blocks.size), 1)
    for first in range(0, blocks.num, per_segment):
        with (folder / f"{first:09d}").open("wb", buffering=0) as file:
            for index in range(first, min(first + per_segment, blocks.num)):
                content = blocks.content(index)
                head = HEAD.pack(
                    b"a block.", blocks.names[index], blocks.names[index - 1], blocks.size, zlib.crc32(content)
                )
                os.writev(file.fileno(), [head, content])
            os.fdatasync(file.fileno())


def figures(
    folder: Path, blocks: Blocks, written: float, started: float, first: float, again: float
) -> dict[str, float]:
    whole, part = blocks.num * blocks.size / 1e6, len(blocks.sample) * blocks.size / 1e6
    return {
        "write_mb_s": whole / written,
        "start_ms": 1e3 * started,
        "first_read_mb_s": part / first,
        "second_read_mb_s": part / again,
        "disk_over_content": sum(path.stat().st_size for path in folder.iterdir()) / 1e6 / whole,
    }


def killed_by_truncation(folder: Path, cases: int = 20) -> int:
    """Return how many readers of an LMDB file truncated at a random place die by a signal."""
    empty(folder)
    with lmdb.open(str(folder), map_size=1 << 30) as store, store.begin(write=True) as transaction:
        for index in range(200):
            transaction.put(struct.pack("q", index), os.urandom(50_000))
    data, rng, killed = folder / "data.mdb", random.Random(0), 0
    whole = data.read_bytes()
    for _ in range(cases):
        data.write_bytes(whole[: rng.randrange(8192, len(whole))])
        child = subprocess.run([sys.executable, "-c", READ_IN_CHILD, str(folder)], capture_output=True, timeout=60)
        killed += child.returncode < 0
    return killed


def cut_segments(folder: Path, how: str, *, under_reader: bool, cases: int = 20) -> dict[str, int]:
    """Return the results of readers of a segment file that is truncated, before or while they have it open.

    Of all blocks they hold: how many they served, how many of those were wrong, and how many they missed.
    """
    empty(folder)
    path, rng, num = folder / "segment", random.Random(0), 200
    found = {"killed": 0, "served": 0, "wrong": 0, "missed": 0}
    parts: list[bytes] = []
    for index in range(num):
        name = hashlib.sha256(struct.pack("q", index)).digest()
        content = name[:8] + os.urandom(50_000)
        parts += [HEAD.pack(b"a block.", name, name, len(content), zlib.crc32(content)), content]
    whole = b"".join(parts)
    for _ in range(cases):
        cut = rng.randrange(HEAD.size, len(whole))
        path.write_bytes(whole if under_reader else whole[:cut])
        command = [sys.executable, "-c", READ_SEGMENT_IN_CHILD, str(path), how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            if under_reader:
                os.truncate(path, cut)
            said, _ = child.communicate("go on\n", timeout=60)
        served, wrong = (int(part) for part in said.split()) if said else (0, 0)
        found["killed"] += child.returncode < 0
        found["served"] += served
        found["wrong"] += wrong
        found["missed"] += num - served
    return found


def cut_files(folder: Path) -> dict[str, Any]:
    """Measure both formats: 20 readers each, of files of 200 blocks."""
    return {
        "lmdb_readers_killed_by_truncation": f"{killed_by_truncation(folder)} of 20",
        "segment_readers_of_cut_files": {
            "preadv": cut_segments(folder, "preadv", under_reader=False),
            "preadv_cut_while_open": cut_segments(folder, "preadv", under_reader=True),
            "mapped": cut_segments(folder, "mmap", under_reader=False),
            "mapped_cut_while_open": cut_segments(folder, "mmap", under_reader=True),
        },
    }


def main() -> None:
    folder = Path(sys.argv[1]) / "store-forms"
    if sys.argv[2:] == ["cut"]:
        print(json.dumps(cut_files(folder)))
        shutil.rmtree(folder)
        return
    num, size = (int(argument) for argument in sys.argv[2:4]) if len(sys.argv) > 2 else (2000, 196_608)
    blocks, runs = Blocks(num, size), {"lmdb": list[dict[str, float]](), "segments": list[dict[str, float]]()}
    for _ in range(3):
        runs["lmdb"].append(measure_lmdb(folder, blocks))
        runs["segments"].append(measure_segments(folder, blocks))
    report = {
        "blocks": num,
        "block_bytes": size,
        **{
            form: {key: round(median(run[key] for run in found), 3) for key in found[0]} for form, found in runs.items()
        },
        **cut_files(folder),
    }
    shutil.rmtree(folder)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
