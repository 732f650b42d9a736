"""Experiment: matrix products of a model's layers by number of rows: our kernels, oneDNN's packed form, F.linear.

Ours are a layer's four products as the decoder runs them: with norms, gate and residuals, in one call. The others only
multiply. The weights exceed most caches, so few rows are memory-bound; the read bandwidth is measured as the ceiling.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.measurement.machine import ContentionMeter
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable, min_and_max
from headstart.model.kernels.chain import ChainBuffers, ChainLink, LinearChain
from headstart.model.kernels.library import KernelLibrary, kernel_library_in_use
from headstart.model.kernels.packed import PackedLinear, PackedNorm
from headstart.model.layers.linear import can_pack_weight
from headstart.model.setup.sizing import apply_threads
from headstart.model.weights.shapes import SHAPES, DecoderShape

ROWS = (1, 4, 8, 16, 32, 48, 64, 104, 128, 256, 512, 1024, 2048, 4096)
READ_BYTES = 256 << 20
Pass = Callable[[], None]
"""One run of all layers."""


@dataclass(frozen=True, slots=True)
class LinearsConfig:
    """The products to run, and their time: `seconds` for each number of rows."""

    shape: str = "llama-100m"
    rows: tuple[int, ...] = ROWS
    layers: int = 12
    seconds: float = 4.0
    threads: int = 1
    seed: int = 0


QUICK = LinearsConfig(rows=(1, 32, 256), seconds=1.0)


def run_linears(config: LinearsConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Time every form at every number of rows. Raises ConfigError for an unknown shape."""
    if config.shape not in SHAPES:
        raise ConfigError(f"shape {config.shape!r} is not known; choose {', '.join(SHAPES)}")
    apply_threads(config.threads)
    meter = ContentionMeter()
    torch.manual_seed(config.seed)
    model = Layers(SHAPES[config.shape], config.layers)
    values: dict[str, Any] = {"bytes_per_s": _read_rate(config.threads), "weights": model.num_weights}
    bounds: dict[str, list[float]] = {}
    others: dict[str, float | None] = {}
    rows: list[tuple[Any, ...]] = []
    bar.start_stage("multiplying", len(config.rows))
    for count in config.rows:
        meter.start()
        times = _by_turns(model.passes(count), config.seconds)
        others[str(count)] = meter.cores_used_by_others()
        for name, seconds in times.items():
            values[f"{name}.{count}"], bounds[f"{name}.{count}"] = median(seconds), min_and_max(seconds)
            rows.append((count, name, *_figures(model, count, name, seconds)))
        bar.advance(1)
    title = f"{config.layers} layers of {config.shape}, times in ms"
    return BenchmarkReport(
        "lab linears",
        values,
        model=config.shape,
        seed=config.seed,
        threads=config.threads,
        spread=bounds,
        setup={"layers": config.layers, "seconds": config.seconds},
        contention=others,
        sheets=[ReportTable(title, ("rows", "form", "median", "least", "GFLOP/s", "GB/s"), tuple(rows))],
    )


class Layers:
    """The products of `count` layers, in all forms available here, with the same random weights."""

    def __init__(self, shape: DecoderShape, count: int) -> None:
        hidden, wide = shape.hidden_size, shape.intermediate_size
        attended = shape.num_attention_heads * shape.head_dim
        heads = attended + 2 * shape.num_key_value_heads * shape.head_dim
        self.widths = (attended, hidden, wide, heads)
        self.sizes = [(hidden, attended), (2 * wide, hidden), (hidden, wide), (heads, hidden)]
        self.num_weights = count * sum(rows * columns for rows, columns in self.sizes)
        weights = [[torch.randn(size).bfloat16() for size in self.sizes] for _ in range(count)]
        found = kernel_library_in_use()
        self.chains: dict[str, list[LinearChain]] = {}
        if found is not None:
            for name, int8 in (("ours", False), ("ours_int8", True)):
                self.chains[name] = [self._chain(found, layer, int8=int8) for layer in weights]
        self._packed: list[list[Tensor]] = []
        if can_pack_weight(weights[0][0]):
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self._packed = [[reorder(weight, 16) for weight in layer] for layer in weights]
        self.plain = weights

    def passes(self, count: int) -> dict[str, Pass]:
        """Return the functions that multiply `count` rows, by form."""
        inputs = [torch.randn(count, columns).bfloat16() for _, columns in self.sizes]
        found: dict[str, Pass] = {name: ours(chains, self.buffers(count)) for name, chains in self.chains.items()}
        if self._packed:
            multiply = torch.ops.mkldnn._linear_pointwise
            found["onednn"] = _each(self._packed, inputs, lambda x, w: multiply(x, w, None, "none", [], ""))
        return found | {"plain": _each(self.plain, inputs, F.linear)}

    def _chain(self, found: KernelLibrary, weights: list[Tensor], *, int8: bool) -> LinearChain:
        norm = PackedNorm(torch.ones(self.widths[1]).bfloat16(), 1e-5)
        out = PackedLinear(found, weights[0], int8=int8)
        gate_up = PackedLinear(found, weights[1], norm=norm, gated=True, int8=int8)
        down = PackedLinear(found, weights[2], int8=int8)
        qkv = PackedLinear(found, weights[3], norm=norm, int8=int8)
        links = [
            ChainLink(out, 0, 1, residual=1),
            ChainLink(gate_up, 1, 2),
            ChainLink(down, 2, 1, residual=1),
            ChainLink(qkv, 1, 3),
        ]
        return LinearChain(found, links, self.widths)

    def buffers(self, count: int) -> ChainBuffers:
        """Return the inputs and outputs of a chain: attention output, residual stream, gated rows, q/k/v heads."""
        buffers = ChainBuffers(count, self.widths)
        buffers.allocate(1, 2, 3)
        buffers[0] = torch.randn(count, self.widths[0]).bfloat16()
        return buffers


def ours(chains: list[LinearChain], buffers: ChainBuffers) -> Pass:
    """Return a function that runs all chains on the same buffers, from a residual stream of zeros."""
    scratch = chains[0].allocate_scratch(buffers.count)

    def run() -> None:
        buffers[1].zero_()
        for chain in chains:
            chain(buffers, scratch)

    return run


def _each(layers: list[list[Tensor]], inputs: list[Tensor], multiply: Callable[[Tensor, Tensor], Any]) -> Pass:
    def run() -> None:
        for weights in layers:
            for x, weight in zip(inputs, weights, strict=True):
                multiply(x, weight)

    return run


@torch.inference_mode()
def _by_turns(passes: dict[str, Pass], seconds: float) -> dict[str, list[float]]:
    """Return the seconds of each pass, run in turn (A B A B), at least three of each."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, run in passes.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def _figures(model: Layers, count: int, name: str, seconds: list[float]) -> tuple[float, float, float, float]:
    """Return milliseconds (median, least), GFLOP/s and GB/s of weights at the median."""
    middle, weight_bytes = median(seconds), 1 if name == "ours_int8" else 2
    flops = 2 * count * model.num_weights
    return 1e3 * middle, 1e3 * min(seconds), flops / middle / 1e9, weight_bytes * model.num_weights / middle / 1e9


def _read_rate(threads: int) -> float | None:
    """Return the bytes per second of a plain memory read; None without kernels."""
    found = kernel_library_in_use()
    if found is None:
        return None
    memory = found.arena.take_zeros((READ_BYTES,), torch.uint8).fill_(1)
    times: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        found.library.headstart_read(memory.data_ptr(), READ_BYTES, threads)
        times.append(time.perf_counter() - began)
    return READ_BYTES / median(times)
