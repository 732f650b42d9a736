import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from cgroup_tree import GIB, machine, v2_group, write

from headstart.model.kernels.library import NEEDED
from headstart.model.setup.doctor import DoctorReport, GpuInfo, gpu_warnings, make_doctor_report


def value(name: str, **arguments: object) -> str:
    found = make_doctor_report(**arguments)  # type: ignore[arg-type]
    return {key: text for section in found.sections for key, text in section.rows}[name]


def test_this_machine_gives_a_report_for_people_and_for_programs() -> None:
    found = make_doctor_report()
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
    assert (
        any("GOMP_SPINCOUNT" in warning and "unset it" in warning for warning in make_doctor_report().warnings)
        is warned
    )


def test_too_many_threads_and_too_little_memory_are_warned_of(tmp_path: Path) -> None:
    v2_group(machine(tmp_path), cpu_max="100000 100000", memory_max=str(GIB), memory_current="0")
    warnings = make_doctor_report(8, root=tmp_path).warnings
    assert any("8 threads on 1 granted cores" in warning for warning in warnings)
    assert any("only 1.0 GiB of memory" in warning for warning in warnings)


def test_processor_without_avx2_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    write(machine(tmp_path), "proc/cpuinfo", "flags : fpu sse2\n")
    assert any("no AVX2" in warning for warning in make_doctor_report(root=tmp_path).warnings)


@pytest.mark.parametrize("granted", [True, False])
def test_tiles_that_the_system_refuses_are_warned_of(
    granted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.model.setup.doctor.request_amx_tiles", lambda: granted)
    write(machine(tmp_path), "proc/cpuinfo", f"flags : {' '.join(NEEDED['amx'])}\n")
    assert any("use AMX" in warning for warning in make_doctor_report(root=tmp_path).warnings) is not granted


H100 = GpuInfo("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, int(79.5 * GIB))


def rows(found: DoctorReport, title: str) -> dict[str, str]:
    return dict(next(section.rows for section in found.sections if section.title == title))


def test_every_gpu_is_shown_with_the_pool_it_has_room_for(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\nGCC 12"
    write(machine(tmp_path), "proc/driver/nvidia/version", version)
    found = make_doctor_report(
        root=tmp_path, gpus=[H100, GpuInfo("Tesla T4", (7, 5), 15 * GIB, 5 * GIB), GpuInfo("L4", (8, 9), GIB, None)]
    )
    assert rows(found, "GPU 0") == {
        "name": "NVIDIA H100 80GB HBM3",
        "compute capability": "9.0",
        "GPU memory": "80.0 GiB, of which 79.5 GiB is free",
        "KV pool on this GPU": "at most 71.5 GiB less weights and buffers (--gpu-memory-utilization 0.9)",
    }
    assert rows(found, "GPU 1")["KV pool on this GPU"] == "none: see the warning"
    assert rows(found, "GPU 2")["GPU memory"] == "1.0 GiB, of which an unknown part is free"
    assert rows(found, "compute")["device"] == "cuda" and rows(found, "compute")["GPU"] == "3"
    assert rows(found, "versions")["NVIDIA driver"] == "580.65.06"
    assert {"CUDA of torch", "triton"} <= rows(found, "versions").keys()
    for name in ("0", "1", "2"):
        assert f"GPU {name}" in found.text()
    assert rows(make_doctor_report(root=tmp_path, gpus=[]), "compute")["device"] == "cpu"


@pytest.mark.parametrize(
    ("gpus", "facts", "words"),
    [
        ([H100], {}, None),
        ([H100], {"triton": "not installed"}, r"no Triton, .*: pip install triton"),
        ([], {"triton": "not installed", "cuda": None, "has_nvidia": False}, None),
        (
            [GpuInfo("Tesla T4", (7, 5), 15 * GIB, 15 * GIB)],
            {},
            r"GPU 0 has compute capability 7\.5, .*8\.0.*--dtype float32",
        ),
        (
            [H100, GpuInfo("H", (9, 0), 80 * GIB, 75 * GIB)],
            {},
            r"^GPU 1: others hold 4\.5 GiB: .*--gpu-memory-utilization",
        ),
        (
            [GpuInfo("H", (9, 0), 80 * GIB, 50 * GIB)],
            {},
            r"^GPU 0: .*is free: end other processes .* to 0\.63 or less$",
        ),
        ([GpuInfo("H", (9, 0), 80 * GIB, None)], {}, r"^GPU 0: its memory cannot be read: end other processes"),
        ([], {"has_nvidia": True, "cuda": None}, r"built without CUDA, .*NVIDIA GPU.*: pip install torch"),
        ([], {"has_nvidia": True}, r"sees no GPU: check the driver"),
        ([], {"has_nvidia": False, "cuda": None}, None),
    ],
)
def test_problems_of_gpus_are_warned_of_with_a_remedy(
    gpus: list[GpuInfo], facts: dict[str, object], words: str | None
) -> None:
    given = {"triton": "3.6.0", "cuda": "13.0", "has_nvidia": True, **facts}
    found = gpu_warnings(gpus, **given)  # type: ignore[arg-type]
    assert len(found) == (words is not None)
    for warning in found:
        assert re.search(words or "", warning) and "\n" not in warning, warning


@pytest.mark.parametrize(("vendor", "kind", "warned"), [("0x10de", "0x030200", True), ("0x10de", "0x040300", False)])
def test_a_gpu_without_its_driver_is_found_on_the_bus(
    vendor: str, kind: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    device = "sys/bus/pci/devices/0000:01:00.0"
    write(machine(tmp_path), f"{device}/vendor", vendor + "\n")
    write(tmp_path, f"{device}/class", kind + "\n")
    assert any("without CUDA" in warning for warning in make_doctor_report(root=tmp_path, gpus=[]).warnings) is warned


def test_a_gpu_that_cuda_cannot_use_is_no_end_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", fail)
    found = make_doctor_report()
    assert value("GPU") == "none visible" and any("sees no GPU" in warning for warning in found.warnings)
    known = SimpleNamespace(name="H", major=9, minor=0, total_memory=80 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: known)
    monkeypatch.setattr("torch.cuda.mem_get_info", fail)
    assert any("GPU 0: its memory cannot be read" in warning for warning in make_doctor_report().warnings)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (79 * GIB, 80 * GIB))
    assert value("GPU memory") == "80.0 GiB, of which 79.0 GiB is free"


@pytest.mark.gpu
def test_a_real_gpu_is_shown() -> None:
    assert value("device") == "cuda" and rows(make_doctor_report(), "GPU 0")["GPU memory"].endswith("is free")
