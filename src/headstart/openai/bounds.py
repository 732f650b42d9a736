"""Bounds of requests: the single table of limits for request validation.

`Bounds` holds limits that depend on the model and the server's options. NUMBERS and INTEGERS hold the ranges of single
parameters, the same everywhere. No other module of the package may define a limit of a request: generation_params.py,
request_bodies.py and the OpenAPI document read them from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headstart.config.options import ServerOptions
from headstart.core.engine import EngineInfo
from headstart.core.request import NO_DEFAULTS, SamplingDefaults

INT31_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = 2.0**128 - 2.0**104  # logits are computed in float32


class NumberRange(NamedTuple):
    """The finite numbers from `low` to `high`, inclusive; with `above_low`, `low` itself is excluded."""

    low: float
    high: float
    default: float
    above_low: bool = False


class IntegerRange(NamedTuple):
    """The integers from `low` to `high`, inclusive."""

    low: int
    high: int


# As in vLLM's documentation; the sampler returns a token for every combination (tests/model/test_sampler_extremes.py).
NUMBERS: Mapping[str, NumberRange] = {
    "temperature": NumberRange(0.0, 2.0, 1.0),
    "top_p": NumberRange(0.0, 1.0, 1.0, above_low=True),
    "min_p": NumberRange(0.0, 1.0, 0.0),
    "presence_penalty": NumberRange(-2.0, 2.0, 0.0),
    "frequency_penalty": NumberRange(-2.0, 2.0, 0.0),
    "repetition_penalty": NumberRange(0.0, FLOAT32_MAX, 1.0, above_low=True),
}
INTEGERS: Mapping[str, IntegerRange] = {
    "seed": IntegerRange(-INT64_MAX - 1, INT64_MAX),
    "top_k": IntegerRange(-1, INT31_MAX),
    "max_tokens": IntegerRange(0, INT31_MAX),
    "max_completion_tokens": IntegerRange(1, INT31_MAX),
    "priority": IntegerRange(-INT31_MAX, INT31_MAX),
}
LOGIT_BIAS = NumberRange(-100.0, 100.0, 0.0)
MAX_SALT_CHARS = 128  # as vLLM
FULL_CHOICES = 16  # choices of a prompt that fills the context
MAX_JSON_VALUES = 128 * 1024  # strings, lists and objects of a body: each is a Python object of 50 to 100 bytes


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one server; the error message of each limit contains its value."""

    vocab_size: int  # rows of the logits
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...] = ()
    max_n: int = 128
    max_prompts: int = 64
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_label_chars: int = 256
    max_messages: int = 2048
    max_sequence_tokens: int = 4 << 20  # prompt tokens of a request, once per choice: each is a sequence in the engine
    max_answer_entries: int = 16 << 20  # see request_limits.py; 200 MB in memory, 500 MB of JSON
    scheduling_policy: str = "lpm"
    defaults: SamplingDefaults = NO_DEFAULTS  # of the model, for parameters that a request omits

    @property
    def max_numbers(self) -> int:
        """The numbers that any valid body may have: token ids of full prompts, and a value for each other item."""
        return max(self.max_prompts, FULL_CHOICES) * self.max_model_len + MAX_JSON_VALUES

    @classmethod
    def of(cls, info: EngineInfo, options: ServerOptions) -> "Bounds":
        """Return the limits of one server with its engine.

        For any context length, FULL_CHOICES choices of a full prompt are accepted, and one choice with all logprobs.
        """
        return cls(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            max_n=options.max_n,
            max_prompts=options.max_prompts,
            max_logprobs=options.max_logprobs,
            scheduling_policy=info.scheduling_policy,
            defaults=info.sampling_defaults,
            max_sequence_tokens=max(4 << 20, info.max_model_len * FULL_CHOICES),
            max_answer_entries=max(16 << 20, info.max_model_len * (1 + options.max_logprobs)),
        )
