import json
import os
from pathlib import Path

import pytest
from cgroup_tree import GIB, machine, v2_group, write

from headstart.model.setup.doctor import report


def value(name: str, **arguments: object) -> str:
    found = report(**arguments)  # type: ignore[arg-type]
    return {key: text for section in found.sections for key, text in section.rows}[name]


def test_this_machine_gives_a_report_for_people_and_for_programs() -> None:
    found = report()
    text = found.text()
    for name in ("cores granted", "GOMP_SPINCOUNT", "available", "attention backend", "torch", "python", "headstart"):
        assert name in text
    assert json.loads(json.dumps(found.as_dict()))["sections"][0]["title"] == "processor"


def test_limits_of_the_group_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v2_group(machine(tmp_path), cpu_max="100000 100000", memory_max=str(4 * GIB), memory_current=str(GIB))
    write(tmp_path, "proc/cpuinfo", "model name : Quick 9000\nflags : fpu avx2 avx512f amx_tile\n")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert value("cores of the machine", root=tmp_path) == "64"
    assert value("CPU quota", root=tmp_path) == "1 cores"
    assert value("compute threads", root=tmp_path) == "1"
    assert value("limit", root=tmp_path) == "4.0 GiB"
    assert value("available", root=tmp_path) == "3.0 GiB (bound by the cgroup)"
    assert value("model", root=tmp_path) == "Quick 9000"
    assert value("features", root=tmp_path) == "avx2, avx512f, amx_tile"


@pytest.mark.parametrize(("spin", "warned"), [("1000", False), ("0", False), ("infinity", True), ("30000000000", True)])
def test_spinning_threads_are_warned_of(spin: str, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", spin)
    assert any("GOMP_SPINCOUNT" in warning and "unset it" in warning for warning in report().warnings) is warned


def test_too_many_threads_and_too_little_memory_are_warned_of(tmp_path: Path) -> None:
    v2_group(machine(tmp_path), cpu_max="100000 100000", memory_max=str(GIB), memory_current="0")
    warnings = report(8, root=tmp_path).warnings
    assert any("8 threads on 1 granted cores" in warning for warning in warnings)
    assert any("only 1.0 GiB of memory" in warning for warning in warnings)


def test_processor_without_avx2_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    write(machine(tmp_path), "proc/cpuinfo", "flags : fpu sse2\n")
    assert any("no AVX2" in warning for warning in report(root=tmp_path).warnings)
