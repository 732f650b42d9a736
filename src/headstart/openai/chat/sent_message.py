"""A message of a chat as it was sent -> Message: checked, in the fields that chat templates read.

The conversation may have begun at another server or with an older client: an answer's refusal, audio and images are
parts of its content, its thinking blocks are its reasoning, and calls of functions and custom tools are tool calls.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from headstart.openai.bounds import RequestBounds
from headstart.openai.forms.carried_text import non_text_part_text, tool_result_content
from headstart.openai.forms.treatments import AUDIO, NameKind
from headstart.openai.tools.call_arguments import parse_call_arguments
from headstart.openai.value_checks import check_encodable_text, check_string, raise_invalid_value, safe_repr

MAX_TOOL_CALLS = 4096  # of a message: an answer may have as many as its tokens allow
Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = get_args(Role)

# role, content: one text (or text parts, or null beside tool_calls), and optionally name, tool_calls, tool_call_id,
# reasoning_content
Message = dict[str, Any]
_REASONING_LISTS = ("thinking_blocks", "reasoning_details")
_REASONING_TEXTS = ("thinking", "text", "summary")
_FOREIGN = frozenset(("refusal", "audio", "images", "function_call", *_REASONING_LISTS))


def read_message(name: str, value: object, bounds: RequestBounds) -> Message:
    """Return a message; `name` is that of the field. Raises InvalidRequestError."""
    if not isinstance(value, Mapping):
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be an object with role and content")
    value = _domestic(value, bounds)
    role = value.get("role")
    if role not in ROLES:
        raise_invalid_value(f"{name}.role", f"is {safe_repr(role)}", f"it must be one of {', '.join(ROLES)}")
    message: Message = {"role": role}
    tool_calls = _tool_calls(f"{name}.tool_calls", value.get("tool_calls"))
    if tool_calls and role != "assistant":
        raise_invalid_value(
            f"{name}.tool_calls", f"is set on a message of role {role}", "only the assistant calls tools"
        )
    content = value.get("content")
    if content is None and not tool_calls and (role == "assistant" or "content" in value):
        content = ""  # an answer with reasoning only, perhaps
    if content is None and not tool_calls:
        raise_invalid_value(f"{name}.content", "is missing", "it must be a string or a list of text parts")
    message["content"] = _content(f"{name}.content", content, bounds)
    for key in ("name", "tool_call_id", "reasoning_content"):
        text = value.get(key)
        if text is None and key == "reasoning_content":
            text = value.get("reasoning")  # vLLM's newer name
        if text is not None:
            message[key] = check_string(f"{name}.{key}", text)
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def _content(name: str, value: object, bounds: RequestBounds) -> str | list[dict[str, str]] | None:
    """Return the content as one text, as two or more text parts, or as null."""
    if value is None:
        return None
    if isinstance(value, str):
        return check_encodable_text(name, value)
    if not isinstance(value, list | tuple):
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be a string or a list of text parts")
    texts = [_part(f"{name}[{index}]", part, bounds) for index, part in enumerate(value)]
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def _part(name: str, part: object, bounds: RequestBounds) -> str:
    if not isinstance(part, Mapping):
        raise_invalid_value(
            name, f"is {safe_repr(part)}", 'it must be an object such as {"type": "text", "text": "..."}'
        )
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        if isinstance(kind, str):
            return non_text_part_text(name, part, bounds)
        raise_invalid_value(f"{name}.type", f"is {safe_repr(kind)}", 'it must be "text"')
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise_invalid_value(f"{name}.text", f"is {safe_repr(text)}", "it must be a string")
    return check_encodable_text(name, text)


def _tool_calls(name: str, value: object) -> list[dict[str, Any]]:
    """Return the tool calls of an earlier turn for the template, with their arguments as objects."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or len(value) > MAX_TOOL_CALLS:
        raise_invalid_value(name, f"is {safe_repr(value)}", f"it must be a list of at most {MAX_TOOL_CALLS} calls")
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        function = _function_of(call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise_invalid_value(f"{name}[{index}]", f"is {safe_repr(call)}", "it must be an object with function.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            check_encodable_text(name, arguments)
        function_name = check_encodable_text(name, function["name"])
        called = {"name": function_name, "arguments": parse_call_arguments(arguments)}
        call_id = None if call.get("id") is None else check_string(f"{name}[{index}].id", call["id"])
        calls.append({"id": call_id, "type": "function", "function": called})
    return calls


def _domestic(message: Mapping[str, Any], bounds: RequestBounds) -> Mapping[str, Any]:
    """Return a message with the same meaning and without fields of other servers. Notes reasoning without a text."""
    role = message.get("role")
    if role in ("tool", "function"):
        return {**message, "role": "tool", "content": tool_result_content(message.get("content"))}
    if role != "assistant" or not _FOREIGN & message.keys():
        return message
    found = {key: value for key, value in message.items() if key not in _FOREIGN}
    content, more = message.get("content"), _parts(message)
    if more:
        begin = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or ()
        found["content"] = [*begin, *more] if isinstance(begin, list | tuple) else content
    if message.get("function_call") and not message.get("tool_calls"):
        found["tool_calls"] = [{"function": message["function_call"]}]
    if not message.get("reasoning_content") and not message.get("reasoning"):
        found |= _reasoning(message, bounds)
    return found


def _function_of(call: Mapping[str, Any]) -> Any:
    """Return the function of a call, name and arguments; a custom tool is a function with one text."""
    custom = call.get("custom")
    if isinstance(custom, Mapping) and call.get("function") is None:
        return {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return call.get("function")


def _parts(message: Mapping[str, Any]) -> list[Any]:
    """Return what an answer contains beside its content, as parts of a content."""
    parts: list[Any] = []
    if message.get("refusal"):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    if audio := message.get("audio"):
        transcript = audio.get("transcript") if isinstance(audio, Mapping) else None
        parts.append({"type": "text", "text": transcript} if isinstance(transcript, str) else {"type": AUDIO})
    images = message.get("images")
    return [*parts, *images] if isinstance(images, list | tuple) else parts


def _reasoning(message: Mapping[str, Any], bounds: RequestBounds) -> dict[str, str]:
    """Return the field for the reasoning of the first list that has any."""
    sent = next((found for key in _REASONING_LISTS if isinstance(found := message.get(key), list) and found), ())
    texts = [
        part[key]
        for part in sent
        if isinstance(part, Mapping)
        for key in _REASONING_TEXTS
        if isinstance(part.get(key), str) and part[key]
    ]
    if sent and not texts:
        bounds.note_omitted_from_prompt(NameKind.ITEM, "reasoning")
    return {"reasoning_content": "".join(texts)} if texts else {}
