from pathlib import Path

import pytest
from cgroup_tree import GIB, group_files, machine, v1_groups, v2_group, write

from headstart.model.setup.cgroup import CgroupMemory, cgroup_memory_limits, cpu_quota


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None  # not even /proc: another operating system
    machine(tmp_path)
    assert cpu_quota(tmp_path) is None
    assert cgroup_memory_limits(tmp_path) == []


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("rubbish", None)])
def test_v2_quota(tmp_path: Path, text: str, cores: float | None) -> None:
    v2_group(machine(tmp_path), cpu_max=text)
    assert cpu_quota(tmp_path) == cores


def test_v2_memory_does_not_count_inactive_file_pages(tmp_path: Path) -> None:
    v2_group(
        machine(tmp_path),
        memory_max=str(8 * GIB),
        memory_current=str(5 * GIB),
        memory_stat=f"anon 1\nactive_file 7\ninactive_file {3 * GIB}",
    )
    assert cgroup_memory_limits(tmp_path) == [CgroupMemory(8 * GIB, 2 * GIB)]


def test_limits_of_ancestors_bind(tmp_path: Path) -> None:
    v2_group(machine(tmp_path), "/a/b", cpu_max="max 100000", memory_max="max", memory_current="5")
    group_files(tmp_path, "/a", cpu_max="300000 100000", memory_max=str(GIB), memory_current="7")
    assert cpu_quota(tmp_path) == 3
    assert cgroup_memory_limits(tmp_path) == [CgroupMemory(GIB, 7)]


@pytest.mark.parametrize(("path", "mount_root"), [("/../other", "/"), ("/docker/123", "/docker/123"), ("/x", "/y")])
def test_group_hidden_by_a_namespace_is_read_at_the_mount(tmp_path: Path, path: str, mount_root: str) -> None:
    v2_group(machine(tmp_path), path, mount_root=mount_root)
    group_files(tmp_path, "/", cpu_max="200000 100000")
    assert cpu_quota(tmp_path) == 2


def v1_cpu(root: Path, path: str, quota: str) -> None:
    write(root, f"sys/fs/cgroup/cpu{path}/cpu.cfs_quota_us", quota + "\n")
    write(root, f"sys/fs/cgroup/cpu{path}/cpu.cfs_period_us", "100000\n")


def test_v1(tmp_path: Path) -> None:
    v1_groups(machine(tmp_path), "/job")
    v1_cpu(tmp_path, "/job", "50000")
    memory = tmp_path / "sys/fs/cgroup/memory"
    write(memory, "job/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(memory, "job/memory.usage_in_bytes", f"{GIB}\n")
    write(memory, "job/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n")
    write(memory, "memory.limit_in_bytes", "9223372036854771712\n")  # v1's way of saying "none"
    write(memory, "memory.usage_in_bytes", f"{9 * GIB}\n")
    assert cpu_quota(tmp_path) == 0.5
    assert cgroup_memory_limits(tmp_path) == [CgroupMemory(4 * GIB, GIB // 2)]


def test_v1_quota_of_minus_one_is_none(tmp_path: Path) -> None:
    v1_groups(machine(tmp_path))
    v1_cpu(tmp_path, "", "-1")
    assert cpu_quota(tmp_path) is None
