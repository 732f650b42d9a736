"""Fake machines for tests of cgroup, threads and sizing: a folder that looks like the root of a Linux system."""

from pathlib import Path

GIB = 2**30


def machine(root: Path, *, total: int = 64 * GIB, available: int = 60 * GIB) -> Path:
    """A machine without limits."""
    write(root, "proc/meminfo", f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n")
    write(root, "proc/self/cgroup", "")
    write(root, "proc/self/mountinfo", "")
    return root


def v2_group(root: Path, path: str = "/", *, mount_root: str = "/", **files: str) -> None:
    """Puts this process in a v2 group with these files ("cpu_max" is cpu.max)."""
    write(root, "proc/self/cgroup", f"0::{path}\n")
    write(root, "proc/self/mountinfo", f"30 23 0:26 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate\n")
    group_files(root, path if mount_root == "/" else "/", **files)


def group_files(root: Path, path: str, **files: str) -> None:
    """Files of the v2 group `path`."""
    for name, text in files.items():
        write(root, f"sys/fs/cgroup{path}/{name.replace('_', '.', 1)}", text + "\n")


def v1_groups(root: Path, path: str = "/") -> None:
    """Puts this process in v1 groups `path` of cpu and memory, with an unused v2 hierarchy beside them."""
    write(root, "proc/self/cgroup", f"4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/\n")
    mounts = (("cpu", "rw,cpu,cpuacct"), ("memory", "rw,memory"))
    lines = [f"3{i} 31 0:3{i} / /sys/fs/cgroup/{name} rw - cgroup cgroup {o}" for i, (name, o) in enumerate(mounts)]
    lines.append("41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
    write(root, "proc/self/mountinfo", "\n".join(lines) + "\n")


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
