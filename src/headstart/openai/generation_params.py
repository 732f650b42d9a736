"""Validation of generation parameters: plain values (a JSON object, keyword arguments) become GenerationParams.

HTTP and `headstart.LLM` both use it, so each limit exists once. Known but unsupported parameters are refused by name.
Unknown ones are ignored, since clients send fields that are newer than the server, and listed in `ignored`. For any
input, the only exception raised is InvalidRequestError.
"""

from dataclasses import dataclass, replace
from enum import Enum

from headstart.core.errors import RequestTooLargeError
from headstart.core.request import DEFAULT_RETENTION, CacheMode, Retention, SamplingParams
from headstart.openai.bounds import INTEGERS, LOGIT_BIAS, NUMBERS, Bounds
from headstart.openai.cache_params import cache_wishes
from headstart.openai.chat.chat_template import template_options
from headstart.openai.fields import (
    Fields,
    bad_value,
    check_int,
    check_number,
    check_text,
    shown,
    unsupported,
)
from headstart.openai.unsupported import refuse_unsupported

GREEDY_BELOW = 1e-5  # a smaller temperature would only overflow, with the same token as the result
DEFAULT_COMPLETION_TOKENS = 16


class Kind(Enum):
    """The API that the values come from; names and defaults differ."""

    COMPLETION = "completion"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """The validated parameters of one client request. `sampling` is complete except for max_tokens: see `fit`."""

    sampling: SamplingParams
    max_tokens: int | None = None  # None: the model's default, else as many as fit; 0: only echo the prompt
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: yes for a completion, no for a chat
    template_options: tuple[tuple[str, str | int | bool], ...] = ()
    priority: int = 0
    cache: CacheMode = CacheMode.READ_WRITE
    retention: Retention = DEFAULT_RETENTION
    cache_salt: str | None = None
    user: str | None = None
    ignored: tuple[str, ...] = ()  # unknown names in the request, sorted

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs is not None


def parse_params(fields: Fields, bounds: Bounds, kind: Kind) -> GenerationParams:
    """Return the validated parameters of one request body. The caller reads prompt, messages and model before.

    Raises InvalidRequestError, with `param` set, for the first invalid value.
    """
    refuse_unsupported(fields)
    max_tokens = _max_tokens(fields, bounds, kind)
    n = _n(fields, bounds)
    stream = fields.boolean("stream")
    include_usage, continuous = _stream_options(fields, stream)
    continue_final = fields.boolean("continue_final_message")
    add_generation_prompt = fields.boolean("add_generation_prompt", default=not continue_final)
    if continue_final and add_generation_prompt:
        bad_value("continue_final_message", "is true beside add_generation_prompt", "only one of them can be true")
    echo = _echo(fields, kind)
    if max_tokens == 0 and not echo:
        bad_value("max_tokens", "is 0", "it must be at least 1, except with echo")
    labels = [fields.string(name, bounds.max_label_chars) for name in ("user", "safety_identifier")]
    wishes = cache_wishes(fields, bounds.max_label_chars)
    special = fields.take("add_special_tokens") is not None
    return GenerationParams(
        sampling=_sampling(fields, bounds, kind, max_tokens, echo=echo),
        max_tokens=max_tokens,
        n=n,
        stop=_stop(fields, bounds),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        ignore_eos=fields.boolean("ignore_eos"),
        echo=echo,
        stream=stream,
        include_usage=include_usage,
        continuous_usage_stats=continuous,
        return_token_ids=fields.boolean("return_token_ids"),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        add_special_tokens=fields.boolean("add_special_tokens") if special else None,
        template_options=template_options(fields, bounds.max_label_chars),
        priority=_priority(fields, bounds),
        cache=wishes.mode,
        retention=wishes.retention,
        cache_salt=wishes.salt,
        user=labels[0],
        ignored=fields.unread(),  # last: after all other fields are read
    )


def fit(params: GenerationParams, num_prompt_tokens: int, bounds: Bounds) -> SamplingParams:
    """Return the sampling parameters for a prompt of that length, with max_tokens set.

    Raises RequestTooLargeError (context_length_exceeded) if prompt + output exceed the model's context.
    """
    limit = bounds.max_model_len
    room = limit - num_prompt_tokens
    wanted = params.max_tokens
    if room < 1:
        raise RequestTooLargeError(
            f"the prompt has {num_prompt_tokens} tokens; prompt and output share the model's context of {limit} tokens "
            f"and at least 1 must be left for output: shorten the prompt by {1 - room} tokens",
            param="prompt",
        )
    if wanted is not None and wanted > room:
        raise RequestTooLargeError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}, together "
            f"{num_prompt_tokens + wanted}; the model's context is {limit} tokens: lower max_tokens to {room} or "
            f"shorten the prompt",
            param="max_tokens",
        )
    if wanted is None:
        default = bounds.defaults.max_tokens
        max_tokens = room if default is None else min(max(default, params.sampling.min_tokens), room)
    else:
        max_tokens = max(wanted, 1)  # the engine always samples at least one token; it is dropped for 0
    if params.sampling.min_tokens > max_tokens:
        bad_value("min_tokens", f"is {params.sampling.min_tokens}", f"only {max_tokens} output tokens fit here")
    sampling = params.sampling
    return sampling if sampling.max_tokens == max_tokens else replace(sampling, max_tokens=max_tokens)


def check_token_ids(name: str, values: object, bounds: Bounds, *, max_items: int) -> tuple[int, ...]:
    """Return `values` as a tuple of at most `max_items` token ids of the vocabulary. Raises InvalidRequestError."""
    if not isinstance(values, list | tuple):
        bad_value(name, f"is {shown(values)}", "it must be a list of token ids")
    if len(values) > max_items:
        bad_value(name, f"has {len(values)} entries", f"it may have at most {max_items}")
    for value in values:
        check_int(name, value, 0, bounds.vocab_size - 1)
    return tuple(values)


# ---------------------------------------------------------------------------------------------------------- one by one


def _sampling(fields: Fields, bounds: Bounds, kind: Kind, max_tokens: int | None, *, echo: bool) -> SamplingParams:
    temperature = _number(fields, "temperature", bounds.defaults.temperature)
    min_tokens = fields.integer("min_tokens", 0, bounds.max_model_len) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        bad_value("min_tokens", f"is {min_tokens}", f"it may be at most max_tokens, which is {max_tokens}")
    stop_ids = fields.items("stop_token_ids", bounds.max_stop_token_ids)
    stop_ids = check_token_ids("stop_token_ids", stop_ids, bounds, max_items=bounds.max_stop_token_ids)
    eos_ids = () if fields.boolean("ignore_eos") else bounds.eos_token_ids
    logprobs = _logprobs(fields, bounds, kind)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, bounds.max_logprobs)
    if prompt_logprobs is not None and fields.values.get("stream"):
        unsupported("prompt_logprobs", "a stream has no place for them; send stream: false")
    return SamplingParams(
        max_tokens=max(max_tokens or 1, 1),
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=_top_k(fields, bounds),
        top_p=_number(fields, "top_p", bounds.defaults.top_p),
        min_p=_number(fields, "min_p", bounds.defaults.min_p),
        seed=fields.integer("seed", *INTEGERS["seed"]),
        presence_penalty=_number(fields, "presence_penalty"),
        frequency_penalty=_number(fields, "frequency_penalty"),
        repetition_penalty=_number(fields, "repetition_penalty", bounds.defaults.repetition_penalty),
        logit_bias=_logit_bias(fields, bounds),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo and prompt_logprobs is None else prompt_logprobs,
        stop_token_ids=tuple(dict.fromkeys((*stop_ids, *eos_ids))),
    )


def _number(fields: Fields, name: str, of_model: float | None = None) -> float:
    """Return the number `name`, checked against NUMBERS; if absent, the model's default or that of the table."""
    low, high, default, above_low = NUMBERS[name]
    return fields.number(name, low, high, default if of_model is None else of_model, above_low=above_low)


def _top_k(fields: Fields, bounds: Bounds) -> int:
    wanted = fields.integer("top_k", *INTEGERS["top_k"])
    top_k = (bounds.defaults.top_k or 0) if wanted is None else wanted
    return 0 if top_k < 1 or top_k >= bounds.vocab_size else top_k


def _max_tokens(fields: Fields, bounds: Bounds, kind: Kind) -> int | None:
    newer = fields.integer("max_completion_tokens", *INTEGERS["max_completion_tokens"])
    older = fields.integer("max_tokens", *INTEGERS["max_tokens"])
    if newer is not None and older is not None and newer != older:
        bad_value("max_tokens", f"is {older} and max_completion_tokens {newer}", "send only one of them")
    wanted = older if newer is None else newer
    if wanted is not None and wanted > bounds.max_model_len:
        name = "max_tokens" if newer is None else "max_completion_tokens"
        raise RequestTooLargeError(
            f"{name} is {wanted}; the model's context is {bounds.max_model_len} tokens, prompt included: lower it",
            param=name,
        )
    if wanted is None and kind is Kind.COMPLETION and bounds.defaults.max_tokens is None:
        return DEFAULT_COMPLETION_TOKENS
    return wanted


def _n(fields: Fields, bounds: Bounds) -> int:
    n = fields.integer("n", 1, bounds.max_n) or 1
    best_of = fields.integer("best_of", 1, bounds.max_n)
    if best_of is not None and best_of < n:
        bad_value("best_of", f"is {best_of}", f"it must be at least n, which is {n}")
    if best_of is not None and best_of > n:
        unsupported("best_of", f"it is {best_of} and n is {n}; only best_of equal to n is built, so leave it out")
    return n


def _stop(fields: Fields, bounds: Bounds) -> tuple[str, ...]:
    value = fields.take("stop")
    if isinstance(value, str):
        value = [value]
    stops = Fields({"stop": value}).items("stop", bounds.max_stops)
    for text in stops:
        if not isinstance(text, str):
            bad_value("stop", f"contains {shown(text)}", "it must be a string or a list of strings")
        if not 0 < len(text) <= bounds.max_stop_chars:
            bad_value("stop", f"has an entry of {len(text)} characters", f"use 1 to {bounds.max_stop_chars} characters")
        check_text("stop", text)
    return tuple(dict.fromkeys(stops))


def _logprobs(fields: Fields, bounds: Bounds, kind: Kind) -> int | None:
    if kind is Kind.COMPLETION:
        return fields.integer("logprobs", 0, bounds.max_logprobs)
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, bounds.max_logprobs)
    if top and not wanted:
        bad_value("top_logprobs", f"is {top} but logprobs is not true", "send logprobs: true beside it")
    return (top or 0) if wanted else None


def _logit_bias(fields: Fields, bounds: Bounds) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, value in (fields.mapping("logit_bias", bounds.max_logit_bias) or {}).items():
        token_id: object = key
        if isinstance(key, str):
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                bad_value("logit_bias", f"has the key {shown(key)}", "keys must be token ids")
            token_id = int(key)
        token_id = check_int("logit_bias", token_id, 0, bounds.vocab_size - 1)
        biases[token_id] = check_number("logit_bias", value, LOGIT_BIAS.low, LOGIT_BIAS.high)
    return tuple(sorted(biases.items()))


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.mapping("stream_options", 16)
    if options is None:
        return False, False
    if not stream:
        bad_value("stream_options", "is set but stream is not true", "send stream: true or leave it out")
    inner = Fields(options)
    continuous = inner.boolean("continuous_usage_stats")
    return inner.boolean("include_usage"), continuous


def _echo(fields: Fields, kind: Kind) -> bool:
    echo = fields.boolean("echo")
    if echo and kind is Kind.CHAT:
        unsupported("echo", "a chat answers with the new message only; use /v1/completions")
    return echo


def _priority(fields: Fields, bounds: Bounds) -> int:
    """Return the priority. Raises InvalidRequestError without priority scheduling.

    The message contains vLLM's text, since clients match it and retry without a priority.
    """
    priority = fields.integer("priority", *INTEGERS["priority"]) or 0
    if priority and bounds.scheduling_policy != "priority":
        unsupported(
            "priority",
            f"it is {priority}, but Priority scheduling is not enabled: the server's policy is "
            f"{bounds.scheduling_policy}; leave it out, or start the server with --scheduling-policy priority",
        )
    return priority
