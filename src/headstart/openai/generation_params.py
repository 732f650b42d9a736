"""Validation of generation parameters: plain values (a JSON object, keyword arguments) become GenerationParams.

HTTP and `headstart.LLM` both use it, so each limit exists once. Known but unsupported parameters are refused by name.
Unknown ones are ignored, since clients send fields that are newer than the server, and listed in `ignored`. For any
input, the only exception raised is InvalidRequestError.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from headstart.core.errors import RequestTooLargeError, context_overflow_message, prompt_too_long_error
from headstart.core.request import DEFAULT_RETENTION, CacheMode, RetentionHint, SamplingParams
from headstart.openai.bounds import RequestBounds
from headstart.openai.cache_params import read_cache_params
from headstart.openai.canonical.prompt_rules import AppliedRules
from headstart.openai.forms.fields import UNSUPPORTED, refuse_or_skip_fields, refuse_unsupported_params
from headstart.openai.forms.treatments import ApiName
from headstart.openai.generation_fields import ChatGenerationFields, CompletionFields, GenerationFields
from headstart.openai.request_model import validate_as
from headstart.openai.structured.dropped_keywords import Dropped
from headstart.openai.structured.structured_fields import grammar_of_fields
from headstart.openai.tools.chat_format import ChatOutputFormat
from headstart.openai.tools.tool_fields import ToolParams, make_tool_params
from headstart.openai.value_checks import raise_invalid_value, raise_unsupported

GREEDY_BELOW = 1e-5  # a smaller temperature would only overflow, with the same token as the result
DEFAULT_COMPLETION_TOKENS = 16
_COPIED = (  # fields of a body that are parameters as they are
    *("n", "stop", "include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "echo", "stream"),
    *("return_token_ids", "add_generation_prompt", "continue_final_message", "add_special_tokens", "priority", "user"),
)


class ParamsKind(Enum):
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
    retention: RetentionHint = DEFAULT_RETENTION
    cache_salt: str | None = None
    prewarm: bool = False  # compute and cache the prompt, generate nothing; then max_tokens is 0
    comparison_id: str | None = None  # of an earlier answer, whose prompt is compared
    user: str | None = None
    grammar_field: str | None = None  # the field that requests `sampling.grammar`
    tools: ToolParams | None = None  # of a chat
    reasoning_effort: str | None = None
    chat: ChatOutputFormat | None = None  # set once the prompt is rendered; None: all output is content
    dropped: Dropped = ()  # keywords of schemas that the answer may not keep to
    applied_rules: AppliedRules = ()  # that changed the chat, or were reported about it
    ignored: tuple[str, ...] = ()  # unknown names in the request, sorted

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs is not None


def parse_params(values: Mapping[str, Any], bounds: RequestBounds, kind: ParamsKind) -> GenerationParams:
    """Return the validated parameters among `values`, which hold no prompt, messages or model.

    Raises InvalidRequestError, with `param` set, for one invalid value.
    """
    fields = validate_as(CompletionFields if kind is ParamsKind.COMPLETION else ChatGenerationFields, values, bounds)
    return params_from_fields(fields, values, bounds)


def params_from_fields(fields: GenerationFields, values: Mapping[str, Any], bounds: RequestBounds) -> GenerationParams:
    """Return the parameters from the fields of a body, which were read from `values`. Raises InvalidRequestError."""
    known = type(fields).model_fields
    refuse_unsupported_params(values, known)
    refuse_or_skip_fields(ApiName.CHAT, values, bounds)
    max_tokens = _max_tokens(fields, bounds)
    if fields.continue_final_message and fields.add_generation_prompt:
        raise_invalid_value(
            "continue_final_message", "is true beside add_generation_prompt", "only one of them can be true"
        )
    if fields.echo and isinstance(fields, ChatGenerationFields):
        raise_unsupported("echo", "a chat answers with the new message only; use /v1/completions")
    wishes = read_cache_params(fields, values.get("messages"))
    if wishes.prewarm and fields.echo:
        raise_invalid_value(
            "echo", "is true beside prompt_cache_options.prewarm", "a request that only prewarms has no output"
        )
    if max_tokens == 0 and not fields.echo and not wishes.prewarm:
        raise_invalid_value("max_tokens", "is 0", "it must be at least 1, except with echo")
    _check_choices(fields)
    _check_priority(fields.priority, bounds)
    grammar = grammar_of_fields(fields, closes_objects=bounds.closes_objects)
    if grammar is not None and fields.echo:
        raise_unsupported("echo", f"{grammar.name} constrains the output only; leave one of them out")
    is_chat = isinstance(fields, ChatGenerationFields)
    sampling = _sampling(fields, bounds, max_tokens, None if grammar is None else grammar.text)
    if wishes.prewarm:
        sampling = replace(sampling, max_tokens=0, min_tokens=0, logprobs=None, grammar=None)
    return GenerationParams(
        sampling=sampling,
        **{name: getattr(fields, name) for name in _COPIED},
        max_tokens=0 if wishes.prewarm else max_tokens,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        continuous_usage_stats=fields.stream_options is not None and fields.stream_options.continuous_usage_stats,
        template_options=fields.chat_template_kwargs,
        cache=wishes.mode,
        retention=wishes.retention,
        cache_salt=wishes.salt,
        prewarm=wishes.prewarm,
        comparison_id=wishes.comparison_id,
        grammar_field=None if grammar is None or wishes.prewarm else grammar.name,
        dropped=() if grammar is None or wishes.prewarm else grammar.dropped,
        tools=make_tool_params(fields.tools, fields.tool_choice, fields.parallel_tool_calls) if is_chat else None,
        reasoning_effort=fields.reasoning_effort if is_chat else None,
        ignored=tuple(sorted(name for name in values if name not in known and name not in UNSUPPORTED)),
    )


def lower_max_tokens(params: GenerationParams, num_prompt_tokens: int, bounds: RequestBounds) -> GenerationParams:
    """Return the parameters with max_tokens lowered to what fits behind a prompt of that length, if anything does."""
    room = bounds.max_model_len - num_prompt_tokens
    if params.max_tokens is None or room < 1 or params.max_tokens <= room:
        return params
    return replace(params, max_tokens=room)


def sampling_params_for_prompt(
    params: GenerationParams, num_prompt_tokens: int, bounds: RequestBounds
) -> SamplingParams:
    """Return the sampling parameters for a prompt of that length, with max_tokens set.

    Raises RequestTooLargeError (context_length_exceeded) if prompt + output exceed the model's context.
    """
    limit = bounds.max_model_len
    room = limit - num_prompt_tokens
    wanted = params.max_tokens
    if room < 1:
        raise prompt_too_long_error(num_prompt_tokens, limit, f"shorten the prompt by {1 - room} tokens")
    if wanted is not None and wanted > room:
        if not bounds.clamp_max_tokens:
            excess = f"max_tokens is {wanted} and the prompt has {num_prompt_tokens} tokens"
            raise RequestTooLargeError(
                f"{context_overflow_message(excess, limit)}: lower max_tokens to {room} or shorten the prompt",
                param="max_tokens",
            )
        wanted = room
    if wanted is None:
        default = bounds.defaults.max_tokens
        max_tokens = room if default is None else min(max(default, params.sampling.min_tokens), room)
    elif params.prewarm:
        max_tokens = 0
    else:
        max_tokens = max(wanted, 1)  # the engine always samples at least one token; it is dropped for 0
    if params.sampling.min_tokens > max_tokens:
        raise_invalid_value(
            "min_tokens", f"is {params.sampling.min_tokens}", f"only {max_tokens} output tokens fit here"
        )
    sampling = params.sampling
    return sampling if sampling.max_tokens == max_tokens else replace(sampling, max_tokens=max_tokens)


# ---------------------------------------------------------------------------------------------------------- one by one


def _sampling(
    fields: GenerationFields, bounds: RequestBounds, max_tokens: int | None, grammar: str | None
) -> SamplingParams:
    if max_tokens is not None and fields.min_tokens > max_tokens:
        raise_invalid_value(
            "min_tokens", f"is {fields.min_tokens}", f"it may be at most max_tokens, which is {max_tokens}"
        )
    logprobs = _logprobs(fields)
    prompt_logprobs = fields.prompt_logprobs
    if prompt_logprobs is not None and fields.stream:
        raise_unsupported("prompt_logprobs", "a stream has no place for them; send stream: false")
    eos_ids = () if fields.ignore_eos and grammar is None else bounds.eos_token_ids  # the end of a grammar is an end
    return SamplingParams(
        **_chosen(fields, bounds),
        max_tokens=max(max_tokens or 1, 1),
        min_tokens=fields.min_tokens,
        seed=fields.seed,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=fields.logit_bias,
        logprobs=logprobs,
        prompt_logprobs=logprobs if fields.echo and prompt_logprobs is None else prompt_logprobs,
        stop_token_ids=tuple(dict.fromkeys((*fields.stop_token_ids, *eos_ids))),
        grammar=grammar,
    )


def _chosen(fields: GenerationFields, bounds: RequestBounds) -> dict[str, Any]:
    """Return the parameters with defaults of the model: values of the request, else the model's if it has any."""
    chosen: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = getattr(fields, name)
        value = getattr(bounds.defaults, name) if value is None else value
        if value is not None:
            chosen[name] = value
    if chosen.get("temperature", 1.0) < GREEDY_BELOW:
        chosen["temperature"] = 0.0
    if not 1 <= chosen.get("top_k", 0) < bounds.vocab_size:
        chosen["top_k"] = 0
    return chosen


def _max_tokens(fields: GenerationFields, bounds: RequestBounds) -> int | None:
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is not None and older is not None and newer != older:
        raise_invalid_value("max_tokens", f"is {older} and max_completion_tokens {newer}", "send only one of them")
    wanted = older if newer is None else newer
    if wanted is not None and wanted > bounds.max_model_len:
        if bounds.clamp_max_tokens:
            return bounds.max_model_len
        name = "max_tokens" if newer is None else "max_completion_tokens"
        raise RequestTooLargeError(
            f"{context_overflow_message(f'{name} is {wanted}', bounds.max_model_len)}: lower it", param=name
        )
    if wanted is None and isinstance(fields, CompletionFields) and bounds.defaults.max_tokens is None:
        return DEFAULT_COMPLETION_TOKENS
    return wanted


def _check_choices(fields: GenerationFields) -> None:
    n, best_of = fields.n, fields.best_of
    if best_of is not None and best_of < n:
        raise_invalid_value("best_of", f"is {best_of}", f"it must be at least n, which is {n}")
    if best_of is not None and best_of > n:
        raise_unsupported("best_of", f"it is {best_of} and n is {n}; only best_of equal to n is built, so leave it out")


def _logprobs(fields: GenerationFields) -> int | None:
    if isinstance(fields, CompletionFields):
        return fields.logprobs
    assert isinstance(fields, ChatGenerationFields)
    if fields.top_logprobs and not fields.logprobs:
        raise_invalid_value(
            "top_logprobs", f"is {fields.top_logprobs} but logprobs is not true", "send logprobs: true beside it"
        )
    return (fields.top_logprobs or 0) if fields.logprobs else None


def _check_priority(priority: int, bounds: RequestBounds) -> None:
    """Raise InvalidRequestError for a priority without priority scheduling.

    The message contains vLLM's text, since clients match it and retry without a priority.
    """
    if priority and bounds.scheduling_policy != "priority":
        raise_unsupported(
            "priority",
            f"it is {priority}, but Priority scheduling is not enabled: the server's policy is "
            f"{bounds.scheduling_policy}; leave it out, or start the server with --scheduling-policy priority",
        )
