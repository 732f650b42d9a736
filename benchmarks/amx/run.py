"""Bits and figures of a processor with AMX, in one call: `python benchmarks/amx/run.py OUT.json`; see README.md.

The JSON file is written after each part, so that a run that is cut short leaves what it has. The last line of stdout is
the same document. Without AMX, `--variant amx_twin` runs the tests on the twin of the tile operation, without figures.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]


def first_threads_of_cores() -> list[int]:
    """Return one CPU of each core that this process may use."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(found.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[], help="Of the figures; default: 2 and up to 8.")
    parser.add_argument("--seconds", type=float, default=220, help="No part begins after these.")
    parser.add_argument("--libraries", type=Path, help="Folder with amx.so, amx_twin.so and the variant without tiles.")
    parser.add_argument("--variant", default="amx", help="Another one in its place: only tests, unless --parts.")
    parser.add_argument("--parts", nargs="+", help="Only these.")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> list[int]:
    """Set OpenMP's variables and pin the process, before torch is imported; return the CPUs."""
    cpus = first_threads_of_cores()[: max(options.threads, default=8)]
    options.threads = options.threads or sorted({min(2, len(cpus)), len(cpus)})
    os.environ.setdefault("OMP_NUM_THREADS", str(len(cpus)))
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as a start of the server
    os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cpus)))
    os.sched_setaffinity(0, cpus)
    return cpus


faulthandler.enable()
OPTIONS = parse()
CPUS = prepare(OPTIONS)

import torch  # noqa: E402

# For libraries that are linked without OpenMP's; torch's own, if it brings one.
for runtime in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")) or ["libgomp.so.1"]:
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)

from parts import PARTS, Machine  # noqa: E402

from headstart.model.kernels import library  # noqa: E402


def main() -> int:
    began = time.monotonic()
    if OPTIONS.libraries is not None:
        library.packaged_library = lambda variant: OPTIONS.libraries / f"{variant}.so"
    flags = library.cpu_flags()
    report: dict[str, Any] = {
        "cpu": library.cpu_model(),
        "family, model, stepping": processor(),
        "amx": sorted(flag for flag in flags if flag.startswith("amx")),
        "granted": library.request_amx_tiles(),
        "variants": library.runnable_variants(),
        "cpus": CPUS,
        "threads": OPTIONS.threads,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "load": os.getloadavg(),
        "parts": {},
    }
    if OPTIONS.variant not in report["variants"]:
        report["error"] = f"no {OPTIONS.variant} here, or the system does not grant it: try --variant amx_twin"
        return write(report, 1)
    machine = Machine(OPTIONS.variant, OPTIONS.threads)
    for name, part in PARTS.items():
        if name not in OPTIONS.parts if OPTIONS.parts else OPTIONS.variant != "amx" and not part.is_test:
            continue
        if time.monotonic() - began > OPTIONS.seconds:
            report["parts"][name] = "left out: no time"
            continue
        report["parts"][name] = tried(name, lambda part=part: part.run(machine))
        report["seconds"] = round(time.monotonic() - began, 1)
        write(report, 0, quiet=True)
    return write(report, 0)


def tried(name: str, run: Callable[[], Any]) -> Any:
    began = time.monotonic()
    try:
        found = run()
    except Exception:
        traceback.print_exc()
        found = {"failed": traceback.format_exc().splitlines()[-1]}
    print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return found


def processor() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    values = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in reversed(lines)}
    return [values.get(name, "") for name in ("cpu family", "model", "stepping")]


def write(report: dict[str, Any], code: int, *, quiet: bool = False) -> int:
    OPTIONS.out.write_text(json.dumps(report, indent=1) + "\n")
    if not quiet:
        print(json.dumps(report), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
