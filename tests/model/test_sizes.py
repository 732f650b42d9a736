import subprocess
import sys
from pathlib import Path

import pytest
from cgroup_tree import GIB, group_files, machine, v2_group

from headstart.core.errors import ConfigError
from headstart.model.setup.sizes import cpu_memory, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * GIB),
        ("6 gib", 6 * GIB),
        ("512MB", 512_000_000),
        ("1.5G", 1_500_000_000),
        ("2Ki", 2048),
        ("123", 123),
        (4096, 4096),
        ("10B", 10),
        ("1T", 10**12),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "six GiB", "-1GiB", "6 GiB 3", "1e9", "0", "0.1", "6PiB", "6ib", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (2**42, "4096.0 GiB")]
)
def test_sizes_are_written_in_1024s(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_memory_is_the_machines_without_a_group(tmp_path: Path) -> None:
    assert cpu_memory(machine(tmp_path)) == (64 * GIB, 60 * GIB, "machine")


def test_tightest_group_binds(tmp_path: Path) -> None:
    v2_group(machine(tmp_path), "/a/b", memory_max=str(8 * GIB), memory_current=str(GIB))
    group_files(tmp_path, "/a", memory_max=str(32 * GIB), memory_current=str(30 * GIB))
    assert cpu_memory(tmp_path) == (8 * GIB, 2 * GIB, "cgroup")


def test_generous_group_does_not_hide_a_full_machine(tmp_path: Path) -> None:
    v2_group(machine(tmp_path, available=GIB), memory_max=str(32 * GIB), memory_current="0")
    assert cpu_memory(tmp_path).available == GIB


def test_overdrawn_group_has_nothing_left(tmp_path: Path) -> None:
    v2_group(machine(tmp_path), memory_max=str(GIB), memory_current=str(2 * GIB))
    assert cpu_memory(tmp_path).available == 0


def test_memory_of_this_machine_is_plausible(tmp_path: Path) -> None:
    here = cpu_memory()
    assert 0 < here.available <= here.limit
    elsewhere = cpu_memory(tmp_path)  # no /proc/meminfo: what psutil says
    assert 0 < elsewhere.available <= elsewhere.limit


def test_a_limit_of_address_space_binds() -> None:
    """`ulimit -v`: what is reserved counts, used or not."""
    show = """
import resource
from headstart.model.setup.sizes import cpu_memory
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
print(*cpu_memory(), sep="|")
"""
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    limit, available, source = done.stdout.strip().split("|")
    assert (int(limit), source) == (2**30, "ulimit -v") and 0 < int(available) < 2**30
