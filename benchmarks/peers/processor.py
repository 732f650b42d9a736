"""Instruction sets and caches of this machine's CPU. Standard library only: drivers of all environments import it."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def multiplies_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the CPU has instructions for bfloat16 products; False where that is unknown."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "avx512_bf16" in flags or "amx_bf16" in flags
