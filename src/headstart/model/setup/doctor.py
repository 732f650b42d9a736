"""The report of `headstart doctor`: the machine as this process sees it, the versions, and warnings with remedies.

Measures nothing and changes nothing. Imports torch; to report the thread settings of a real start, call
`threads.prepare_threads` before.
"""

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from headstart import __version__
from headstart.model.attention.base import resolve_backend
from headstart.model.kernels.library import find
from headstart.model.layers.linear import can_pack
from headstart.model.setup.cgroup import SYSTEM, cpu_quota
from headstart.model.setup.sizes import format_bytes
from headstart.model.setup.sizing import KV_SHARE, memory
from headstart.model.setup.threads import SPIN_COUNT, available_cores

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "fastapi", "uvicorn")
_SMALL_MEMORY = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table of (name, value)."""

    title: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All sections, and the warnings: problem and remedy, one line each."""

    sections: tuple[Section, ...]
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


def report(threads: int = 0, *, root: Path = SYSTEM) -> Report:
    """Return the report for a start with `threads` compute threads (0: every core granted)."""
    flags = _cpu_flags(root)
    packs = can_pack(torch.empty(1, 1, dtype=torch.bfloat16))
    return Report(
        (
            Section("processor", _processor(flags, root)),
            Section("threads", _threads(threads, root)),
            Section("memory", _memory(root)),
            Section("compute", _compute(packs=packs)),
            Section("exact reuse", _exact_reuse()),
            Section("versions", _versions()),
        ),
        tuple(_warnings(flags, threads, packs=packs, root=root)),
    )


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
    found = memory("cpu", root)
    return (
        ("limit", format_bytes(found.limit)),
        ("available", f"{format_bytes(found.available)} (bound by the {found.source})"),
        ("KV pool at most", f"{format_bytes(found.available * KV_SHARE)} less {KV_SHARE:.0%} of the weights"),
    )


def _compute(*, packs: bool) -> tuple[tuple[str, str], ...]:
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpu = "; ".join(f"{p.name}, {format_bytes(p.total_memory)}" for p in gpus)
    else:
        gpu = "none" if torch.version.cuda is None else "none visible"
    return (
        ("device", "cuda" if torch.cuda.is_available() else "cpu"),
        ("GPU", gpu),
        ("attention backend", resolve_backend("auto", "cuda" if torch.cuda.is_available() else "cpu")),
        ("CPU kernels", ": ".join(filter(None, (find().note, find().origin)))),
        ("bfloat16 linears", _linears(packs=packs)),
    )


def _linears(*, packs: bool) -> str:
    if find().kernels is None:
        return "oneDNN, prepacked" if packs else "plain torch"
    return "our kernels, packed"


def _exact_reuse() -> tuple[tuple[str, str], ...]:
    """Return where reuse changes no bit, and the exceptions, by the names of `/v1/models` (docs/invariants.md, 14)."""
    ours = find().kernels is not None
    return (
        ("models of Headstart's decoder", "exact" if ours else "not exact: torch-products, torch-attention"),
        ("models of Transformers", "not exact: transformers" + ("" if ours else ", torch-attention")),
        ("--linear-dispatch torch", "not exact: torch-products"),
        ("--attention-backend reference", "not exact: torch-attention"),
        ("--device cuda", "not exact: cuda, torch-products, torch-attention"),
    )


def _versions() -> tuple[tuple[str, str], ...]:
    own = (("headstart", __version__), ("python", platform.python_version()))
    return (*own, *((name, _version(name)) for name in _PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


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
    if flags and not packs and find().kernels is None:
        found.append("no prepacked bfloat16 linears here, so decoding is slower: --dtype float32 may be faster")
    if not torch.backends.mkldnn.is_available():
        found.append("this torch is built without oneDNN (MKL-DNN): install the CPU build from download.pytorch.org")
    if flags and platform.machine() == "x86_64" and "avx2" not in flags:
        found.append("this processor has no AVX2: expect a small part of the usual speed")
    free = memory("cpu", root).available
    if free < _SMALL_MEMORY:
        found.append(f"only {format_bytes(free)} of memory is free: raise the container's limit, or serve small models")
    if torch.version.cuda is not None and not torch.cuda.is_available():
        found.append("torch is built for CUDA but sees no GPU: check the driver (nvidia-smi) or the container's --gpus")
    return found


def _cpu_flags(root: Path) -> set[str]:
    """Return the flags listed in /proc/cpuinfo; empty if there is no such file."""
    return set(_cpuinfo(root, "flags", "Features").split())


def _cpu_model(root: Path) -> str:
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def _cpuinfo(root: Path, *names: str) -> str:
    """Return the first value with a name in `names`; "" if there is none."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
