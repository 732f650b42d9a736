"""Time and memory that a new process needs to open a store of many blocks.

The folder is made with the store's own writer. Every opening is a new process
(`python -m headstart_lab.store.store_opening`), and the pages of the files are dropped from memory before
it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil

import headstart
from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash, root_hash
from headstart.core.errors import ConfigError
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import ReportTable, min_and_max
from headstart.store.catalog import SegmentCatalog
from headstart.store.disk import DiskStore
from headstart.store.files import FileSystemCalls
from headstart.store.format import StoredBlockFormat
from headstart.workload.request_record import median
from headstart_lab.store import page_cache

BLOCK_SIZE = 16
OPEN_SECONDS = 120.0
RUNS = 5
RUN_BLOCKS = 64  # passed to the writer at a time
GIB = 1 << 30
MODEL = hashlib.sha256(b"a model of the lab").digest()


class Opening(NamedTuple):
    """A store to open. `sparse`: its payloads are holes in the files, all zeros, so that it needs no disk space."""

    name: str
    num_blocks: int
    block_bytes: int
    max_bytes: int
    sparse: bool = False

    @property
    def disk_bytes(self) -> int:
        """Return the disk space needed, with a margin; a hole needs the page with its last byte."""
        return self.num_blocks * (4096 if self.sparse else self.block_bytes) * 5 // 4


OPENINGS = (
    Opening("16_kib", 100_000, 16 << 10, 2 * GIB),
    Opening("192_kib_sparse", 100_000, 192 << 10, 20 * GIB, sparse=True),
)


@dataclass(slots=True)
class Opened:
    """The results, as parts of a report."""

    values: dict[str, Any]
    sheet: ReportTable
    problems: list[str] = field(default_factory=list[str])


class SparseFiles(FileSystemCalls):
    """Files that leave a hole where a block of zeros would be written, up to its last byte."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes

    def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
        total = sum(len(buffer) for buffer in buffers)
        if any(len(buffer) != self._block_bytes or any(memoryview(buffer)[:64]) for buffer in buffers):
            return super().pwritev(fd, buffers, offset)
        os.pwrite(fd, b"\0", offset + total - 1)
        return total


def measure_openings(
    openings: Sequence[Opening], folder: Path, bar: ProgressBar = QUIET, *, runs: int = RUNS
) -> Opened:
    """Make each store in `folder`, open it `runs` times, and remove it. `start_s` is of the first store."""
    rows: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for opening in openings:
        if shutil.disk_usage(folder).free < opening.disk_bytes:
            rows[opening.name] = {"left_out": f"it needs {opening.disk_bytes / 1e9:.1f} GB free in {folder.parent}"}
            continue
        with TemporaryDirectory(dir=folder) as parent:
            store = Path(parent) / "store"
            _make(opening, store, bar)
            rows[opening.name] = _open_again_and_again(opening, store, runs, bar)
        if rows[opening.name]["blocks_found"] != opening.num_blocks:
            problems.append(
                f"{opening.name}: {rows[opening.name]['blocks_found']} of {opening.num_blocks} blocks found"
            )
    columns = ("store", "blocks", "start s", "again, from memory, s", "MiB more in memory", "pages dropped before")
    keys = ("blocks_found", "start_s", "start_warm_s", "rss_mib", "dropped_page_share")
    table = [(name, *(row.get(key) for key in keys)) for name, row in rows.items()]
    start = next((row.get("start_s") for row in rows.values()), None)
    sheet = ReportTable(f"opening a store, median of {runs}", columns, tuple(table))
    return Opened({"start_s": start, "openings": rows}, sheet, problems)


def _make(opening: Opening, store: Path, bar: ProgressBar) -> None:
    bar.start_stage(f"writing {opening.num_blocks:,} blocks of {opening.block_bytes:,} bytes", opening.num_blocks)
    shape = StoredBlockFormat(MODEL, BLOCK_SIZE, opening.block_bytes)
    files = SparseFiles(opening.block_bytes) if opening.sparse else FileSystemCalls()
    catalog = SegmentCatalog(store, shape, opening.max_bytes, files)
    noise = bytes(opening.block_bytes) * 2 if opening.sparse else os.urandom(2 * opening.block_bytes)
    keys = _chain(opening.num_blocks)
    try:
        for first in range(0, opening.num_blocks, RUN_BLOCKS):
            count = min(RUN_BLOCKS, opening.num_blocks - first)
            starts = [(first + i) % opening.block_bytes for i in range(count)]
            contents = [memoryview(noise)[start : start + opening.block_bytes] for start in starts]
            catalog.write_new_blocks([(next(keys), content) for content in contents])
            bar.advance(count)
    finally:
        catalog.close()


def _chain(num_blocks: int) -> Iterator[BlockKey]:
    """Yield the blocks of one long prompt."""
    parent = root_hash(MODEL)
    for index in range(num_blocks):
        tokens = array("i", [index] * BLOCK_SIZE).tobytes()
        block_hash = BlockHash(hashlib.sha256(parent + tokens).digest())
        yield BlockKey(block_hash, parent, tokens)
        parent = block_hash


def _open_again_and_again(opening: Opening, store: Path, runs: int, bar: ProgressBar) -> dict[str, Any]:
    """Return the figures of `runs` openings without pages in memory, and of as many with them."""
    cold, warm, dropped = list[dict[str, float]](), list[dict[str, float]](), list[float | None]()
    bar.start_stage(f"opening {opening.name}", 2 * runs)
    for _ in range(runs):
        dropped.append(page_cache.drop(store))
        for found in (cold, warm):
            found.append(_open_in_child(opening, store))
            bar.advance()
    known = [share for share in dropped if share is not None]
    return {
        "start_s": median(run["seconds"] for run in cold),
        "start_s_spread": min_and_max([run["seconds"] for run in cold]),
        "start_warm_s": median(run["seconds"] for run in warm),
        "rss_mib": median(run["rss_bytes"] for run in cold) / (1 << 20),
        "blocks_found": int(cold[0]["num_blocks"]),
        "block_bytes": opening.block_bytes,
        "segments": sum(path.suffix == ".kv" for path in store.iterdir()),
        "payloads": "sparse" if opening.sparse else "real",
        "dropped_page_share": min(known) if known else None,
    }


def _open_in_child(opening: Opening, store: Path) -> dict[str, float]:
    arguments = [str(store), str(opening.block_bytes), str(opening.max_bytes)]
    own = str(Path(__file__).parents[2])
    source = os.pathsep.join((str(Path(headstart.__file__).parents[1]), own))
    child = subprocess.run(
        [sys.executable, "-m", "headstart_lab.store.store_opening", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        timeout=OPEN_SECONDS,
    )
    if child.returncode:
        raise ConfigError(f"a store of the lab cannot be opened: {child.stderr.strip()[-500:]}")
    return json.loads(child.stdout)


def main(folder: str, block_bytes: str, max_bytes: str) -> None:
    """Open a store once and print its time, memory and number of blocks."""
    shape, memory = StoredBlockFormat(MODEL, BLOCK_SIZE, int(block_bytes)), psutil.Process().memory_info
    before, start = memory().rss, time.perf_counter()
    store = DiskStore(Path(folder), shape, int(max_bytes))
    seconds, after = time.perf_counter() - start, memory().rss
    print(json.dumps({"seconds": seconds, "rss_bytes": after - before, "num_blocks": store.stats().num_blocks}))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
