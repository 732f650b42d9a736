"""Compile the kernels that this processor can run into the cache, before tests need them.

Needs the standard library alone, so that it can run beside the installation of everything else.
"""

import contextlib
import os
import sys
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from headstart.model.kernels.build import HASHES, VARIANT_FLAGS, BuildError, cache_folder, compile_kernels

CPUINFO = Path("/proc/cpuinfo")


def variants_for(processor_flags: Collection[str]) -> list[str]:
    """Return the variants whose instructions a processor with these flags has: -mavx512bf16 is its avx512_bf16."""
    having = {flag.replace("_", "") for flag in processor_flags}
    return [
        name
        for name, flags in VARIANT_FLAGS.items()
        if {flag.removeprefix("-m").replace("-", "") for flag in flags if flag.startswith("-m")} <= having
    ]


def main() -> None:
    """Build one after another, each from all its sources at once; nothing without a compiler."""
    found = [line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")] if CPUINFO.exists() else []
    variants = variants_for(found[0].split()) if found else []
    with contextlib.suppress(BuildError, OSError, RuntimeError):
        for variant in (*variants, HASHES):
            compile_kernels(variant, cache_folder(os.environ), environ=os.environ)


if __name__ == "__main__":
    main()
