"""Settings of the C allocator: where there is glibc, a process gives back what large bodies needed."""

import platform
import subprocess
import sys

import pytest

CHILD = """
import threading
from headstart.allocator import configure_malloc

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

assert configure_malloc()
def work():
    kept = []
    for size in (4 << 20, 3 << 20, 2 << 20) * 4:
        kept.append(bytearray(size))
        kept.append(bytearray(600))  # what stays between large blocks
    del kept[::2]
    return kept

before = resident()
small = []
threads = [threading.Thread(target=lambda: small.append(work())) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_of_large_blocks_goes_back_to_the_system() -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 30, "288 MiB were held"


REGULAR = """
import asyncio
from headstart import allocator

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

async def main():
    allocator.TRIM_SECONDS = 0.01
    trimming = asyncio.create_task(allocator.trim_heap_regularly())
    await asyncio.sleep(0.05)
    before = resident()
    kept = [bytearray(2000) for _ in range(40_000)]
    del kept[::2]  # free parts of 2 KB, and then of 62 KB, between blocks in use
    kept = kept[::16]
    grown = resident() - before
    await asyncio.sleep(0.5)
    trimming.cancel()
    print(grown >> 20, (resident() - before) >> 20)

allocator.configure_malloc()
asyncio.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_memory_that_is_free_between_blocks_in_use_goes_back_to_the_system() -> None:
    ended = subprocess.run([sys.executable, "-c", REGULAR], capture_output=True, text=True, check=True)
    grown, kept = map(int, ended.stdout.split())
    assert grown > 70 and kept < 30, f"{grown} MiB were used and {kept} are kept"
