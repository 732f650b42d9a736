"""A process that writes blocks through the real DiskStore until it is killed: the victim of test_killed.py.

A block's content is a pure function of its name, so that any wrong byte shows. Lines on stdout: `ready`, and after it
`INDEX NANOSECONDS` (monotonic, system-wide) as soon as the store's index says that block INDEX is written, and
`evicted NUMBER` whenever the store has given up more blocks. After `max_blocks` it only waits for its death.
"""

import hashlib
import os
import sys
import time
from array import array
from collections import deque
from pathlib import Path
from random import Random

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.store.disk import DiskStore
from headstart.store.format import StoredBlockFormat

BLOCK_SIZE = 16
FINGERPRINT = hashlib.sha256(b"killed").digest()
NUM_KEPT = 24  # the first blocks of each seed are pinned
MAX_WAITING = 400  # offered and not yet written
NOISE = Random(4).randbytes(4 << 20)


def shape_of(block_bytes: int) -> StoredBlockFormat:
    return StoredBlockFormat(FINGERPRINT, BLOCK_SIZE, block_bytes)


def name_of(seed: int, index: int) -> BlockHash:
    return BlockHash(hashlib.sha256(f"{seed}/{index}".encode()).digest())


def key_of(seed: int, index: int) -> BlockKey:
    return BlockKey(name_of(seed, index), name_of(seed, index - 1), array("i", [seed, index] * 8).tobytes())


def content_of(name: bytes, num_bytes: int) -> bytes:
    """The name, then a stretch of fixed noise that begins where the name says."""
    start = int.from_bytes(name[:8], "little") % (len(NOISE) - num_bytes)
    return (name + NOISE[start : start + num_bytes])[:num_bytes]


def main(folder: str, seed: int, block_bytes: int, max_bytes: int, max_blocks: int) -> None:
    store = DiskStore(Path(folder), shape_of(block_bytes), max_bytes)
    store.start_writing_from(lambda block, version: content_of(name_of(seed, block), block_bytes))
    store.set_pinned_blocks([name_of(seed, index) for index in range(NUM_KEPT)])
    os.write(1, b"ready\n")
    waiting: deque[tuple[int, BlockHash]] = deque()
    index = num_evicted = 0
    while True:
        while len(waiting) < MAX_WAITING and index < max_blocks:
            key = key_of(seed, index)
            store.offer_block(index, 1, key)
            waiting.append((index, key.block_hash))
            index += 1
        now = time.monotonic_ns()
        written = [number for number, name in waiting if store.contains(name)]
        if written:
            os.write(1, b"".join(b"%d %d\n" % (number, now) for number in written))
            done = set(written)
            waiting = deque(entry for entry in waiting if entry[0] not in done)
            if store.stats().evicted_blocks > num_evicted:
                num_evicted = store.stats().evicted_blocks
                os.write(1, b"evicted %d\n" % num_evicted)
        else:
            time.sleep(0.0005)
        if waiting and index - waiting[0][0] > 50 * MAX_WAITING:
            waiting.popleft()  # written and evicted again before it was seen


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
