"""Profiles from datasheets: GPUs and models by name, as `MODEL@GPU` or `MODEL@NxGPU`. Not measured.

A step is a roofline: matrix products at a share of the GPUs' peak in dense 16-bit, weights and KV read at a share of
their bandwidth, a fixed overhead. The shares are assumptions, the same for all; N GPUs are one of N times the speed.
KV blocks fill what the weights leave of nine tenths of the memory.
"""

from dataclasses import dataclass

from headstart.core.errors import ConfigError
from headstart.sim.profile import Profile
from headstart.sim.step_cost import RooflineCost

LABEL = "from datasheets, not measured"
MATRIX_SHARE = 0.6  # of peak FLOPS in matrix products
ATTENTION_SHARE = 0.4  # of peak FLOPS in attention
BANDWIDTH_SHARE = 0.8
OVERHEAD = 2e-3  # seconds per step: launches, sampling, scheduling
MEMORY_SHARE = 0.9
BYTES = 2  # of a weight, and of a KV element: bfloat16
STREAM = 5e-6  # seconds per decoding stream: sampling, detokenization
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense 16-bit TFLOPS, TB/s, GB (10**9 bytes)."""

    tflops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. `active` and `total` in billions of parameters."""

    total: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    active: float = 0.0  # of a mixture of experts; 0: all

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


GPUS = {
    "a10": Gpu(125, 0.6, 24),
    "l4": Gpu(121, 0.3, 24),
    "l40s": Gpu(362, 0.864, 48),
    "a100": Gpu(312, 2.039, 80),
    "h100": Gpu(989, 3.35, 80),
    "h200": Gpu(989, 4.8, 141),
    "b200": Gpu(2250, 8.0, 180),
    "mi300x": Gpu(1307, 5.3, 192),
}
"""SXM forms where there are several; the vendors' published figures without sparsity."""
MODELS = {
    "llama-3.1-8b": ModelShape(8.03, 32, 32, 8),
    "llama-3.3-70b": ModelShape(70.6, 80, 64, 8),
    "mistral-7b": ModelShape(7.25, 32, 32, 8),
    "qwen2.5-7b": ModelShape(7.62, 28, 28, 4),
    "qwen3-8b": ModelShape(8.19, 36, 32, 8),
    "qwen3-32b": ModelShape(32.8, 64, 64, 8),
    "qwen3-30b-a3b": ModelShape(30.5, 48, 32, 4, active=3.3),
}
"""Shapes from the models' published config.json."""


def datasheet_profile(name: str) -> Profile:
    """Return the profile of `MODEL@GPU` or `MODEL@NxGPU`. Raises ConfigError for an unknown name or too few GPUs."""
    model, _, machine = name.partition("@")
    number, times, kind = machine.partition("x")
    if not (times and number.isdecimal() and int(number) > 0):
        number, kind = "1", machine
    if model not in MODELS or kind not in GPUS:
        raise ConfigError(
            f"there is no profile {name!r}; write MODEL@GPU or MODEL@2xGPU with one of {', '.join(MODELS)} "
            f"and one of {', '.join(GPUS)}"
        )
    shape, gpu, count = MODELS[model], GPUS[kind], int(number)
    weight_bytes = shape.total * 1e9 * BYTES
    kv_bytes = MEMORY_SHARE * gpu.memory * 1e9 * count - weight_bytes
    num_blocks = int(kv_bytes // (shape.kv_bytes * BLOCK_SIZE))
    if num_blocks < 64:
        raise ConfigError(
            f"profile {name!r}: weights of {weight_bytes / 1e9:.0f} GB leave no space for KV in {count} x {gpu.memory} "
            f"GB; write more GPUs, such as {model}@{2 * count}x{kind}"
        )
    return Profile(name, LABEL, _cost(shape, gpu, count), num_blocks, block_size=BLOCK_SIZE)


def _cost(shape: ModelShape, gpu: Gpu, count: int) -> RooflineCost:
    flops, bandwidth = gpu.tflops * 1e12 * count, gpu.bandwidth * 1e12 * count * BANDWIDTH_SHARE
    pair_flops = 4 * shape.layers * shape.heads * shape.head_dim  # scores and weighted values, two each
    return RooflineCost(
        overhead=OVERHEAD,
        weights=shape.total * 1e9 * BYTES / bandwidth,
        token=2 * (shape.active or shape.total) * 1e9 / (flops * MATRIX_SHARE),
        pair=pair_flops / (flops * ATTENTION_SHARE),
        resident=shape.kv_bytes / bandwidth,
        stream=STREAM,
    )
