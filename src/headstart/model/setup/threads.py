"""How many threads to compute with, and the OpenMP settings that must be in the environment before torch is imported.

Not here: telling torch (`sizing.apply_threads`); this module must be importable, and called, before torch is.
"""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.model.setup.cgroup import SYSTEM, cpu_quota

# Iterations an idle OpenMP thread spins before it sleeps. libgomp's default keeps the cores of a busy machine for
# threads that do nothing. Median step in ms of llama-100m on two Zen 5 cores, one stream / 32 streams with one prefix:
#                         0           1000        5000
#   both cores free    6.4 / 16.3  5.1 / 13.9  5.2 / 13.3
#   one of them busy   8.5 / 28    11 / 32     20 / 47
# 1000 iterations outlast the gap between two parallel regions of a step, and not what a server does beside it.
SPIN_COUNT = 1000


def available_cores(root: Path = SYSTEM) -> int:
    """Cores this process may use: the least of the machine's, its affinity (cpuset) and its CPU quota; at least 1.

    A quota is rounded down (2.5 cores are 2 threads): a thread too many is throttled, and the others wait for it.
    """
    cores = os.cpu_count() or 1
    if sys.platform == "linux":
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota = cpu_quota(root)
    return cores if quota is None else max(min(cores, int(quota)), 1)


def prepare_threads(threads: int = 0, *, environ: MutableMapping[str, str] = os.environ) -> int:
    """The threads to compute with: `threads`, else the user's OMP_NUM_THREADS, else every core granted.

    Sets OpenMP's variables in `environ` where the user has not; they count only if torch is not imported yet. Raises
    ConfigError for a negative or unreadable number.
    """
    count = _positive("threads", str(threads), zero_ok=True)
    if count == 0 and (asked := environ.get("OMP_NUM_THREADS")):
        count = _positive("OMP_NUM_THREADS", asked.split(",")[0])
    count = count or available_cores()
    environ.setdefault("OMP_NUM_THREADS", str(count))
    environ.setdefault("MKL_NUM_THREADS", str(count))
    environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    environ.setdefault("KMP_BLOCKTIME", "1")  # ms; the same for builds of torch on Intel's OpenMP
    return count


def _positive(name: str, text: str, *, zero_ok: bool = False) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be a whole number") from None
    if value < (0 if zero_ok else 1):
        raise ConfigError(f"{name} is {value}; it must be at least 1" + (", or 0 for every core" if zero_ok else ""))
    return value
