"""Bodies of /api/chat and /api/generate as values of chat requests, or of completions for raw prompts.

Options that only concern speed or memory (num_ctx, num_gpu and the like), keep_alive and unknown fields are ignored.
What would change the answer unnoticed is refused by name.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_translation import (
    Renames,
    TranslatedChatRequest,
    shared_chat_params,
    template_variables,
)
from headstart.openai.chat.sent_message import MAX_TOOL_CALLS
from headstart.openai.generation_fields import Model
from headstart.openai.request_model import RequestModel, SentMessages, SentObjects, Text, custom_validator, validate_as
from headstart.openai.responses import Json
from headstart.openai.tools.tool_fields import MAX_TOOLS, read_reasoning_effort
from headstart.openai.value_checks import check_list, check_mapping, raise_invalid_value, raise_unsupported, safe_repr

MAX_OPTIONS = 64
MAX_IMAGES = 1024
OPTIONS = {  # of Ollama, and the field of a chat that means the same
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_completion_tokens",
}
SAMPLERS = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0}
"""Options of samplers that are not built, and the values that switch them off."""
_RENAMES: Renames = (
    *((re.compile(rf"^{theirs}\b"), f"options.{ours}") for ours, theirs in OPTIONS.items()),
    (re.compile(r"^response_format(\.json_schema)?\b"), "format"),
)


class SharedOllamaFields(RequestModel):
    """The fields that both bodies have."""

    model: Model = None
    stream: bool = Field(True, description="Send the answer as lines of JSON")
    options: Annotated[
        Json, custom_validator(lambda value, _: check_mapping("options", value, MAX_OPTIONS), dict[str, Any])
    ] = Field({}, description="num_predict, temperature and other sampling parameters")
    format: Annotated[Json | None, custom_validator(lambda value, _: _format(value), str | dict[str, Any])] = Field(
        None, description="json, or a JSON schema"
    )
    think: Annotated[bool | str | None, custom_validator(lambda value, bounds: _think(value, bounds), bool | str)] = (
        Field(None, description="Passed to the chat template: enable_thinking, or reasoning_effort")
    )


class OllamaChat(SharedOllamaFields):
    """A body of /api/chat."""

    messages: SentMessages
    tools: Annotated[
        list[Any], custom_validator(lambda value, _: list(check_list("tools", value, MAX_TOOLS)), SentObjects)
    ] = Field([], description="Functions that the model may call")


class OllamaGenerate(SharedOllamaFields):
    """A body of /api/generate."""

    prompt: Text
    system: Text | None = None
    raw: bool = Field(False, description="The prompt is used as it is, without the chat template")


def translate_chat_body(values: Mapping[str, Any], bounds: RequestBounds) -> TranslatedChatRequest:
    """Return a body of /api/chat as a chat. Raises InvalidRequestError."""
    fields = validate_as(OllamaChat, values, bounds)
    messages = _messages(fields.messages)
    chat = {**_shared(fields, values, bounds), "messages": messages}
    if fields.tools:
        chat["tools"] = fields.tools
    names = [f"messages[{index}]" for index in range(len(messages))]
    return TranslatedChatRequest(chat, "messages", names, _RENAMES)


def translate_generate_body(values: Mapping[str, Any], bounds: RequestBounds) -> TranslatedChatRequest:
    """Return a body of /api/generate as a chat, or, if it is raw, as a completion. Raises InvalidRequestError."""
    for name in ("context", "suffix", "template", *(("images",) if is_raw_completion(values) else ())):
        if values.get(name):
            raise_unsupported(name, "leave it out; for conversations use /api/chat")
    fields = validate_as(OllamaGenerate, values, bounds)
    shared = _shared(fields, values, bounds)
    if fields.raw:
        if fields.system:
            raise_invalid_value("system", "is set beside raw", "write it into the prompt")
        shared.pop("chat_template_kwargs", None)
        completion = {"max_completion_tokens": bounds.max_model_len, **shared, "prompt": fields.prompt}
        return TranslatedChatRequest(completion, "prompt", (), _RENAMES)
    asked = {"content": fields.prompt, "images": values.get("images")}
    messages: list[Json] = [{"role": "user", "content": _content("prompt", asked)}]
    names = ["prompt"]
    if fields.system:
        messages.insert(0, {"role": "system", "content": fields.system})
        names.insert(0, "system")
    return TranslatedChatRequest({**shared, "messages": messages}, "prompt", names, _RENAMES)


def is_raw_completion(values: Mapping[str, Any]) -> bool:
    """Return whether a body of /api/generate is a completion."""
    return values.get("raw") is True


def _shared(fields: SharedOllamaFields, values: Mapping[str, Any], bounds: RequestBounds) -> dict[str, Any]:
    chosen = fields.think if isinstance(fields.think, str) else None
    thinks = True if chosen is not None else fields.think
    found: dict[str, Any] = {
        **shared_chat_params(values, {**OllamaChat.model_fields, **OllamaGenerate.model_fields}),
        **template_variables(values, enable_thinking=thinks, reasoning_effort=chosen),
        **_options(fields.options, bounds),
        "model": fields.model,
        "stream": fields.stream,
    }
    if fields.format is not None:
        found["response_format"] = fields.format
    return found


def _options(sent: Mapping[str, Any], bounds: RequestBounds) -> dict[str, Any]:
    for name, off in SAMPLERS.items():
        if sent.get(name) not in (None, off):
            raise_unsupported(f"options.{name}", f"leave it out, or send {off}")
    found = {OPTIONS[name]: value for name, value in sent.items() if name in OPTIONS and value is not None}
    limit = found.get("max_completion_tokens")
    if isinstance(limit, int) and not isinstance(limit, bool):
        if limit <= 0:  # -1, -2: as many as the context holds
            del found["max_completion_tokens"]
        else:
            found["max_completion_tokens"] = min(limit, bounds.max_model_len)
    return found


def _messages(sent: list[Any]) -> list[Json]:
    """Return the messages of a chat. Calls have no ids in Ollama's API: outputs are matched by name, else in order."""
    open_calls: list[tuple[str, str]] = []  # name, id
    found: list[Json] = []
    num_calls = 0
    for index, message in enumerate(sent):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise_invalid_value(name, f"is {safe_repr(message)}", "it must be an object with role and content")
        chat: Json = {"role": message.get("role"), "content": _content(name, message)}
        if message.get("thinking") is not None:
            chat["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            calls = [
                _call(f"{name}.tool_calls[{at}]", call, num_calls + at)
                for at, call in enumerate(check_list(f"{name}.tool_calls", message["tool_calls"], MAX_TOOL_CALLS))
            ]
            num_calls += len(calls)
            open_calls += [(call["function"]["name"], call["id"]) for call in calls]
            chat["tool_calls"] = calls
            chat["content"] = chat["content"] or None
        elif chat["content"] is None:
            chat["content"] = ""
        if chat["role"] == "tool":
            chat["tool_call_id"] = message.get("tool_call_id") or _answered(open_calls, message.get("tool_name"))
        found.append(chat)
    return found


def _content(name: str, message: Mapping[str, Any]) -> Any:
    """Return the content of a message; with images, as parts of a chat."""
    content, images = message.get("content"), message.get("images")
    if not images:
        return content
    texts = [{"type": "text", "text": content}] if content else []
    sent = check_list(f"{name}.images", images, MAX_IMAGES)
    return [*texts, *({"type": "image_url", "image_url": {"url": image}} for image in sent)]


def _answered(open_calls: list[tuple[str, str]], name: object) -> str:
    """Return the id of the call that an output belongs to, and remove it; "" if there is none."""
    at = next((at for at, call in enumerate(open_calls) if call[0] == name), 0)
    return open_calls.pop(at)[1] if open_calls else ""


def _call(name: str, sent: object, number: int) -> Json:
    function = sent.get("function") if isinstance(sent, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise_invalid_value(name, f"is {safe_repr(sent)}", "it must be an object with function.name")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": function["name"], "arguments": text}}


def _think(value: object, bounds: RequestBounds) -> bool | str | None:
    return value if isinstance(value, bool) else read_reasoning_effort(value, bounds, "think")


def _format(value: object) -> Json | None:
    if value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, Mapping):
        raise_invalid_value("format", f"is {safe_repr(value)}", 'it must be "json" or a JSON schema')
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": dict(value), "strict": False}}
