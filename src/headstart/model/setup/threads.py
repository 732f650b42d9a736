"""The number of compute threads, and the OpenMP settings that must be in the environment before torch is imported.

It does not set the threads of torch (`sizing.apply_threads` does): it is imported and called before torch is imported.
"""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.model.setup.cgroup import SYSTEM, cpu_quota

# Iterations an idle OpenMP thread spins before it sleeps. With libgomp's default, idle threads occupy the cores of a
# busy machine. Median step in ms of llama-100m on two Zen 5 cores, one stream / 32 streams with one prefix:
#                         0           1000        5000
#   both cores free    6.4 / 16.3  5.1 / 13.9  5.2 / 13.3
#   one of them busy   8.5 / 28    11 / 32     20 / 47
# 1000 iterations last longer than the gap between two parallel regions of a step, but shorter than the server's work
# between two steps.
SPIN_COUNT = 1000


def available_cores(root: Path = SYSTEM) -> int:
    """Return the cores this process may use: the minimum of the machine's, its affinity (cpuset) and its CPU quota.

    At least 1. A quota is rounded down (2.5 cores are 2 threads): an extra thread would be throttled, and the others
    would wait for it.
    """
    cores = os.cpu_count() or 1
    if sys.platform == "linux":
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota = cpu_quota(root)
    return cores if quota is None else max(min(cores, int(quota)), 1)


def configure_num_threads(threads: int = 0, *, environ: MutableMapping[str, str] = os.environ) -> int:
    """Return the number of compute threads: `threads`, else the user's OMP_NUM_THREADS, else every core granted.

    Sets OpenMP's variables in `environ` unless the user has set them; they have an effect only if torch is not imported
    yet. Raises ConfigError for a negative or invalid number.
    """
    count = _positive("threads", str(threads), zero_ok=True)
    if count == 0 and (asked := environ.get("OMP_NUM_THREADS")):
        count = _positive("OMP_NUM_THREADS", asked.split(",")[0])
    count = count or available_cores()
    environ.setdefault("OMP_NUM_THREADS", str(count))
    environ.setdefault("MKL_NUM_THREADS", str(count))
    environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    environ.setdefault("KMP_BLOCKTIME", "1")  # ms; the equivalent for builds of torch with Intel's OpenMP
    return count


def _positive(name: str, text: str, *, zero_ok: bool = False) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be a whole number") from None
    if value < (0 if zero_ok else 1):
        raise ConfigError(f"{name} is {value}; it must be at least 1" + (", or 0 for every core" if zero_ok else ""))
    return value
