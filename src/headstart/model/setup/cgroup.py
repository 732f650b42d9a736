"""CPU quota and memory limits of this process's control group, v1 and v2, including nested groups.

Reads only files below `root` (a fake tree in tests). Uses only the standard library, since it runs before torch is
imported. The limits of all ancestors apply too, so the result is the lowest limit from the group up to the mount point.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")
_UNLIMITED_V1 = 1 << 60  # v1 writes "no limit" as the largest page-aligned 63-bit number


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Bytes of one group: its limit, and the usage that cannot be reclaimed (usage without inactive file cache)."""

    limit: int
    used: int


def cpu_quota(root: Path = SYSTEM) -> float | None:
    """Return the CPU time granted per period, in cores; None without a quota."""
    quotas = [quota for folder, v2 in _folders("cpu", root) if (quota := _quota(folder, v2)) is not None]
    return min(quotas, default=None)


def cgroup_memory_limits(root: Path = SYSTEM) -> list[CgroupMemory]:
    """Return every memory limit that applies to this process, innermost first; empty if there is none."""
    grants: list[CgroupMemory] = []
    for folder, v2 in _folders("memory", root):
        limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _UNLIMITED_V1:
            continue
        # The kernel drops inactive file pages before it refuses memory, so they count as free.
        reclaimable = _stat(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
        grants.append(CgroupMemory(limit, max(used - reclaimable, 0)))
    return grants


def _folders(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is v2) for the groups of `controller`, from this process's own group up to each mount point."""
    groups = dict(_groups(root))
    for mount_root, mount_point, fstype, options in _mounts(root):
        v2 = fstype == "cgroup2"
        if not v2 and controller not in options:
            continue
        group = groups.get("" if v2 else controller)
        if group is None:
            continue
        top = root / mount_point.lstrip("/")
        below = _relative(group, mount_root)
        yield from ((top / part, v2) for part in (below, *below.parents))


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller, or "" for v2; path of the group) from /proc/self/cgroup."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):
            yield name, path


def _mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (root, mount point, type, super options) of the cgroup mounts in /proc/self/mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            yield fields[3], fields[4], kind[0], kind[2].split(",")


def _relative(group: str, mount_root: str) -> PurePosixPath:
    """Return the group's path below the mount; "." if the namespace hides it (then the mount *is* the group)."""
    path = PurePosixPath(group)
    if ".." not in path.parts and path.is_relative_to(mount_root):
        return path.relative_to(mount_root)
    return PurePosixPath(".")


def _quota(folder: Path, v2: bool) -> float | None:
    if v2:
        words = " ".join(_lines(folder / "cpu.max")).split()
    else:
        words = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None  # "max", -1, or a missing file
    return int(words[0]) / int(words[1])


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _stat(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # no such controller, or no access
