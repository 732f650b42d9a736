"""Rotary position embedding: its settings, its frequencies, and its application to queries and keys.

Scalings that depend on the length of the whole sequence (dynamic NTK, LongRoPE) would change the keys of a cached
prefix when the sequence grows. `max_positions` is therefore limited to the range in which the keys do not change.
Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), Llama 3.1's model card.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.weights.config_bounds import (
    MAX_POSITIONS,
    MAX_ROPE_FACTOR,
    MAX_THETA,
    MIN_ROPE_FACTOR,
    MIN_THETA,
    check_number,
)
from headstart.model.weights.json_file import one_line_error, shorten_text

_LEAST_POSITIONS = 1024  # minimum size of the tables of angles
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
_LIMITS = {"original_max_position_embeddings": MAX_POSITIONS}
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings: the leading `rotary_dim` dimensions of a head are rotated; `scaling` depends on `kind`."""

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int  # number of usable positions
    config_positions: int  # max_position_embeddings as written
    scaling: tuple[tuple[str, Any], ...] = ()


def read_rope(config: dict[str, Any], head_dim: int) -> RopeConfig:
    """Read the rotary settings of a `config.json`, in old or new spelling. Raises ConfigError for an unknown kind."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        shown = shorten_text(repr(given), 200)
        raise ConfigError(f"rotary settings {shown} differ per layer or are not an object; that is not supported")
    parameters = dict(given)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SCALINGS:
        shown = shorten_text(repr(kind), 80)
        raise ConfigError(f"rope type {shown} is not supported; supported are {', '.join(SCALINGS)}")
    positions = int(config.get("max_position_embeddings") or 2048)
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = original or positions
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * check_number(partial, "partial_rotary_factor", above=0.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(f"{rotary_dim} of {head_dim} dimensions of a head are rotated; it must be an even part")
    _require(kind, parameters, rotary_dim)
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    rope = RopeConfig(
        kind=kind,
        theta=check_number(theta, "rope_theta", at_least=MIN_THETA, at_most=MAX_THETA),
        rotary_dim=rotary_dim,
        max_positions=_max_positions(kind, parameters, positions),
        config_positions=positions,
        scaling=tuple(sorted((key, _frozen(value)) for key, value in parameters.items())),
    )
    _refuse_infinite(rope)
    return rope


def inverse_frequencies_and_scale(rope: RopeConfig) -> tuple[Tensor, float]:
    """Return the frequencies [rotary_dim / 2] in float32, and the factor that multiplies cosine and sine."""
    scaling = dict(rope.scaling)
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / rope.theta**steps
    if rope.kind == "linear":
        return plain / scaling["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, scaling)
    if rope.kind == "longrope":
        short = torch.tensor(scaling["short_factor"], dtype=torch.float32)
        return 1.0 / (short * rope.theta**steps), _longrope_factor(rope, scaling)
    return plain, 1.0  # also for "dynamic": within max_positions its base is theta


class RotaryEmbedding:
    """The rotary embedding of one model, for heads of packed rows. Built once per model, on its device."""

    def __init__(self, rope: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, self.factor = inverse_frequencies_and_scale(rope)
        self.frequencies = frequencies.to(device)
        self.rotary_dim = rope.rotary_dim
        self.dtype = dtype
        self._tables = self.cos_sin(torch.zeros(0, dtype=torch.int64, device=device))

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for `apply`, [T, 1, 2, rotary_dim / 2] each; the sine's first half is negated."""
        angle = positions[:, None].float() * self.frequencies
        cosine = (angle.cos() * self.factor).to(self.dtype)
        sine = (angle.sin() * self.factor).to(self.dtype)
        return torch.stack((cosine, cosine), dim=1)[:, None], torch.stack((-sine, sine), dim=1)[:, None]

    def tables_up_to(self, end: int) -> tuple[Tensor, Tensor]:
        """Return the angles of positions 0 to at least `end`, exclusive. Cached, grown on demand."""
        if end > self._tables[0].shape[0]:
            size = max(_LEAST_POSITIONS, 1 << (end - 1).bit_length())
            self._tables = self.cos_sin(torch.arange(size, device=self.frequencies.device))
        return self._tables

    def apply(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return `heads` [T, H, D] with the leading rotary_dim of each head rotated, as a new tensor."""
        cosine, sine = angles
        num_rows, num_heads, head_dim = heads.shape
        halves = heads[..., : self.rotary_dim].reshape(num_rows, num_heads, 2, self.rotary_dim // 2)
        rotated = torch.addcmul(halves * cosine, halves.flip(2), sine).view(num_rows, num_heads, self.rotary_dim)
        if self.rotary_dim == head_dim:
            return rotated
        return torch.cat((rotated, heads[..., self.rotary_dim :]), dim=-1)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _require(kind: str, parameters: dict[str, Any], rotary_dim: int) -> None:
    """Raise ConfigError unless all settings that `kind` needs are given and all values it reads are numbers."""
    missing = [key for key in _NEEDED.get(kind, ()) if parameters.get(key) is None]
    if missing:
        raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)}, which config.json does not give")
    for key in _NUMBERS:
        if parameters.get(key) is not None and kind != "default":
            check_number(parameters[key], key, at_least=0.0, at_most=_LIMITS.get(key, MAX_ROPE_FACTOR))
    if parameters.get("factor") is not None and kind != "default":
        check_number(parameters["factor"], "factor", at_least=MIN_ROPE_FACTOR)
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors = parameters[key]
        if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
            raise ConfigError(f"config.json: {key} is not a list of {rotary_dim // 2} numbers")
        for factor in factors:
            check_number(factor, key, at_least=MIN_ROPE_FACTOR, at_most=MAX_ROPE_FACTOR)


def _refuse_infinite(rope: RopeConfig) -> None:
    """Raise ConfigError if the settings, each valid by itself, together give no finite frequencies."""
    try:
        frequencies, factor = inverse_frequencies_and_scale(rope)
    except (ArithmeticError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(f"config.json: the rotary settings give no frequencies ({one_line_error(error)})") from None
    if not bool(frequencies.isfinite().all()) or not math.isfinite(factor):
        raise ConfigError("config.json: the rotary settings give frequencies that are not finite")


def _max_positions(kind: str, parameters: dict[str, Any], positions: int) -> int:
    original, factor = parameters["original_max_position_embeddings"], parameters.get("factor")
    if kind == "linear" and factor is not None:
        positions = int(positions * factor)
    elif kind == "yarn" and factor is not None:
        positions = max(positions, int(int(original) * factor))
    elif kind == "longrope":
        positions = min(positions, int(original))
    if not 0 < positions <= MAX_POSITIONS:
        raise ConfigError(f"config.json: the rotary settings allow {positions} positions; at most {MAX_POSITIONS} are")
    return positions


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and blend those between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(plain: Tensor, rope: RopeConfig, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Interpolate low frequencies, keep high ones, ramp between; the returned factor scales cosine and sine."""
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or rope.config_positions / original

    def dimension(rotations: float) -> float:
        return rope.rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_factor(factor, scaling)


def _yarn_factor(factor: float, scaling: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope_factor(rope: RopeConfig, scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or rope.config_positions / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
