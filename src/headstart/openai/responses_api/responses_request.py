"""ResponsesRequest: the body of /v1/responses, and its translation to a chat request."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeGuard

from pydantic import Field

from headstart.openai.bounds import INT31_MAX, RequestBounds
from headstart.openai.chat.chat_translation import TranslatedChatRequest, shared_chat_params, template_variables
from headstart.openai.forms.fields import refuse_or_skip_fields
from headstart.openai.forms.treatments import ApiName
from headstart.openai.generation_fields import Model, SamplingFields
from headstart.openai.request_model import RequestModel, Text, custom_validator, validate_as
from headstart.openai.responses import Json
from headstart.openai.responses_api.call_forms import chat_tools, is_skipped_tool, namespaced_function_name, read_tools
from headstart.openai.responses_api.input_items import check_call_outputs, items_as_chat_messages, read_canonical_items
from headstart.openai.tools.tool_fields import MAX_TOOLS, ReasoningEffort, read_reasoning_effort
from headstart.openai.value_checks import (
    check_list,
    check_mapping,
    missing_parameter_error,
    raise_invalid_value,
    raise_unsupported,
    safe_repr,
)

MAX_METADATA = 16
MAX_METADATA_CHARS = 64, 512  # of a key, of a value
_LOGPROBS = "message.output_text.logprobs"
_RENAMES = (
    (re.compile(r"\b(max_completion_tokens|max_tokens)\b"), "max_output_tokens"),
    (re.compile(r"\btools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
)


Ignored = Annotated[
    None, custom_validator(lambda value, _: None, str)
]  # of a field that no answer depends on: any value


class ReasoningOptions(RequestModel):
    """Options of reasoning models."""

    max_entries = 16
    effort: Annotated[str | None, custom_validator(read_reasoning_effort, ReasoningEffort)] = Field(
        None, description="Passed to the chat template as reasoning_effort; none: enable_thinking is false"
    )
    summary: Ignored = Field(None, description="Ignored: reasoning is sent in full")


TextFormat = Annotated[Json | None, custom_validator(lambda value, _: _text_format(value), dict[str, Any])]


class TextOptions(RequestModel):
    """Options of the text of the answer."""

    max_entries = 16
    format: TextFormat = Field(None, description="As response_format of a chat")
    verbosity: Ignored = Field(None, description="Accepted, without effect")


Items = Annotated[list[Json], custom_validator(read_canonical_items, str | list[dict[str, Any]])]
Tools = Annotated[list[Json], custom_validator(read_tools, list[dict[str, Any]])]
ToolChoice = Annotated[Any, custom_validator(lambda value, _: _tool_choice(value), str | dict[str, Any])]
Metadata = Annotated[dict[str, str], custom_validator(lambda value, _: _metadata(value), dict[str, str])]
Include = Annotated[tuple[str, ...], custom_validator(lambda value, _: _include(value), list[str])]


class ResponsesRequest(SamplingFields):
    """A /v1/responses body."""

    model: Model = None
    input: Items = Field(description="A text, or items: messages, function calls and their outputs, reasoning")
    instructions: Text | None = Field(None, description="A system message before the conversation")
    previous_response_id: str | None = Field(None, max_length=128, description="Continue after this stored response")
    store: bool = Field(True, description="Keep the response for previous_response_id and GET")
    max_output_tokens: int | None = Field(None, ge=1, le=INT31_MAX)
    tools: Tools = Field([], description="Functions")
    tool_choice: ToolChoice = Field("auto", description="none, auto, required, a function, or allowed_tools")
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=lambda: TextOptions(format=None, verbosity=None))
    reasoning: ReasoningOptions = Field(default_factory=lambda: ReasoningOptions(effort=None, summary=None))
    metadata: Metadata = Field({}, description="Up to 16 texts, returned with the response")
    truncation: Ignored = Field(None, description="Ignored: a longer conversation is refused")
    include: Include = Field((), description="Accepted; nothing is added to the response")
    service_tier: Ignored = Field(None, description="Ignored")
    top_logprobs: int = Field(0, ge=0, le=0)


def parse_responses(values: Mapping[str, Any], bounds: RequestBounds) -> ResponsesRequest:
    """Return a validated /v1/responses body. Raises InvalidRequestError."""
    if values.get("input") is None:
        raise missing_parameter_error("input")
    refuse_or_skip_fields(ApiName.RESPONSES, values, bounds)
    return validate_as(ResponsesRequest, values, bounds)


def responses_to_chat_request(
    request: ResponsesRequest, values: Mapping[str, Any], history: Sequence[Json] = ()
) -> TranslatedChatRequest:
    """Return the chat request of a body: instructions, history and input. Raises InvalidRequestError."""
    check_call_outputs(history, request.input)
    named = [("previous_response_id", item) for item in history]
    named += [(f"input[{index}]", item) for index, item in enumerate(request.input)]
    messages, names = items_as_chat_messages(named)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
        names.insert(0, "instructions")
    chosen = request.reasoning.effort
    chat: Json = {
        **shared_chat_params(values, ResponsesRequest.model_fields),
        **template_variables(
            values, enable_thinking=None if chosen is None else chosen != "none", reasoning_effort=chosen
        ),
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
    }
    tools = chat_tools(request.tools)
    if tools:
        chat |= {
            "tools": [{"type": "function", "function": tool.function} for tool in tools],
            "tool_choice": _chat_choice(request.tool_choice),
            "parallel_tool_calls": request.parallel_tool_calls,
        }
    elif request.tools and request.tool_choice not in ("auto", "none"):
        raise_invalid_value("tool_choice", "requires a call", "none of the tools can be called here")
    if request.text.format is not None:
        chat["response_format"] = _chat_format(request.text.format)
    return TranslatedChatRequest(chat, "input", names, _RENAMES, tool_names=[tool.field for tool in tools])


def _chat_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice["type"] != "allowed_tools":
        return _chat_function(choice)
    tools = [_chat_function(tool) for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def _chat_function(named: Json) -> Json:
    return {
        "type": "function",
        "function": {"name": namespaced_function_name(named.get("name", named["type"]), named.get("namespace"))},
    }


def _chat_format(sent: Json) -> Json:
    if sent["type"] != "json_schema":
        return {"type": sent["type"]}
    return {"type": "json_schema", "json_schema": {name: value for name, value in sent.items() if name != "type"}}


def _text_format(value: object) -> Json:
    name = "text.format"
    sent = dict(check_mapping(name, value, 16))
    kind = sent.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise_invalid_value(f"{name}.type", f"is {safe_repr(kind)}", "it must be one of text, json_object, json_schema")
    if kind == "json_schema" and not isinstance(sent.get("schema"), Mapping):
        raise_invalid_value(f"{name}.schema", f"is {safe_repr(sent.get('schema'))}", "it must be a JSON schema")
    return sent


def _tool_choice(value: object) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if _is_named(value):
        return _named(value)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _allowed_tools(value)
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        raise_unsupported("tool_choice", f"a choice of type {safe_repr(value['type'])} is not built; name a function")
    raise_invalid_value("tool_choice", f"is {safe_repr(value)}", 'it must be "none", "auto", "required" or a function')


def _is_named(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a choice is about a tool that clients execute."""
    if not isinstance(value, Mapping) or value.get("type") not in ("function", "custom"):
        return isinstance(value, Mapping) and value.get("type") in ("local_shell", "shell", "apply_patch")
    return isinstance(value.get("name"), str)


def _named(value: Mapping[str, Any]) -> Json:
    return {key: value[key] for key in ("type", "name", "namespace") if isinstance(value.get(key), str)}


def _allowed_tools(value: Mapping[str, Any]) -> Json:
    """Return a choice among some of the tools."""
    mode = value.get("mode")
    if mode not in ("auto", "required"):
        raise_invalid_value("tool_choice.mode", f"is {safe_repr(mode)}", "it must be auto or required")
    tools = check_list("tool_choice.tools", value.get("tools"), MAX_TOOLS, "tools")
    named: list[Json] = []
    for index, tool in enumerate(tools):
        if _is_named(tool):
            named.append(_named(tool))
        elif not is_skipped_tool(tool):
            raise_invalid_value(
                f"tool_choice.tools[{index}]", f"is {safe_repr(tool)}", "it must be one of the tools, by type and name"
            )
    return {"type": "allowed_tools", "mode": mode, "tools": named}


def _metadata(value: object) -> dict[str, str]:
    sent = check_mapping("metadata", value, MAX_METADATA)
    for pair in sent.items():
        for text, max_chars in zip(pair, MAX_METADATA_CHARS, strict=True):
            if not isinstance(text, str) or len(text) > max_chars:
                remedy = f"keys and values must be strings of at most {' and '.join(map(str, MAX_METADATA_CHARS))}"
                raise_invalid_value("metadata", f"contains {safe_repr(text)}", f"{remedy} characters")
    return dict(sent)


def _include(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [value]
    if _LOGPROBS in names:
        raise_unsupported("include", f"{_LOGPROBS} is not built; use /v1/chat/completions with logprobs")
    return ()
