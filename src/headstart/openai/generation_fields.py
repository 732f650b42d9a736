"""Generation parameters in a request body: names, types, ranges and defaults. Rules between them: generation_params.py.

The ranges are those of vLLM's documentation. The sampler returns a token for every combination of them
(tests/model/test_sampler_extremes.py).
"""

from typing import Annotated

from pydantic import Field

from headstart.openai.bounds import FLOAT32_MAX, INT31_MAX, INT64_MAX, RequestBounds
from headstart.openai.cache_params import MAX_LABEL_CHARS, CacheFields, Label
from headstart.openai.request_model import RequestModel, UpperLimit, custom_validator
from headstart.openai.structured.structured_fields import StructuredFields
from headstart.openai.tools.tool_fields import Choice, Effort, Tools
from headstart.openai.value_checks import (
    check_encodable_text,
    check_int,
    check_list,
    check_mapping,
    check_number,
    check_token_ids,
    raise_invalid_value,
    safe_repr,
)

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
TEMPLATE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")


def check_stop_strings(name: str, value: object) -> tuple[str, ...]:
    """Return stop strings without repeats. Raises InvalidRequestError."""
    stops = check_list(name, value, MAX_STOPS)
    for text in stops:
        if not isinstance(text, str):
            raise_invalid_value(name, f"contains {safe_repr(text)}", "it must be a string or a list of strings")
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise_invalid_value(
                name, f"has an entry of {len(text)} characters", f"use 1 to {MAX_STOP_CHARS} characters"
            )
        check_encodable_text(name, text)
    return tuple(dict.fromkeys(stops))


def _stop(value: object, _: RequestBounds) -> tuple[str, ...]:
    return check_stop_strings("stop", [value] if isinstance(value, str) else value)


def _logit_bias(value: object, bounds: RequestBounds) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in check_mapping("logit_bias", value, MAX_LOGIT_BIAS).items():
        token_id: object = key
        if isinstance(key, str):
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise_invalid_value("logit_bias", f"has the key {safe_repr(key)}", "keys must be token ids")
            token_id = int(key)
        token_id = check_int("logit_bias", token_id, 0, bounds.vocab_size - 1)
        biases[token_id] = check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(biases.items()))


def _template_options(value: object, _: RequestBounds) -> tuple[tuple[str, str | int | bool], ...]:
    """Return chat_template_kwargs, sorted: scalars such as Qwen3's enable_thinking."""
    name = "chat_template_kwargs"
    options = check_mapping(name, value, 16)
    for key, option in options.items():
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise_invalid_value(name, f"has the key {safe_repr(key)}", "keys must be plain names")
        if key in TEMPLATE_VARIABLES:
            raise_invalid_value(name, f"contains {key}", "that one cannot be set here")
        if isinstance(option, str) and len(option) <= MAX_LABEL_CHARS:
            check_encodable_text(name, option)
        elif not isinstance(option, bool) and not (isinstance(option, int) and abs(option) <= INT64_MAX):
            raise_invalid_value(
                name, f"has {safe_repr(option)} for {key}", "values must be true, false, integers or short strings"
            )
    return tuple(sorted(options.items()))


Temperature = Annotated[float | None, Field(ge=0.0, le=2.0, description="0: greedy. By default the model's, else 1")]
TopP = Annotated[float | None, Field(gt=0.0, le=1.0, description="By default the model's, else 1")]
TopK = Annotated[int | None, Field(ge=-1, le=INT31_MAX, description="-1, 0: off. By default the model's, else off")]
MinP = Annotated[float | None, Field(ge=0.0, le=1.0, description="By default the model's, else 0")]
RepetitionPenalty = Annotated[float | None, Field(gt=0.0, le=FLOAT32_MAX, description="By default the model's, else 1")]
Model = Annotated[str | None, Field(max_length=256, description="The name of the served model")]
Logprobs = Annotated[int | None, Field(ge=0), UpperLimit("max_logprobs")]
AddGenerationPrompt = Annotated[
    bool,
    Field(
        default_factory=lambda fields: not fields.get("continue_final_message"),
        description="Begin a new message; by default unless the last one is continued",
    ),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Stops = Annotated[tuple[str, ...], custom_validator(_stop, StopText | StopTexts)]
TokenId = Annotated[int, Field(ge=0, le=INT31_MAX)]
StopTokenIds = Annotated[
    tuple[int, ...],
    custom_validator(
        lambda value, bounds: check_token_ids("stop_token_ids", value, bounds, max_items=MAX_STOP_TOKEN_IDS),
        list[TokenId],
    ),
]
TokenIdKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    custom_validator(_logit_bias, dict[TokenIdKey, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]]),
    Field(json_schema_extra={"additionalProperties": False}),
]
TemplateOptions = Annotated[
    tuple[tuple[str, str | int | bool], ...], custom_validator(_template_options, dict[str, str | int | bool])
]


class StreamOptions(RequestModel):
    """Options of a stream."""

    max_entries = 16
    include_usage: bool = Field(False, description="Send the usage in a last chunk")
    continuous_usage_stats: bool = Field(False, description="Send the usage in every chunk")


class SamplingFields(CacheFields):
    """The generation parameters that all APIs share."""

    min_tokens: Annotated[int, UpperLimit("max_model_len")] = Field(0, ge=0, description="At most max_tokens")
    stream: bool = Field(False, description="Send the answer as server-sent events")
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: RepetitionPenalty = None
    seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX, description="Same seed, same output")
    logit_bias: LogitBias = Field((), description="Token ids, and the numbers that are added to their logits")
    stop: Stops = Field((), description="Texts before which the output ends")
    stop_token_ids: StopTokenIds = Field((), description="Tokens that end the output")
    include_stop_str_in_output: bool = False
    ignore_eos: bool = Field(False, description="End-of-sequence tokens do not end the output")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text")
    chat_template_kwargs: TemplateOptions = Field((), description="Variables such as enable_thinking")
    priority: int = Field(0, ge=-INT31_MAX, le=INT31_MAX, description="Smaller runs sooner; with priority scheduling")
    user: Label = None
    safety_identifier: Label = None


class GenerationFields(StructuredFields, SamplingFields):
    """The generation parameters of completions and chats alike."""

    max_tokens: int | None = Field(None, ge=0, le=INT31_MAX, description="Output tokens; 0: only echo the prompt")
    max_completion_tokens: int | None = Field(None, ge=1, le=INT31_MAX, description="The newer name of max_tokens")
    n: Annotated[int, UpperLimit("max_n")] = Field(1, ge=1, description="Choices per prompt")
    best_of: Annotated[int | None, UpperLimit("max_n")] = Field(None, ge=1, description="May only equal n")
    stream_options: StreamOptions | None = Field(None, description="Of a stream")
    prompt_logprobs: Logprobs = Field(None, description="Alternatives per prompt token; not with stream")
    echo: bool = Field(False, description="Begin with the prompt; completions only")
    return_token_ids: bool = False
    add_special_tokens: bool | None = Field(None, description="By default true for completions only")
    continue_final_message: bool = Field(False, description="Continue the last message")
    add_generation_prompt: AddGenerationPrompt


class CompletionFields(GenerationFields):
    """The generation parameters of a completion."""

    logprobs: Logprobs = Field(None, description="Alternatives per output token")


class ChatGenerationFields(GenerationFields):
    """The generation parameters of a chat."""

    logprobs: bool = Field(False, description="Report the log-probabilities of output tokens")
    top_logprobs: Logprobs = Field(None, description="Alternatives per output token; only with logprobs")
    tools: Tools = Field((), description="Functions that the model may call")
    tool_choice: Choice = Field(None, description="none, auto, required, or one function; by default auto with tools")
    parallel_tool_calls: bool = Field(True, description="Several calls in one message")
    reasoning_effort: Effort = Field(None, description="A variable for templates that use it")


class GenerationConfigFields(RequestModel):
    """The keys of a model's generation_config.json that are defaults of a request."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    max_new_tokens: int | None = Field(None, ge=1, le=INT31_MAX)
    do_sample: bool = True
