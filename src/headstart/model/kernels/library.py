"""Kernels: the compiled functions of one variant, and the choice of the variant.

HEADSTART_KERNELS names a variant (amx, avx512_bf16, avx512_vnni, avx512, avx2; amx_twin, slow, for tests), or `none`
for torch's operators. If it is not set, the best variant for this processor is used. Import torch first: the library
then shares the threads of torch's OpenMP.
"""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch  # before the library: see above

from headstart.core.errors import ConfigError
from headstart.model.kernels.build import (
    TWIN,
    VARIANT_FLAGS,
    BuildError,
    cache_folder,
    compile_kernels,
    packaged_library,
)
from headstart.model.kernels.memory import Arena

VARIABLE, CPUINFO = "HEADSTART_KERNELS", Path("/proc/cpuinfo")
VARIANTS = (*VARIANT_FLAGS, "none")
# Flags that /proc/cpuinfo must list for a variant; Linux hides features whose state it does not save for processes.
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", *_AVX2}
_VNNI = {"avx512_vnni", *_AVX512}
_BF16 = {"avx512_bf16", *_VNNI}
NEEDED = {  # the best first
    "amx": {"amx_tile", "amx_bf16", "amx_int8", *_BF16},
    "avx512_bf16": _BF16,
    "avx512_vnni": _VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
    TWIN: _AVX2,
}
_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18  # x86-64's system call, its code, and the state of tiles

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
# name -> (result, arguments); the sources document their meaning
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "headstart_abi": (_int, ()),
    "headstart_attention_plan": (_long, (_pointer, _pointer, _long)),
    "headstart_attention": (None, (_pointer,)),
    "headstart_read_block": (None, (_pointer, _int, _int, _pointer)),
    "headstart_write_block": (None, (_pointer, _int, _int, _pointer)),
    "headstart_tile_dot": (_int, (_pointer, _pointer, _pointer, _long, _int)),
    "headstart_read": (ctypes.c_uint64, (_pointer, _long, _int)),
    "headstart_scratch": (_long, (_long, _long, _int)),
    "headstart_chain": (None, (_pointer, _int, _pointer, _pointer, _pointer, _pointer, _long, _int)),
    "headstart_stack": (_int, (_pointer,)),
    "headstart_pack_decodes": (_int, (_pointer, _long, _pointer, _pointer, _pointer)),
    "headstart_finite": (None, (_pointer, _long, _pointer, _long, _pointer)),
    "headstart_greatest": (None, (_pointer, _int, _long, _long, _pointer, _pointer, _int)),
    "headstart_sample_scratch": (_long, (_long,)),
    "headstart_sample": (None, (_pointer, _int, _long, _long, _pointer, _pointer, _int)),
    "headstart_pack_bf16": (None, (_pointer, _pointer, _long, _long, _long, _int, _int)),
    "headstart_pack_fp32": (None, (_pointer, _pointer, _long, _long, _long, _int, _int)),
    "headstart_pack_int8": (None, (_pointer, _pointer, _pointer, _long, _long, _long, _int, _int)),
    "headstart_quantise_q4_1": (None, (_pointer, _pointer, _long, _long, _int)),
    "headstart_tile_bytes": (_long, (_int, _long)),
    "headstart_pack_blocks": (None, (_pointer, _long, _pointer, _int, _long, _long, _int, _int)),
    "headstart_look_up": (None, (_pointer, _pointer, _long, _pointer)),
    "headstart_matrices": (None, (_pointer, _pointer, _long)),
    "headstart_short_convolution": (None, (_pointer, _pointer, _long)),
    "headstart_gate": (None, (_pointer,)),
}


class LinearDescriptor(ctypes.Structure):
    """`Linear` of linear.h: addresses and sizes of one packed weight."""

    _fields_ = (
        ("weight", _pointer),
        ("scales", _pointer),
        ("bias", _pointer),
        ("norm", _pointer),
        ("eps", _float),
        ("gated", _int),
        ("in_features", _long),
        ("out_features", _long),
        ("format", _long),
        ("row_bits", _long),
    )


class HeadsDescriptor(ctypes.Structure):
    """`Heads` of rows.h: the layout of a row of heads."""

    _fields_ = (
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("query_eps", _float),
        ("key_eps", _float),
        ("heads", _long),
        ("queries", _long),
        ("keys", _long),
        ("head_dim", _long),
        ("rotary_dim", _long),
    )


class LinkDescriptor(ctypes.Structure):
    """`ChainLink` of linear.h: one product of a chain, on numbered buffers."""

    _fields_ = (
        ("linear", _pointer),
        ("heads", _pointer),
        ("x", _int),
        ("y", _int),
        ("residual", _int),
        ("offset", _long),
        ("stride", _long),
    )


class KernelLibrary:
    """The functions of one variant, as attributes of `library` with their C names. They release the GIL.

    Those of `held` keep it: no thread of Python can change what they read.
    `arena` holds the memory of the weights that are packed for them.
    """

    def __init__(self, variant: str, path: Path) -> None:
        self.variant, self.arena = variant, Arena()
        self.library, self.held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            for library in (self.library, self.held):
                function = getattr(library, name)
                function.restype, function.argtypes = result, list(arguments)


class KernelSearchResult(NamedTuple):
    """The kernels or None; in one line, their variant or the reason why there are none; and their origin."""

    kernels: KernelLibrary | None
    note: str
    origin: str = ""


def kernel_library_in_use() -> KernelLibrary | None:
    """Return the kernels this process uses; None: torch's operators."""
    return find_kernels().kernels


def find_kernels() -> KernelSearchResult:
    """Do the same as `kernels`, and return the reason too."""
    return load_kernels(os.environ.get(VARIABLE, ""))


@cache
def load_kernels(variant: str = "") -> KernelSearchResult:
    """Load the kernels of `variant`, or the best variant if empty. Raises ConfigError if it cannot run here."""
    runnable = runnable_variants()
    if variant and variant not in VARIANTS:
        raise ConfigError(f"{VARIABLE}={variant} is not known; choose {', '.join(VARIANTS)}")
    if variant == "none":
        return KernelSearchResult(None, f"none: {VARIABLE}=none")
    if variant and variant not in runnable:
        raise ConfigError(
            f"{VARIABLE}={variant}: this processor cannot run it; choose {', '.join([*runnable, 'none'])}"
        )
    failed: KernelSearchResult | None = None
    for chosen in [variant] if variant else [name for name in runnable if name != TWIN]:
        found = _packaged(chosen) or _compiled(chosen)
        if found.kernels is not None:
            return found
        failed = failed or found
    return failed or KernelSearchResult(None, "none: they need a processor with AVX2 and Linux")


def runnable_variants() -> list[str]:
    """Return the variants that this processor runs, and the system lets this process run, the best first.

    On Intel's processors a bf16 dot product takes longer than two multiply-adds (seen on family 6, model 207: prompts
    take 1.6 times as long), so without tiles they do without.
    """
    flags = cpu_flags()
    found = [name for name, needed in NEEDED.items() if needed <= flags]
    if "amx" in found and not request_amx_tiles():
        found.remove("amx")
    if "avx512_bf16" in found and cpuinfo_field("vendor_id") == "GenuineIntel":
        found.remove("avx512_bf16")
        found.insert(found.index("avx512_vnni") + 1, "avx512_bf16")
    return found


@cache
def request_amx_tiles() -> bool:
    """Ask Linux for the state of AMX tiles, and return whether this process, its threads and forks may use them.

    An old kernel, a filter of system calls or a hypervisor may refuse although the processor reports them.
    """
    if platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA) == 0


def _packaged(variant: str) -> KernelSearchResult | None:
    """Load the kernels in the package, if there are any and they can be loaded here."""
    path = packaged_library(variant)
    try:
        return (
            None
            if path is None
            else KernelSearchResult(KernelLibrary(variant, path), variant, "built with the package")
        )
    except OSError:  # built for another C library; compiling may still work
        return None


def _compiled(variant: str) -> KernelSearchResult:
    try:
        path = compile_kernels(variant, cache_folder(os.environ), environ=os.environ)
        return KernelSearchResult(KernelLibrary(variant, path), variant, f"compiled on this machine, {path}")
    except (BuildError, OSError) as error:
        return KernelSearchResult(None, f"none: {error}")


def num_kernel_threads() -> int:
    """Return the number of threads of a kernel's parallel region, which is torch's number in the calling thread."""
    return torch.get_num_threads()


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor; empty if the operating system does not report it."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def cpu_flags(path: Path = CPUINFO) -> frozenset[str]:
    """Return the processor features that the operating system reports; empty if there is no such file."""
    return frozenset(cpuinfo_field("flags", path).split())


def cpuinfo_field(name: str, path: Path = CPUINFO) -> str:
    """Return a field of the first processor that the operating system reports; empty if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for found, _, value in fields if found.strip() == name), "")
