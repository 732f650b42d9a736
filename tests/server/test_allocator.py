"""Settings of the C allocator: where there is glibc, a process gives back what large bodies needed."""

import platform
import subprocess
import sys

import pytest

CHILD = """
import threading
from headstart.server.allocator import give_memory_back

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

assert give_memory_back()
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
