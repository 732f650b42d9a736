"""A folder written by an earlier release: blocks 1 to 3 of `stored`, in version 1 of the format, packed by gzip.

A release that changes the format keeps this folder and adds one of its own: this one is then read, or refused by name.
"""

import gzip
from pathlib import Path

from stored import MAX_BYTES, SHAPE, Pool, contents, keys, load, settled

from headstart.store.disk import DiskStore

PACKED = Path(__file__).parents[1] / "data" / "store-v1"


def test_the_blocks_of_a_folder_of_version_1_are_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    for packed in PACKED.glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        (folder / packed.stem).chmod(0o600)
    store = DiskStore(folder, SHAPE, MAX_BYTES)
    store.start_writing_from(Pool())
    try:
        assert settled(store)
        assert store.stats().num_blocks == 3 and load(store, keys(1, 2, 3)) == contents(1, 2, 3)
    finally:
        store.close()
