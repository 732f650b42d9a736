"""The machine and versions that every benchmark reports, and the check for other processes on the same cores.

Reads /proc and package metadata only: nothing here imports torch.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from headstart import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "starlette", "uvicorn", "aiohttp")
T = TypeVar("T")
CONTENDED_ABOVE = 0.10
"""Average number of cores that other processes may use before a repetition counts as contended."""
_FUTILE = 3
_RESOLUTION = 0.04
"""CPU seconds that the kernel's 10 ms ticks may add in error; intervals below half a second are barely judged."""


def describe_machine() -> dict[str, Any]:
    """Return the CPU, cores, memory and threading environment of this process."""
    return {
        "cpu": _cpu_name(),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": platform.system(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def describe_versions() -> dict[str, str | None]:
    """Return the installed versions of packages that affect figures; None: not installed."""
    own = {"python": platform.python_version(), "headstart": __version__}
    return own | {name: _version(name) for name in PACKAGES}


def print_figures_with_machine(figures: dict[str, Any]) -> None:
    """Print figures with the machine and the versions they were taken on, as one line of JSON."""
    print(json.dumps({**figures, "machine": describe_machine(), "versions": describe_versions()}))


class ContentionMeter:
    """A meter of the cores that other processes have used since `start()`. Linux only: elsewhere it returns None."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None

    def start(self) -> None:
        self._before = _cpu_seconds()

    def cores_used_by_others(self, also_ours: float = 0.0) -> float | None:
        """Return CPU seconds of other processes per second of wall time, >= 0; None where it cannot be measured.

        `also_ours`: CPU seconds in the interval of running processes that belong to the measurement.
        """
        before, after = self._before, _cpu_seconds()
        if before is None or after is None:
            return None
        wall = after[0] - before[0]
        others = (after[1] - before[1]) - (after[2] - before[2]) - also_ours - _RESOLUTION
        return max(others, 0.0) / wall if wall > 0 else 0.0


@dataclass(slots=True)
class ContentionLog:
    """The contention of every kept repetition, and the number of discarded ones."""

    kept: list[float | None]
    repeated: int = 0
    futile: int = 0  # consecutive repetitions that were contended again

    @classmethod
    def empty(cls) -> "ContentionLog":
        return cls(kept=[])

    def as_dict(self) -> dict[str, Any]:
        """Return the keys of the JSON document."""
        known = [share for share in self.kept if share is not None]
        return {
            "other_cores_max": round(max(known), 3) if known else None,
            "contended_runs": sum(share > CONTENDED_ABOVE for share in known),
            "measurements": len(self.kept),
            "repeated_runs": self.repeated,
        }


def measure_uncontended(measure: Callable[[], T], log: ContentionLog, *, retries: int = 1) -> T:
    """Return the result of `measure`; measure again, at most `retries` times, if other processes used the machine.

    The least contended result is kept and recorded in `log`: a busy machine yields a flagged figure, not a missing one.
    After three consecutive contended repeats there are no further repeats: such a machine does not become quiet.
    """
    if log.futile >= _FUTILE:
        retries = 0
    best, share = _measured(measure)
    for _ in range(retries):
        if (share or 0.0) <= CONTENDED_ABOVE:
            break
        log.repeated += 1
        log.futile += 1
        again, other = _measured(measure)
        if (other or 0.0) < (share or 0.0):
            best, share = again, other
    if (share or 0.0) <= CONTENDED_ABOVE:
        log.futile = 0
    log.kept.append(share)
    return best


def _measured(measure: Callable[[], T]) -> tuple[T, float | None]:
    """Return (result, cores that other processes used in the meantime)."""
    meter = ContentionMeter()
    meter.start()
    result = measure()
    return result, meter.cores_used_by_others()


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Return (wall clock, CPU time of the machine, CPU time of this process and its children), in seconds."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    ticks = os.sysconf("SC_CLK_TCK")
    return time.monotonic(), (user + nice + system + irq + softirq + steal) / ticks, sum(os.times()[:4])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    return names.get("model name") or names.get("Model") or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
