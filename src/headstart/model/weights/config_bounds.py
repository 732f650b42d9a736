"""Bounds on the numbers of a `config.json`, checked before anything is built or allocated from them."""

import math
from collections.abc import Iterator
from typing import Any

from headstart.core.errors import ConfigError
from headstart.model.weights.json_file import shorten_text

MAX_INTEGER = (1 << 63) - 1  # the largest dimension of a tensor
MAX_LAYERS = 4096  # and experts per layer; the largest published models have 126 layers and about 1,000 experts
MAX_SIZE = 1 << 28  # rows or columns of one matrix; the largest published vocabularies have 2^18 tokens
MAX_POSITIONS = 1 << 30
MAX_EPSILON = 1.0  # of a norm; published ones are 1e-6 to 1e-5
MIN_THETA, MAX_THETA = 1.0, 1e15  # base of the rotary embedding; published ones are 1e4 to 5e10
MIN_ROPE_FACTOR, MAX_ROPE_FACTOR = 1e-6, 1e6  # other numbers of rotary settings; published ones are 0.5 to 128
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim", "n_embd", "d_model"), MAX_SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "moe_intermediate_size"), MAX_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), MAX_POSITIONS),
    "max_window_layers": MAX_POSITIONS,  # only compared, never allocated
}
_COUNTED = ("layer", "expert", "block", "predict")  # parts of names such as num_hidden_layers, n_layer, num_experts


def check_config_sizes(raw: dict[str, Any]) -> None:
    """Raise ConfigError for an integer above any plausible model's; the message names key, value and limit."""
    for key, value in _numbers(raw):
        counts = any(part in key for part in _COUNTED) and not key.endswith("_size")
        limit = _SIZES.get(key, MAX_LAYERS if counts else MAX_INTEGER)
        if abs(value) > limit:
            shown = f"about 1e{int(math.log10(abs(value)))}" if abs(value) > 10**20 else value
            raise ConfigError(f"config.json: {shorten_text(key, 80)} is {shown}; at most {limit} is possible")


def check_number(
    value: object, key: str, *, at_least: float | None = None, above: float | None = None, at_most: float = math.inf
) -> float:
    """Return `value` as a float. Raises ConfigError if it is not a number, not finite, too small or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_INTEGER**4:
        raise ConfigError(f"config.json: {key} is {shorten_text(repr(value), 80)}; it must be a finite number")
    number = float(value)
    too_small = (at_least is not None and number < at_least) or (above is not None and number <= above)
    if not math.isfinite(number) or too_small or number > at_most:
        raise ConfigError(f"config.json: {key} is {number}; it must be a finite number in its range")
    return number


def _numbers(raw: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield every integer in `raw` with its key, also from nested objects and lists."""
    waiting: list[tuple[str, Any]] = list(raw.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.items())
        elif isinstance(value, list):
            waiting.extend((key, item) for item in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value
