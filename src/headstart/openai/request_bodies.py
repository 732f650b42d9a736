"""Request bodies: a JSON object -> CompletionBody | ChatBody | TokenizeBody | DetokenizeBody, all validated.

Checks shapes and limits and does not tokenize: prompts stay text or token ids as sent. For any input, the only
exception raised is InvalidRequestError.
"""

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.core.errors import InvalidRequestError, RequestTooLargeError
from headstart.openai.bounds import Bounds
from headstart.openai.fields import Fields, bad_value, check_int, check_text, shown, unsupported
from headstart.openai.generation_params import GenerationParams, Kind, check_token_ids, parse_params
from headstart.openai.request_json import parse_json

MAX_MODEL_CHARS = 256
MAX_TOOL_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | array  # text, or packed int32 token ids
Message = dict[str, Any]  # role, content: str, and optionally name, tool_calls, tool_call_id, reasoning_content


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """A /v1/completions body."""

    model: str | None
    prompts: tuple[Prompt, ...]
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A /v1/chat/completions body."""

    model: str | None
    messages: list[Message]
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """A /tokenize body: a text, or messages to render first."""

    model: str | None
    prompt: str | None
    messages: list[Message] | None
    add_special_tokens: bool | None
    add_generation_prompt: bool
    continue_final_message: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    """A /detokenize body."""

    model: str | None
    token_ids: "array[int]"


def parse_completion(values: Mapping[str, Any], bounds: Bounds) -> CompletionBody:
    """Return a validated /v1/completions body. Raises InvalidRequestError."""
    fields = Fields(values)
    model = fields.string("model", MAX_MODEL_CHARS)
    prompts = parse_prompts(fields.take("prompt"), bounds)
    return CompletionBody(model, prompts, parse_params(fields, bounds, Kind.COMPLETION))


def parse_chat(values: Mapping[str, Any], bounds: Bounds) -> ChatBody:
    """Return a validated /v1/chat/completions body. Raises InvalidRequestError."""
    fields = Fields(values)
    model = fields.string("model", MAX_MODEL_CHARS)
    messages = parse_messages(fields.take("messages"), bounds)
    return ChatBody(model, messages, parse_params(fields, bounds, Kind.CHAT))


def parse_tokenize(values: Mapping[str, Any], bounds: Bounds) -> TokenizeBody:
    """Return a validated /tokenize body: exactly one of `prompt` and `messages`. Raises InvalidRequestError."""
    fields = Fields(values)
    prompt = fields.take("prompt")
    messages = fields.take("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("send either prompt (a string) or messages (a list)", param="prompt")
    if prompt is not None and not isinstance(prompt, str):
        bad_value("prompt", f"is {shown(prompt)}", "it must be a string")
    if fields.take("tools"):
        unsupported("tools", "function calling is not built; leave it out")
    continue_final = fields.boolean("continue_final_message")
    special = fields.take("add_special_tokens") is not None
    return TokenizeBody(
        model=fields.string("model", MAX_MODEL_CHARS),
        prompt=None if prompt is None else check_text("prompt", prompt),
        messages=None if messages is None else parse_messages(messages, bounds),
        add_special_tokens=fields.boolean("add_special_tokens") if special else None,
        add_generation_prompt=fields.boolean("add_generation_prompt", default=not continue_final),
        continue_final_message=continue_final,
        return_token_strs=fields.boolean("return_token_strs"),
    )


def parse_detokenize(values: Mapping[str, Any], bounds: Bounds) -> DetokenizeBody:
    """Return a validated /detokenize body. Raises InvalidRequestError."""
    fields = Fields(values)
    token_ids = check_token_ids("tokens", fields.take("tokens"), bounds, max_items=16 * bounds.max_model_len)
    return DetokenizeBody(fields.string("model", MAX_MODEL_CHARS), array("i", token_ids))


def parse_prompts(value: object, bounds: Bounds) -> tuple[Prompt, ...]:
    """Return the prompts from any of OpenAI's four forms: text, texts, token ids, lists of token ids."""
    if value is None:
        raise InvalidRequestError("prompt is missing", param="prompt", code="missing_required_parameter")
    if isinstance(value, str):
        return (check_text("prompt", value),)
    if not isinstance(value, list | tuple | array):
        bad_value("prompt", f"is {shown(value)}", "it must be a string, a list of strings or lists of token ids")
    if not len(value):
        bad_value("prompt", "is an empty list", "send at least one prompt")
    if isinstance(value, array) or _is_int(value[0]):
        return (_token_ids(value, bounds),)
    if len(value) > bounds.max_prompts:
        bad_value("prompt", f"holds {len(value)} prompts", f"one request may hold at most {bounds.max_prompts}")
    return tuple(_one_prompt(prompt, bounds) for prompt in value)


def parse_messages(value: object, bounds: Bounds) -> list[Message]:
    """Return the conversation with each message's content as one string. Raises InvalidRequestError."""
    if value is None:
        raise InvalidRequestError("messages is missing", param="messages", code="missing_required_parameter")
    if not isinstance(value, list | tuple) or not value:
        bad_value("messages", f"is {'empty' if value == [] else shown(value)}", "it must be a list of messages")
    if len(value) > bounds.max_messages:
        bad_value("messages", f"has {len(value)} entries", f"it may have at most {bounds.max_messages}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


# --------------------------------------------------------------------------------------------------------- inner parts


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_prompt(prompt: object, bounds: Bounds) -> Prompt:
    if isinstance(prompt, str):
        return check_text("prompt", prompt)
    if isinstance(prompt, list | tuple | array):
        return _token_ids(prompt, bounds)
    bad_value("prompt", f"contains {shown(prompt)}", "it must be a string, a list of strings or lists of token ids")


def _token_ids(values: "list[Any] | tuple[Any, ...] | array[int]", bounds: Bounds) -> "array[int]":
    if not len(values):
        bad_value("prompt", "has an empty list of token ids", "send at least one token")
    if len(values) > bounds.max_model_len:
        raise RequestTooLargeError(
            f"the prompt has {len(values)} tokens; the model's context of {bounds.max_model_len} holds prompt and "
            f"output: shorten the prompt",
            param="prompt",
        )
    for value in values:
        check_int("prompt", value, 0, bounds.vocab_size - 1)
    return array("i", values)


def _message(name: str, value: object) -> Message:
    if not isinstance(value, Mapping):
        bad_value(name, f"is {shown(value)}", "it must be an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        bad_value(f"{name}.role", f"is {shown(role)}", f"it must be one of {', '.join(ROLES)}")
    message: Message = {"role": role}
    tool_calls = _tool_calls(f"{name}.tool_calls", value.get("tool_calls"))
    if tool_calls and role != "assistant":
        bad_value(f"{name}.tool_calls", f"is set on a message of role {role}", "only the assistant calls tools")
    content = value.get("content")
    if content is None and not tool_calls:
        bad_value(f"{name}.content", "is missing", "it must be a string or a list of text parts")
    message["content"] = _content(f"{name}.content", content)
    for key, max_chars in (("name", 256), ("tool_call_id", 256), ("reasoning_content", None)):
        text = value.get(key)
        if text is None:
            continue
        if not isinstance(text, str) or (max_chars is not None and len(text) > max_chars):
            bad_value(f"{name}.{key}", f"is {shown(text)}", f"it must be a string of at most {max_chars} characters")
        message[key] = check_text(f"{name}.{key}", text)
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def _content(name: str, value: object) -> str:
    """Return the content as one string; text parts are joined by newlines, as in other servers."""
    if value is None:
        return ""
    if isinstance(value, str):
        return check_text(name, value)
    if not isinstance(value, list | tuple):
        bad_value(name, f"is {shown(value)}", "it must be a string or a list of text parts")
    return "\n".join(_part(f"{name}[{index}]", part) for index, part in enumerate(value))


def _part(name: str, part: object) -> str:
    if not isinstance(part, Mapping):
        bad_value(name, f"is {shown(part)}", 'it must be an object such as {"type": "text", "text": "..."}')
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        if isinstance(kind, str):
            unsupported(name, f"parts of type {shown(kind)} are not built; this server reads text only")
        bad_value(f"{name}.type", f"is {shown(kind)}", 'it must be "text"')
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        bad_value(f"{name}.text", f"is {shown(text)}", "it must be a string")
    return check_text(name, text)


def _tool_calls(name: str, value: object) -> list[dict[str, Any]]:
    """Return the tool calls of an earlier turn for the template; arguments that are JSON are decoded."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or len(value) > MAX_TOOL_CALLS:
        bad_value(name, f"is {shown(value)}", f"it must be a list of at most {MAX_TOOL_CALLS} calls")
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            bad_value(f"{name}[{index}]", f"is {shown(call)}", "it must be an object with function.name")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | None):
            bad_value(f"{name}[{index}]", "has arguments that are no string", "send them as a string of JSON")
        function_name = check_text(name, function["name"])
        called = {"name": function_name, "arguments": _arguments(check_text(name, arguments or ""))}
        calls.append({"id": Fields(call).string("id", 256), "type": "function", "function": called})
    return calls


def _arguments(text: str) -> Any:
    try:
        value = parse_json(text.encode())
        json.dumps(value)
    except (InvalidRequestError, ValueError):
        return text
    return value
