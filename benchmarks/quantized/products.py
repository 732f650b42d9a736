"""Products with weights in blocks beside bf16 and torch, by shape and number of rows: `python products.py`.

The forms run by turns (A B A B) in one process: our kernels with weights in blocks and activations of 16 bits (blocks)
and of 8 bits (blocks_8), our kernels with the same weights in bfloat16, and torch with those in oneDNN's packed form.
`--base FILE.so` adds the block kernels of another build, for a comparison before and after a change. Each run
multiplies by enough copies of the weight to exceed most caches. A table on stderr, one JSON document as the last line
of stdout: microseconds of one product, and their ratio to those of bfloat16. With one thread, times are CPU times,
which other jobs of the machine disturb less.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from headstart.model.kernels.chain import ChainBuffers, ChainLink, LinearChain
from headstart.model.kernels.library import KernelLibrary, cpu_model, kernel_library_in_use
from headstart.model.kernels.packed import PackedLinear
from headstart.model.layers.linear import can_pack_weight
from headstart.model.weights.gguf.block_formats import FORMATS, PackedTensor, dequantise, row_bytes

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHAPES = ("1536x576", "3072x1024", "9728x2560")  # outputs x inputs
KINDS = ("Q4_0", "Q4_1", "Q4_K", "Q8_0")
COLD_WEIGHTS = 1 << 26  # of all copies together


def main() -> None:
    """Time every form of every shape, format and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="Outputs x inputs.")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=sorted(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="Of all forms at one number of rows.")
    parser.add_argument("--base", nargs="+", type=Path, default=[], help="Shared objects of other builds.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = kernel_library_in_use()
    if found is None:
        sys.exit("no compiled kernels here")
    libraries = {"blocks": found} | {path.stem: KernelLibrary(found.variant, path) for path in options.base}
    results: list[dict[str, object]] = []
    for shape in options.shapes:
        outputs, inputs = map(int, shape.split("x"))
        for kind in options.kinds:
            if inputs % FORMATS[kind].block_size:
                continue
            products = Products(libraries, found, kind, outputs, inputs)
            for rows in options.rows:
                times = by_turns(products.runs(rows), options.seconds)
                micro = {name: 1e6 * median(each) / products.copies for name, each in times.items()}
                ratios = {name: median(paired(times["bf16"], each)) for name, each in times.items()}
                results.append({"shape": shape, "kind": kind, "rows": rows, "us": micro, "of_bf16": ratios})
                cells = " ".join(f"{name} {micro[name]:9.1f} ({ratios[name]:.2f})" for name in micro)
                print(f"{shape:>10} {kind} {rows:4d} rows: {cells}", file=sys.stderr, flush=True)
    setup = {"cpu": cpu_model(), "variant": found.variant, "threads": options.threads, "torch": str(torch.__version__)}
    print(json.dumps(setup | {"results": results}))


class Products:
    """One random weight in every form, in as many copies as exceed the caches."""

    def __init__(
        self, libraries: dict[str, KernelLibrary], found: KernelLibrary, kind: str, outputs: int, inputs: int
    ) -> None:
        self.copies, self.widths = max(1, COLD_WEIGHTS // (outputs * inputs)), (inputs, outputs)
        weight = blocks(kind, outputs, inputs)
        plain = dequantise(weight, torch.bfloat16)
        self._chains = {name: self._copies(each, weight) for name, each in libraries.items()}
        self._chains["blocks_8"] = self._copies(found, weight, 8)
        self._chains["bf16"] = self._copies(found, plain)
        reorder = torch.ops.mkldnn._reorder_linear_weight if can_pack_weight(plain) else None
        self._torchs = [reorder(plain.clone(), 16) for _ in range(self.copies)] if reorder else []

    def _copies(self, found: KernelLibrary, weight: torch.Tensor | PackedTensor, bits: int = 16) -> list[LinearChain]:
        packed = [PackedLinear(found, weight, activation_bits=bits) for _ in range(self.copies)]
        return [LinearChain(found, [ChainLink(each, 0, 1)], self.widths) for each in packed]

    def runs(self, rows: int) -> dict[str, Callable[[], None]]:
        """Return the functions that multiply `rows` rows by all copies, by form."""
        x = torch.randn(rows, self.widths[0]).bfloat16()
        runs = {name: self._through(chains, x) for name, chains in self._chains.items()}
        if self._torchs:
            multiply = torch.ops.mkldnn._linear_pointwise

            def onednn() -> None:
                for weight in self._torchs:
                    multiply(x, weight, None, "none", [], "")

            runs["onednn"] = onednn
        return runs

    def _through(self, chains: list[LinearChain], x: torch.Tensor) -> Callable[[], None]:
        buffers, scratch = ChainBuffers(len(x), self.widths), chains[0].allocate_scratch(len(x))
        buffers[0] = x
        buffers.allocate(1)

        def run() -> None:
            for chain in chains:
                chain(buffers, scratch)

        return run


def blocks(kind: str, rows: int, columns: int) -> PackedTensor:
    """Return a weight of random bits, with scales of about 0.01."""
    rng, form = np.random.default_rng(0), FORMATS[kind]
    data = rng.integers(0, 256, (rows, row_bytes(kind, columns)), dtype=np.uint8)
    for at in {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2)):
        halves = (rng.standard_normal((rows, columns // form.block_size, 1)) / 100).astype(np.float16)
        data.reshape(rows, -1, form.block_bytes)[:, :, at : at + 2] = halves.view(np.uint8)
    return PackedTensor("weight", kind, (rows, columns), data)


@torch.inference_mode()
def by_turns(runs: dict[str, Callable[[], None]], seconds: float) -> dict[str, list[float]]:
    """Return the seconds of each run, taken in turn, at least three of each; with one thread, of its CPU time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter  # a shared machine: less noise
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, run in runs.items():
            began = clock()
            run()
            times[name].append(clock() - began)
    return times


def paired(base: list[float], other: list[float]) -> list[float]:
    """Return the ratios of runs that followed each other."""
    return [b / a for a, b in zip(base, other, strict=True)]


if __name__ == "__main__":
    main()
