"""MessagesRequest: the bodies of /v1/messages and /v1/messages/count_tokens, translated to chat requests."""

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from headstart.anthropic.anthropic_objects import THREAD_NOT_FOUND
from headstart.anthropic.content_blocks import (
    MAX_BLOCKS,
    ConversationBuilder,
    add_messages,
    add_system_prompt,
    cache_control_ttl,
)
from headstart.common_prefix import common_prefix_length
from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import INT31_MAX, RequestBounds
from headstart.openai.cache_params import MAX_ID_CHARS
from headstart.openai.chat.chat_translation import TranslatedChatRequest, shared_chat_params, template_variables
from headstart.openai.engine_requests import encode_chat
from headstart.openai.forms.fields import refuse_or_skip_fields
from headstart.openai.forms.treatments import ApiName, NameKind, NameTreatment, find_treatment, strip_date_suffix
from headstart.openai.generation_fields import Model, SamplingFields, StopTexts, check_stop_strings
from headstart.openai.request_model import SentMessages, SentObjects, custom_validator, validate_as
from headstart.openai.responses import Json
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.tool_fields import MAX_TOOLS, read_reasoning_effort
from headstart.openai.value_checks import check_list, check_mapping, raise_invalid_value, safe_repr

_RENAMES = (
    (re.compile(r"\bmax_completion_tokens\b"), "max_tokens"),
    (re.compile(r"\btools\[(\d+)\]\.function\.parameters\b"), r"tools[\1].input_schema"),
    (re.compile(r"\btools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r", or send strict: false\Z"), ""),
)
StopSequences = Annotated[
    tuple[str, ...], custom_validator(lambda value, _: check_stop_strings("stop_sequences", value), StopTexts)
]
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
# Tools that a client executes although their schemas are the vendor's: models not trained on them need the schema.
_TEXT: Json = {"type": "string"}
_EDITS = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str"), _TEXT),
    "insert_line": {"type": "integer"},
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": {"type": "integer"}},
}


def _commands(*names: str) -> Json:
    return {"command": {"type": "string", "enum": list(names)}}


_SCHEMAS: Mapping[str, tuple[str, Json, tuple[str, ...]]] = {  # description, properties, the required ones
    "bash": (
        "Run a command in a bash session on the user's machine that lasts; restart begins a new one.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        (),
    ),
    "text_editor": (
        "View, create and edit files on the user's machine.",
        {**_commands("view", "create", "str_replace", "insert"), **_EDITS},
        ("command", "path"),
    ),
    "memory": (
        "Read and write files of notes that last between conversations, below /memories.",
        {
            **_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            **dict.fromkeys(("old_path", "new_path"), _TEXT),
        },
        ("command",),
    ),
}


@dataclass(frozen=True, slots=True)
class ChatTools:
    """Tools in the form of a chat, the field of each, and the longest lifetime of their breakpoints in seconds."""

    tools: list[Json]
    names: tuple[str, ...] = ()
    ttl: float = 0.0


class ChatToolChoice(NamedTuple):
    """A tool choice in the form of a chat."""

    choice: Any = "auto"
    parallel: bool = True


class OutputConfig(NamedTuple):
    """Form and effort of the output."""

    format: Json | None = None
    effort: str | None = None


class PromptFields(SamplingFields):
    """The fields of a prompt, which both bodies have."""

    model: Model = None
    system: Annotated[
        ConversationBuilder | None, custom_validator(lambda value, bounds: _system(value, bounds), str | SentObjects)
    ] = None
    messages: SentMessages
    tools: Annotated[ChatTools, custom_validator(lambda value, bounds: _tools(value, bounds), SentObjects)] = Field(
        ChatTools([]), description="Tools of the client"
    )
    tool_choice: Annotated[ChatToolChoice, custom_validator(lambda value, _: _tool_choice(value), dict[str, Any])] = (
        Field(ChatToolChoice(), description="auto, any, tool or none, with disable_parallel_tool_use perhaps")
    )
    thinking: Annotated[
        bool | None, custom_validator(lambda value, bounds: _thinking(value, bounds), dict[str, Any])
    ] = Field(None, description="Passed to the chat template as enable_thinking; budget_tokens is not enforced")
    output_config: Annotated[
        OutputConfig, custom_validator(lambda value, bounds: _output_config(value, bounds), dict[str, Any])
    ] = Field(OutputConfig(), description="format: a JSON schema; effort: passed to the chat template")
    output_format: Annotated[
        Json | None, custom_validator(lambda value, _: _format("output_format", value), dict[str, Any])
    ] = Field(None, description="The older name of output_config.format")
    cache_control: Annotated[float, custom_validator(lambda value, _: cache_control_ttl(value), dict[str, Any])] = (
        Field(0.0, description="A cache breakpoint behind the whole prompt")
    )


class MessagesRequest(PromptFields):
    """A /v1/messages body."""

    max_tokens: int = Field(ge=0, le=INT31_MAX, description="0: compute and cache the prompt, generate nothing")
    diagnostics: Annotated[str | None, custom_validator(lambda value, _: _diagnostics(value), dict[str, Any])] = Field(
        None, description="previous_message_id: report what ended the reuse of that message's prompt"
    )
    stop_sequences: StopSequences = Field((), description="Texts before which the output ends")
    metadata: Annotated[str | None, custom_validator(lambda value, _: _metadata(value), dict[str, Any])] = Field(
        None, description="user_id"
    )


class CountTokensRequest(PromptFields):
    """A /v1/messages/count_tokens body."""


@dataclass(frozen=True, slots=True)
class TranslatedMessages:
    """A body as a chat request, and where its cache breakpoints are."""

    chat: TranslatedChatRequest
    last_breakpoint: tuple[int, int] | None = None  # as in ConversationBuilder
    marks_all: bool = False  # there is one behind the whole prompt
    ttl: float = 0.0  # seconds; the longest of all breakpoints


def translate_messages_body(
    model: type[MessagesRequest] | type[CountTokensRequest], values: Mapping[str, Any], bounds: RequestBounds
) -> TranslatedMessages:
    """Return a validated body as a chat request. Raises InvalidRequestError."""
    refuse_or_skip_fields(ApiName.MESSAGES, values, bounds)
    thread = values.get("thread")
    if isinstance(thread, Mapping) and thread.get("type") == "continue":
        message = "thread: no earlier messages of it are here; send all messages"
        raise InvalidRequestError(message, param="thread", code=THREAD_NOT_FOUND)
    fields = validate_as(model, values, bounds)
    conversation = fields.system or ConversationBuilder()
    add_messages(fields.messages, conversation, bounds)
    ttl = max(conversation.ttl, fields.tools.ttl, fields.cache_control)
    chat = _chat_values(fields, values, conversation, ttl)
    if isinstance(fields, MessagesRequest):
        chat |= _generation_values(fields, values, ttl, bounds)
    last = conversation.last_breakpoint
    if last is None and fields.tools.ttl:  # templates place tools before or behind the system prompt
        last = (sum(message["role"] == "system" for message in conversation.messages[:1]), MAX_BLOCKS)
    translation = TranslatedChatRequest(chat, "messages", conversation.names, _RENAMES, tool_names=fields.tools.names)
    return TranslatedMessages(translation, last, marks_all=bool(fields.cache_control), ttl=ttl)


def num_tokens_to_cache_breakpoint(
    read: TranslatedMessages, prompt: "array[int]", tokenizer: Tokenizer, bounds: RequestBounds
) -> int:
    """Return the number of prompt tokens up to the last cache breakpoint; 0 without one. Slow: renders a second chat.

    The prompt is compared with that of the same conversation with other text behind the breakpoint, so the position is
    right with any template.
    """
    if read.marks_all:
        return len(prompt)
    if read.last_breakpoint is None:
        return 0
    changed = _changed_behind(read.chat.values["messages"], *read.last_breakpoint)
    if changed is None:
        return len(prompt)
    try:
        body = replace(read.chat, values={**read.chat.values, "messages": changed}).to_chat_body(bounds)
        return common_prefix_length(prompt, encode_chat(body, tokenizer, bounds))
    except InvalidRequestError:  # the template refuses the changed text
        return len(prompt)


def _changed_behind(messages: list[Json], num_messages: int, num_parts: int) -> list[Json] | None:
    """Return the messages with other text in the first part behind a breakpoint; None: there is no such part."""
    at, part = num_messages - 1, num_parts
    if at < 0 or not isinstance(messages[at]["content"], list) or part >= len(messages[at]["content"]):
        at, part = num_messages, 0
    if at >= len(messages):
        return None
    changed = dict(messages[at])
    content = changed["content"]
    if isinstance(content, str) or not content:
        changed["content"] = _other(content or "")
    else:
        changed["content"] = [
            *content[:part],
            {**content[part], "text": _other(content[part]["text"])},
            *content[part + 1 :],
        ]
    return [*messages[:at], changed, *messages[at + 1 :]]


def _other(text: str) -> str:
    return ("b" if text.startswith("a") else "a") + text


def _chat_values(
    fields: PromptFields, values: Mapping[str, Any], conversation: ConversationBuilder, ttl: float
) -> Json:
    config = fields.output_config
    chat: Json = {
        **shared_chat_params(values, MessagesRequest.model_fields),
        **template_variables(values, enable_thinking=fields.thinking, reasoning_effort=config.effort),
        "model": fields.model,
        "messages": conversation.messages,
    }
    if ttl and values.get("prompt_cache_options") is None:
        chat["prompt_cache_options"] = {"ttl": ttl}
    if fields.tools.tools:
        chat |= {
            "tools": fields.tools.tools,
            "tool_choice": fields.tool_choice.choice,
            "parallel_tool_calls": fields.tool_choice.parallel,
        }
    shape = config.format or fields.output_format
    if shape is not None:
        schema = {"name": "output", "schema": shape, "strict": True}  # as in Anthropic's API, which has no other
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _generation_values(fields: MessagesRequest, values: Mapping[str, Any], ttl: float, bounds: RequestBounds) -> Json:
    chat: Json = {"max_completion_tokens": max(min(fields.max_tokens, bounds.max_model_len), 1)}
    options: Json = {"prewarm": True} if fields.max_tokens == 0 else {}
    if fields.diagnostics is not None:
        options["comparison_response_id"] = fields.diagnostics
    if options:
        chat["prompt_cache_options"] = {**(values.get("prompt_cache_options") or {"ttl": ttl or None}), **options}
    if fields.stop_sequences and fields.stop:
        raise_invalid_value("stop", "is set beside stop_sequences", "send only one of them")
    if fields.stop_sequences:
        chat["stop"] = list(fields.stop_sequences)
    if fields.metadata is not None and fields.user is None:
        chat["user"] = fields.metadata
    return chat


def _system(value: object, bounds: RequestBounds) -> ConversationBuilder:
    read = ConversationBuilder()
    add_system_prompt(value, read, bounds)
    return read


def _tools(value: object, bounds: RequestBounds) -> ChatTools:
    read: list[Json] = []
    names: list[str] = []
    ttl = 0.0
    for index, sent in enumerate(check_list("tools", value, MAX_TOOLS, "tools")):
        name = f"tools[{index}]"
        if not isinstance(sent, Mapping):
            raise_invalid_value(name, f"is {safe_repr(sent)}", "it must be an object with name and input_schema")
        ttl = max(ttl, cache_control_ttl(sent.get("cache_control")))
        tool = _as_client_tool(sent)
        if tool is None:
            bounds.note_omitted_from_prompt(NameKind.TOOL, sent.get("type"))
            continue
        for key, kind in (("name", str), ("input_schema", Mapping)):
            if not isinstance(tool.get(key), kind):
                remedy = "it must be a string" if kind is str else "it must be a JSON schema"
                raise_invalid_value(f"{name}.{key}", f"is {safe_repr(tool.get(key))}", remedy)
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        read.append({"type": "function", "function": function})
        names.append(name)
    return ChatTools(read, tuple(names), ttl)


def _tool_choice(value: object) -> ChatToolChoice:
    sent = check_mapping("tool_choice", value, 16)
    kind, single = sent.get("type"), sent.get("disable_parallel_tool_use") or False
    if not isinstance(single, bool):
        raise_invalid_value(
            "tool_choice.disable_parallel_tool_use", f"is {safe_repr(single)}", "it must be true or false"
        )
    if kind == "tool":
        if not isinstance(sent.get("name"), str):
            raise_invalid_value(
                "tool_choice.name", f"is {safe_repr(sent.get('name'))}", "it must be the name of a tool"
            )
        return ChatToolChoice({"type": "function", "function": {"name": sent["name"]}}, not single)
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in choices:
        raise_invalid_value("tool_choice.type", f"is {safe_repr(kind)}", "it must be one of auto, any, tool, none")
    return ChatToolChoice(choices[kind], not single)


def _thinking(value: object, bounds: RequestBounds) -> bool | None:
    kind = read_reasoning_effort(check_mapping("thinking", value, 16).get("type"), bounds, "thinking", _THINKING)
    return None if kind is None else kind != "disabled"


def _output_config(value: object, bounds: RequestBounds) -> OutputConfig:
    sent = check_mapping("output_config", value, 16)
    chosen, shape = sent.get("effort"), sent.get("format")
    return OutputConfig(
        None if shape is None else _format("output_config.format", shape),
        None if chosen is None else read_reasoning_effort(chosen, bounds),
    )


def _format(name: str, value: object) -> Json:
    sent = check_mapping(name, value, 16)
    if sent.get("type") != "json_schema":
        raise_invalid_value(f"{name}.type", f"is {safe_repr(sent.get('type'))}", "it must be json_schema")
    if not isinstance(sent.get("schema"), Mapping):
        raise_invalid_value(f"{name}.schema", f"is {safe_repr(sent.get('schema'))}", "it must be a JSON schema")
    return sent["schema"]


def _diagnostics(value: object) -> str | None:
    previous = check_mapping("diagnostics", value, 16).get("previous_message_id")
    if previous is not None and (not isinstance(previous, str) or len(previous) > MAX_ID_CHARS):
        name = "diagnostics.previous_message_id"
        raise_invalid_value(
            name, f"is {safe_repr(previous)}", f"it must be a string of at most {MAX_ID_CHARS} characters"
        )
    return previous


def _metadata(value: object) -> str | None:
    user = value.get("user_id") if isinstance(value, Mapping) else None
    return user if isinstance(user, str) else None


def _as_client_tool(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a tool with name and schema; None if it is skipped. One of an unknown type may bring both itself."""
    kind = tool.get("type")
    if kind is None or kind == "custom":
        return tool
    row = find_treatment(ApiName.MESSAGES, NameKind.TOOL, kind)
    if row is None:
        return tool if "name" in tool and "input_schema" in tool else None
    if row.treatment is NameTreatment.SKIPPED:
        return None
    description, properties, required = _SCHEMAS[strip_date_suffix(kind)]
    schema = {"type": "object", "properties": properties, "required": list(required)}
    name = tool.get("name", strip_date_suffix(kind))
    return {"description": description, **tool, "name": name, "input_schema": schema}
