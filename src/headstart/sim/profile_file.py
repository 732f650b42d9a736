"""Profiles by name or file: the reference, datasheet profiles, and files that `simulate calibrate` writes.

Profiles from datasheets: GPUs and models by name, as `MODEL@GPU` or `MODEL@NxGPU`. Not measured.

A step is a roofline: matrix products at a share of the GPUs' peak in dense 16-bit, weights and KV read at a share of
their bandwidth, a fixed overhead. The shares are assumptions, the same for all; N GPUs are one of N times the speed.
KV blocks fill what the weights leave of nine tenths of the memory.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.core.sched.step_time import MaxStepTime
from headstart.sim.profile import REFERENCE, SERIAL, ReplicaProfile
from headstart.sim.sim_store import OffloadTier
from headstart.sim.step_cost import AdditiveCost, PaddedCost, RooflineCost, StepCost, SuperlinearCost

SHAPES: dict[str, type[AdditiveCost | RooflineCost | PaddedCost | SuperlinearCost]] = {
    "sum": AdditiveCost,
    "roofline": RooflineCost,
    "padded": PaddedCost,
    "superlinear": SuperlinearCost,
}
"""Step costs by the name of their shape."""
NAMED = {"reference": REFERENCE, "serial": SERIAL}
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
class GpuDatasheet:
    """Dense 16-bit TFLOPS, TB/s, GB (10**9 bytes)."""

    tflops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True, slots=True)
class ModelDatasheet:
    """A decoder. `active` and `total` in billions of parameters."""

    total: float
    layers: int  # with attention
    heads: int
    kv_heads: int
    head_dim: int = 128
    active: float = 0.0  # of a mixture of experts; 0: all
    state_bytes: int = 0  # of the other layers, per sequence

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


GPUS = {
    "a10": GpuDatasheet(125, 0.6, 24),
    "l4": GpuDatasheet(121, 0.3, 24),
    "l40s": GpuDatasheet(362, 0.864, 48),
    "a100": GpuDatasheet(312, 2.039, 80),
    "h100": GpuDatasheet(989, 3.35, 80),
    "h200": GpuDatasheet(989, 4.8, 141),
    "b200": GpuDatasheet(2250, 8.0, 180),
    "mi300x": GpuDatasheet(1307, 5.3, 192),
}
"""SXM forms where there are several; the vendors' published figures without sparsity."""
MODELS = {
    "llama-3.1-8b": ModelDatasheet(8.03, 32, 32, 8),
    "llama-3.3-70b": ModelDatasheet(70.6, 80, 64, 8),
    "mistral-7b": ModelDatasheet(7.25, 32, 32, 8),
    "qwen2.5-7b": ModelDatasheet(7.62, 28, 28, 4),
    "qwen3-8b": ModelDatasheet(8.19, 36, 32, 8),
    "qwen3-32b": ModelDatasheet(32.8, 64, 64, 8),
    "qwen3-30b-a3b": ModelDatasheet(30.5, 48, 32, 4, active=3.3),
    "qwen3.5-9b": ModelDatasheet(8.94, 8, 16, 4, 256, state_bytes=52_690_944),
}
"""Shapes from the models' published config.json."""


def datasheet_profile(name: str) -> ReplicaProfile:
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
    cost, state_tokens = _datasheet_cost(shape, gpu, count), -(-shape.state_bytes // shape.kv_bytes)
    return ReplicaProfile(name, LABEL, cost, num_blocks, block_size=BLOCK_SIZE, state_tokens=state_tokens)


def _datasheet_cost(shape: ModelDatasheet, gpu: GpuDatasheet, count: int) -> RooflineCost:
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


def resolve_profile(name: str) -> ReplicaProfile:
    """Return a profile by name (reference, serial, MODEL@GPU) or from a .json file.

    `NAME+padded`, `NAME+superlinear` and `NAME+roofline` are the same profile with another shape of step cost. Raises
    ConfigError.
    """
    plain, _, shape = name.partition("+")
    found = read_profile_file(Path(plain)) if plain.endswith(".json") else NAMED.get(plain) or datasheet_profile(plain)
    return replace(found, name=name, cost=_shaped(found.cost, shape)) if shape else found


def read_profile_file(path: Path) -> ReplicaProfile:
    """Return the profile of a file. Raises ConfigError."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    try:
        _check_finite(document)
        values = dict(document)
        values["cost"] = _cost(values["cost"])
        if values.get("offload") is not None:
            values["offload"] = OffloadTier(**values["offload"])
        if values.get("step_bound") is not None:
            values["step_bound"] = MaxStepTime(**values["step_bound"])
        values = {field.name: values[field.name] for field in fields(ReplicaProfile) if field.name in values}
        unknown = [name for name in document if name not in values and name != "error"]
        if unknown:
            raise ConfigError(f"there is no field {unknown[0]!r}")
        found = ReplicaProfile(**values)
        if found.state_tokens < 0:
            raise ConfigError(f"state_tokens is {found.state_tokens}; it must not be negative")
        found.scheduler_config()  # checks its limits
        return found
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error}") from error


def write_profile_file(profile: ReplicaProfile, path: Path, error: Mapping[str, float]) -> None:
    """Write a profile and the `error` of its fit."""
    document: dict[str, Any] = asdict(profile)
    document["cost"] = _document(profile.cost)
    path.write_text(json.dumps({**document, "error": dict(error)}, indent=2) + "\n", encoding="utf-8")


def _check_finite(value: Any) -> None:
    """Raise ValueError if there is a NaN or an infinite number anywhere."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        _check_finite(one)
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"there is the number {value}")


def _cost(row: Any) -> Any:
    """Return a step cost from its shape and parts."""
    row = dict(row)
    shape = row.pop("shape", None)
    if shape not in SHAPES:
        raise ConfigError(f"cost: shape is {shape!r}; there are {', '.join(SHAPES)}")
    if "inner" in row:
        row["inner"] = _cost(row["inner"])
    return SHAPES[shape](**row)


def _document(cost: StepCost) -> dict[str, Any]:
    shape = next(name for name, kind in SHAPES.items() if isinstance(cost, kind))
    row = {field.name: getattr(cost, field.name) for field in fields(SHAPES[shape])}
    if "inner" in row:
        row["inner"] = _document(row["inner"])
    return {"shape": shape, **row}


def _shaped(cost: StepCost, shape: str) -> StepCost:
    """Return a step cost of about the same size in another shape."""
    if not isinstance(cost, AdditiveCost | RooflineCost):
        raise ConfigError(f"+{shape}: the profile has that form already, or another; use it as it is")
    if shape == "padded":
        return PaddedCost(cost)
    if shape == "superlinear":
        return SuperlinearCost(cost)
    if shape == "roofline" and isinstance(cost, AdditiveCost):
        return RooflineCost(0.0, cost.step, cost.token, cost.pair, cost.resident, cost.stream)
    raise ConfigError(f"there is no shape {shape!r} for this profile; there are padded, roofline, superlinear")
