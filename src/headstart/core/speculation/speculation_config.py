"""SpeculationConfig: the settings of speculation by prompt lookup, with vLLM's names."""

import json
from dataclasses import dataclass, fields
from typing import cast

from headstart.core.errors import ConfigError

METHOD = "ngram"
MAX_SPECULATIVE_TOKENS = 64
MAX_LOOKUP = 256


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Settings of speculation. The draft of a step is at most as long as stated; measurements decide how long it is."""

    num_speculative_tokens: int = 15  # maximum length of a draft
    prompt_lookup_max: int = 128  # tokens at the end of a sequence that are looked up, at most
    prompt_lookup_min: int = 2  # and at least


def parse_speculative_config(text: str | None) -> SpeculationConfig | None:
    """Return the config in --speculative-config; None without one. Raises ConfigError."""
    if not text:
        return None
    known = [field.name for field in fields(SpeculationConfig)]
    try:
        values: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{text[:100]!r} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise _invalid(f"{text[:100]!r} is not a JSON object")
    numbers: dict[str, int] = {}
    items = cast("dict[str, object]", values)  # keys of JSON objects are texts
    for name, value in items.items():
        if name == "method":
            continue
        if name not in known:
            raise _invalid(f"unknown key {name!r}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise _invalid(f"{name} is {value!r}; it must be a whole number")
        numbers[name] = value
    if items.get("method") != METHOD:
        raise _invalid(f"method is {items.get('method')!r}; the one that is supported is {METHOD!r}")
    return _checked(numbers)


def _checked(values: dict[str, int]) -> SpeculationConfig:
    """Return the config of valid values. One of the two lookup lengths alone stands for both if they would conflict."""
    default = SpeculationConfig()
    longest = values.get("prompt_lookup_max", max(default.prompt_lookup_max, values.get("prompt_lookup_min", 0)))
    config = SpeculationConfig(
        num_speculative_tokens=values.get("num_speculative_tokens", default.num_speculative_tokens),
        prompt_lookup_max=longest,
        prompt_lookup_min=values.get("prompt_lookup_min", min(default.prompt_lookup_min, longest)),
    )
    for name, most in (("num_speculative_tokens", MAX_SPECULATIVE_TOKENS), ("prompt_lookup_max", MAX_LOOKUP)):
        if not 1 <= getattr(config, name) <= most:
            raise _invalid(f"{name} is {getattr(config, name)}; it must be 1 to {most}")
    if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
        raise _invalid(
            f"prompt_lookup_min is {config.prompt_lookup_min}; it must be 1 to prompt_lookup_max, "
            f"which is {config.prompt_lookup_max}"
        )
    return config


def _invalid(problem: str) -> ConfigError:
    keys = ", ".join(field.name for field in fields(SpeculationConfig))
    return ConfigError(f'speculative_config: {problem}; write it like {{"method": "{METHOD}"}}, with any of {keys}')
