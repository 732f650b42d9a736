"""Requests: `SamplingParams` and `Request`, which are frozen."""

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class CacheMode(Enum):
    """Use of the prefix cache by one request."""

    READ_WRITE = "read-write"
    READ_ONLY = "read-only"  # reuses cached blocks, publishes none: one-off prompts
    BYPASS = "bypass"  # neither


class FinishReason(Enum):
    """The cause of a sequence's end."""

    STOP = "stop"  # an end-of-sequence or stop token, or (decided by the front end) a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the client disconnected
    ERROR = "error"  # this row failed alone; `RequestStepOutput.error` has the message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request; every value is already validated and in range (openai/generation_fields.py).

    `max_tokens` 0: the prompt is computed and nothing is sampled. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1
    switch those filters off. `logprobs` is the number of alternatives to report beside the sampled token (0: the
    sampled token only; None: nothing), `prompt_logprobs` the same for every prompt token but the first.
    `stop_token_ids` includes the model's end-of-sequence ids unless `ignore_eos`; the front end handles stop strings,
    since the engine processes tokens only.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None  # the output matches this grammar, in llguidance's text form; the executor compiles it
    ignore_eos: bool = False  # for callers of headstart.LLM; the engine knows stop tokens only


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults from a model's generation_config.json for parameters that a request omits; None: not set there.

    `max_tokens` is a default too, never a cap: less if less fits into the context.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


NO_DEFAULTS = SamplingDefaults()


class RetentionHint(NamedTuple):
    """A retention hint for the blocks of a request; best effort, no guarantee.

    Of idle blocks those of lower `priority` (0 to 100) are evicted first; a block has the highest of its users'. With a
    `ttl` (seconds after its last use; 0: none) the priority falls back to the default when that is over.
    """

    priority: int = 50
    ttl: float = 0.0


DEFAULT_RETENTION = RetentionHint()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; immutable. A client's n > 1 or list of prompts becomes several of these."""

    request_id: str  # generated here; a client's id is only a label
    prompt: "array[int]"  # packed int32, at least one token; never modified
    sampling: SamplingParams = GREEDY
    arrival: float = 0.0  # seconds, caller's clock
    domain: bytes = b""  # isolation domain, part of the hash of every block after the longest public pinned prefix
    adapter: str | None = None
    priority: int = 0  # smaller is more important, as in vLLM
    cache: CacheMode = CacheMode.READ_WRITE
    tenant: str = ""  # the tenant whose share its blocks count against; a tenant may have several domains
    retention: RetentionHint = DEFAULT_RETENTION
    is_traced: bool = False  # its outputs report the chunks of its prompt
    boundary: int = 0  # tokens of the prompt that others are expected to begin with; 0: not known
