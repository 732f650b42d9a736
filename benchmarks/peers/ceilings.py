"""The measured ceilings of this machine: bytes read per second and bf16 operations per second.

    python ceilings.py --threads 2        # the last line of stdout is JSON

Reading is a scan for a byte that does not occur (the C library's memchr, one thread per core): the only computation is
a comparison. Operations are torch's matrix product at the best of a few sizes. Each figure is the best of several
tries: a ceiling is the maximum of the machine, not its average.
"""

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headstart.model.setup.threads import configure_num_threads

BUFFER = 512 * 2**20  # bytes per thread: far more than any cache
SIZES = ((1024, 2048, 4096), (2048, 4096, 4096), (4096, 2048, 2048))  # rows, inputs, outputs
TRIES = 15
ENOUGH = 3.0  # seconds: no further try begins after them


def read_bandwidth(threads: int) -> float:
    """Return the bytes per second that `threads` threads read together, each from its own memory."""
    libc = ctypes.CDLL(None)
    libc.memchr.restype = ctypes.c_void_p
    libc.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    buffers = [ctypes.create_string_buffer(BUFFER) for _ in range(threads)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, BUFFER)  # own pages: untouched memory is one page of zeros

    def scan(buffer: ctypes.Array[ctypes.c_char]) -> None:
        assert libc.memchr(ctypes.addressof(buffer), 2, BUFFER) is None

    with ThreadPoolExecutor(threads) as pool:
        return threads * BUFFER / _best(lambda: list(pool.map(scan, buffers)))


def matmul_rate(threads: int, dtype: str) -> float:
    """Return the operations per second of a large matrix product; a multiply-add counts as two."""
    import torch

    torch.set_num_threads(threads)
    rates: list[float] = []
    for rows, inputs, outputs in SIZES:
        left = torch.randn(rows, inputs).to(getattr(torch, dtype))
        weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
        with torch.inference_mode():
            rates.append(2 * rows * inputs * outputs / _best(lambda a=left, b=weight: torch.nn.functional.linear(a, b)))
    return max(rates)


def _best(work: Callable[[], object]) -> float:
    """Return the shortest of several tries, in seconds; the first one counts only if there is no time for another."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) <= TRIES and (not times or time.perf_counter() - begun < ENOUGH):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:] or times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: all available cores")
    threads = configure_num_threads(parser.parse_args().threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    found = {
        "threads": threads,
        "bytes_per_s": read_bandwidth(threads),
        "bf16_flops": matmul_rate(threads, "bfloat16"),
        "float32_flops": matmul_rate(threads, "float32"),  # the higher rate where the CPU has no bf16 instructions
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
