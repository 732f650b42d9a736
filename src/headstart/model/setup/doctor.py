"""The report of `headstart doctor`: the machine as this process sees it, the versions, and warnings with remedies.

Measures nothing and changes nothing. Imports torch; to report the thread settings of a real start, call
`threads.prepare_threads` before.
"""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from headstart import __version__
from headstart.core.errors import ConfigError
from headstart.core.sched import scheduler
from headstart.model.attention.base import LEAST_CAPABILITY, resolve_backend
from headstart.model.kernels.library import NEEDED, find_kernels, request_amx_tiles
from headstart.model.layers.linear import can_pack_weight
from headstart.model.setup.cgroup import SYSTEM, cpu_quota
from headstart.model.setup.sizes import GPU_UTILIZATION, MemoryInfo, format_bytes
from headstart.model.setup.sizing import GPU_CONTEXT_BYTES, KV_SHARE, device_memory, gpu_budget
from headstart.model.setup.threads import SPIN_COUNT, available_cores

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "starlette", "uvicorn")
_SMALL_MEMORY = 2 * 2**30
_NOT_INSTALLED = "not installed"
_DISPLAY, _NVIDIA = "0x03", "0x10de"  # class and vendor on the PCI bus
_DRIVER = Path("proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class DoctorSection:
    """A titled table of (name, value)."""

    title: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All sections, and the warnings: problem and remedy, one line each."""

    sections: tuple[DoctorSection, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain lists and strings for JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return the report as text with aligned columns, for a terminal."""
        width = max(len(name) for section in self.sections for name, _ in section.rows)
        lines: list[str] = []
        for section in self.sections:
            lines += [section.title, *(f"  {name:<{width}}  {value}" for name, value in section.rows), ""]
        lines += [f"warning: {warning}" for warning in self.warnings] or ["no warnings"]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU that torch sees; memory in bytes, `free` is None if it cannot be read."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int | None

    @property
    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self.total, self.free or 0, "GPU")


def make_doctor_report(threads: int = 0, *, root: Path = SYSTEM, gpus: Sequence[GpuInfo] | None = None) -> DoctorReport:
    """Return the report for a start with `threads` compute threads (0: every core granted). `gpus`: None: as found."""
    gpus = _gpus() if gpus is None else gpus
    flags = _cpu_flags(root)
    packs = can_pack_weight(torch.empty(1, 1, dtype=torch.bfloat16))
    return DoctorReport(
        (
            DoctorSection("processor", _processor(flags, root)),
            DoctorSection("threads", _threads(threads, root)),
            DoctorSection("memory", _memory(root)),
            DoctorSection("compute", _compute(len(gpus), packs=packs)),
            DoctorSection("exact reuse", _exact_reuse()),
            *(DoctorSection(f"GPU {index}", _gpu(gpu)) for index, gpu in enumerate(gpus)),
            DoctorSection("versions", _versions(root)),
        ),
        (
            *_warnings(flags, threads, packs=packs, root=root),
            *gpu_warnings(gpus, triton=_version("triton"), cuda=torch.version.cuda, has_nvidia=_has_nvidia(root)),
        ),
    )


def gpu_warnings(gpus: Sequence[GpuInfo], *, triton: str, cuda: str | None, has_nvidia: bool) -> list[str]:
    """Return the problems of GPUs, with remedies. `triton` and `cuda` are versions, `cuda` that torch is built for."""
    found = [warning for index, gpu in enumerate(gpus) if (warning := _memory_warning(gpu, f"GPU {index}: "))]
    for index, gpu in enumerate(gpus):
        if gpu.capability < LEAST_CAPABILITY:
            found.append(
                f"GPU {index} has compute capability {_dotted(gpu.capability)}, and bfloat16 and Triton need "
                f"{_dotted(LEAST_CAPABILITY)}: use --dtype float32, or a newer GPU"
            )
    if gpus and triton == _NOT_INSTALLED:
        found.append("no Triton, so models run on the GPU through plain torch, which is slower: pip install triton")
    if cuda is None and has_nvidia:
        found.append(
            "torch is built without CUDA, and an NVIDIA GPU is there: pip install torch without the index of CPU builds"
        )
    if cuda is not None and not gpus:
        found.append("torch is built for CUDA but sees no GPU: check the driver (nvidia-smi) or the container's --gpus")
    return found


def _processor(flags: set[str], root: Path) -> tuple[tuple[str, str], ...]:
    found = [name for name in _CPU_FEATURES if name in flags]
    return (
        ("model", _cpu_model(root)),
        ("features", ", ".join(found) or "unknown"),
        ("torch uses", torch.backends.cpu.get_cpu_capability()),
    )


def _threads(threads: int, root: Path) -> tuple[tuple[str, str], ...]:
    quota = cpu_quota(root)
    return (
        ("cores of the machine", str(os.cpu_count() or 1)),
        ("CPU quota", "none" if quota is None else f"{quota:g} cores"),
        ("cores granted", str(available_cores(root))),
        ("compute threads", str(threads or available_cores(root))),
        ("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "not set")),
        ("GOMP_SPINCOUNT", os.environ.get("GOMP_SPINCOUNT", f"not set (a start sets {SPIN_COUNT})")),
    )


def _memory(root: Path) -> tuple[tuple[str, str], ...]:
    found = device_memory("cpu", root)
    return (
        ("limit", format_bytes(found.limit)),
        ("available", f"{format_bytes(found.available)} (bound by the {found.source})"),
        ("KV pool at most", f"{format_bytes(found.available * KV_SHARE)} less {KV_SHARE:.0%} of the weights"),
    )


def _gpus() -> list[GpuInfo]:
    try:
        return [_read_gpu(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # CUDA does not start
        return []


def _read_gpu(index: int) -> GpuInfo:
    properties = torch.cuda.get_device_properties(index)
    try:
        free = device_memory(f"cuda:{index}").available
    except RuntimeError:  # no memory is left for a context, or another process has the GPU to itself
        free = None
    return GpuInfo(properties.name, (properties.major, properties.minor), properties.total_memory, free)


def _gpu(gpu: GpuInfo) -> tuple[tuple[str, str], ...]:
    free = "an unknown part" if gpu.free is None else format_bytes(gpu.free)
    try:
        room = format_bytes(gpu_budget(gpu.memory_info))
        pool = f"at most {room} less weights and buffers (--gpu-memory-utilization {GPU_UTILIZATION})"
    except ConfigError:
        pool = "none: see the warning"
    return (
        ("name", gpu.name),
        ("compute capability", _dotted(gpu.capability)),
        ("GPU memory", f"{format_bytes(gpu.total)}, of which {free} is free"),
        ("KV pool on this GPU", pool),
    )


def _memory_warning(gpu: GpuInfo, where: str) -> str | None:
    """Return the warning of memory that other processes hold, None if there is nothing to warn of."""
    if gpu.free is None:
        return f"{where}its memory cannot be read: end other processes (nvidia-smi lists them)"
    try:
        gpu_budget(gpu.memory_info)
    except ConfigError as error:
        return f"{where}{error}"
    others = gpu.total - gpu.free - GPU_CONTEXT_BYTES
    if others <= 0:
        return None
    return f"{where}others hold {format_bytes(others)}: end them, or give each a part with --gpu-memory-utilization"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _has_nvidia(root: Path) -> bool:
    """Return whether an NVIDIA GPU is there: its driver is loaded, or it is on the PCI bus."""
    if (root / _DRIVER).exists():
        return True
    devices = (root / "sys/bus/pci/devices").glob("*")
    return any(_text(one / "vendor") == _NVIDIA and _text(one / "class").startswith(_DISPLAY) for one in devices)


def _text(path: Path) -> str:
    """Return the text of a file without spaces around it; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _compute(num_gpus: int, *, packs: bool) -> tuple[tuple[str, str], ...]:
    device = "cuda" if num_gpus else "cpu"
    by_torch = "oneDNN, prepacked" if packs else "plain torch"
    return (
        ("device", device),
        ("GPU", str(num_gpus) if num_gpus else "none" if torch.version.cuda is None else "none visible"),
        ("attention backend", resolve_backend("auto", device)),
        ("CPU kernels", ": ".join(filter(None, (find_kernels().note, find_kernels().origin)))),
        ("bfloat16 linears", by_torch if find_kernels().kernels is None else "our kernels, packed"),
        ("scheduler", "interpreted" if scheduler.__file__.endswith(".py") else "compiled"),
    )


def _exact_reuse() -> tuple[tuple[str, str], ...]:
    """Return where reuse changes no bit, and the exceptions, by the names of `/v1/models` (docs/invariants.md, 15)."""
    ours = find_kernels().kernels is not None
    return (
        ("models of Headstart's decoder", "exact" if ours else "not exact: torch-products, torch-attention"),
        ("models of Transformers", "not exact: transformers" + ("" if ours else ", torch-attention")),
        ("--linear-dispatch torch", "not exact: torch-products"),
        ("--attention-backend reference", "not exact: torch-attention"),
        ("--device cuda", "not exact: cuda; exact with --batch-invariant, for models of Headstart's decoder"),
    )


def _versions(root: Path) -> tuple[tuple[str, str], ...]:
    own = (("headstart", __version__), ("python", platform.python_version()))
    driver = re.search(r"\d{3,}\.\d[\d.]*", _text(root / _DRIVER))
    cuda = (("CUDA of torch", torch.version.cuda or "none"), ("NVIDIA driver", driver[0] if driver else "none"))
    return (*own, *((name, _version(name)) for name in _PACKAGES), *cuda)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _NOT_INSTALLED


def _warnings(flags: set[str], threads: int, *, packs: bool, root: Path) -> list[str]:
    found: list[str] = []
    granted = available_cores(root)
    spin = os.environ.get("GOMP_SPINCOUNT", "")
    if spin and not (spin.isdigit() and int(spin) <= 100 * SPIN_COUNT):
        found.append(
            f"GOMP_SPINCOUNT={spin} makes idle threads hold the cores of busy ones: unset it, or use 0 to 1000"
        )
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        found.append("OMP_WAIT_POLICY=ACTIVE makes idle threads hold the cores of busy ones: unset it")
    if threads > granted:
        found.append(f"{threads} threads on {granted} granted cores wait for each other: use --threads {granted}")
    if flags and not packs and find_kernels().kernels is None:
        found.append("no prepacked bfloat16 linears here, so decoding is slower: --dtype float32 may be faster")
    if not torch.backends.mkldnn.is_available():
        found.append("this torch is built without oneDNN (MKL-DNN): install the CPU build from download.pytorch.org")
    if flags and platform.machine() == "x86_64" and "avx2" not in flags:
        found.append("this processor has no AVX2: expect a small part of the usual speed")
    if flags >= NEEDED["amx"] and not request_amx_tiles():
        found.append(
            "the system does not let this process use AMX (arch_prctl), so prompts take longer: allow the call"
        )
    free = device_memory("cpu", root).available
    if free < _SMALL_MEMORY:
        found.append(f"only {format_bytes(free)} of memory is free: raise the container's limit, or serve small models")
    return found


def _cpu_flags(root: Path) -> set[str]:
    """Return the flags listed in /proc/cpuinfo; empty if there is no such file."""
    return set(_cpuinfo(root, "flags", "Features").split())


def _cpu_model(root: Path) -> str:
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def _cpuinfo(root: Path, *names: str) -> str:
    """Return the first value with a name in `names`; "" if there is none."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
