"""Byte sizes as text, and the available memory. Does not import torch, so that processes without torch can use it."""

import re
import resource
from pathlib import Path
from typing import NamedTuple

import psutil

from headstart.core.errors import ConfigError
from headstart.model.setup.cgroup import SYSTEM, cgroup_memory_limits

GPU_UTILIZATION = 0.9  # of a GPU's memory, for one process
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class MemoryInfo(NamedTuple):
    """Bytes this process may use in total (`limit`), and the part that is still free (`available`)."""

    limit: int
    available: int
    source: str  # origin of the limit, for messages


def cpu_memory(root: Path = SYSTEM) -> MemoryInfo:
    """Return the memory of the CPU: the lowest of all cgroup limits, `ulimit -v`, and the machine's memory."""
    total, available = _machine_memory(root)
    found = [MemoryInfo(total, available, "machine")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        found.append(MemoryInfo(address_space, address_space - psutil.Process().memory_info().vms, "ulimit -v"))
    found += [MemoryInfo(grant.limit, grant.limit - grant.used, "cgroup") for grant in cgroup_memory_limits(root)]
    tightest = min(found, key=lambda m: m.available)
    return MemoryInfo(min(m.limit for m in found), max(tightest.available, 0), tightest.source)


def parse_bytes(text: str | int) -> int:
    """Parse "6GiB", "512 MB", "1.5g" or "1073741824" as bytes. GiB is a power of 1024, GB and G are powers of 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text), re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, such as 6GiB, 512MiB or 1.5GB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise ConfigError(f"{text!r} is not a size; it must be at least one byte")
    return size


def format_bytes(size: float) -> str:
    """Format `size` in powers of 1024: "6.2 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _machine_memory(root: Path) -> tuple[int, int]:
    """Return (total, available) bytes of the machine; available includes what the kernel can reclaim."""
    fields: dict[str, int] = {}
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, rest = line.partition(":")
        if (words := rest.split()) and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    if "MemTotal" in fields and "MemAvailable" in fields:
        return fields["MemTotal"], fields["MemAvailable"]

    virtual = psutil.virtual_memory()
    return virtual.total, virtual.available
