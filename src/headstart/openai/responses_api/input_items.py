"""Items of a Responses conversation: checked, in one canonical form, and as the messages of a chat.

Reasoning, text and calls of the assistant that follow each other become one message of the chat, in that order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headstart.openai.responses import Json
from headstart.openai.responses_api.item_references import REFERENCE
from headstart.openai.value_checks import bad_value, check_list, check_text, missing, shown, unsupported

MAX_ITEMS = 4096
MAX_PARTS = 1024
MAX_ID_CHARS = 256
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def read_items(value: object) -> list[Json]:
    """Return the items of `input` in canonical form. Raises InvalidRequestError."""
    if value is None:
        raise missing("input")
    if isinstance(value, str):
        part = {"type": "input_text", "text": check_text("input", value)}
        return [{"type": "message", "role": "user", "content": [part]}]
    items = check_list("input", value, MAX_ITEMS, "items")
    if not items:
        bad_value("input", "is empty", "send a string or at least one item")
    read = [read_item(f"input[{index}]", item) for index, item in enumerate(items)]
    _check_references(read)
    return read


def _check_references(items: Iterable[Json]) -> None:
    """Raise InvalidRequestError for an item that is referred to twice: its size would count several times."""
    known: set[str] = set()
    for index, item in enumerate(items):
        if item["type"] != REFERENCE:
            continue
        if item["id"] in known:
            bad_value(f"input[{index}].id", f"is {shown(item['id'])}", "an item may be referred to once")
        known.add(item["id"])


def check_calls(history: Iterable[Json], items: Sequence[Json]) -> None:
    """Raise InvalidRequestError for an output of a function call that is not in the conversation before it."""
    known = {item["call_id"] for item in history if item["type"] == "function_call"}
    for index, item in enumerate(items):
        if item["type"] == "function_call":
            known.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in known:
            name = f"input[{index}].call_id"
            bad_value(name, f"is {shown(item['call_id'])}", "no function call before it has this id")


def chat_messages(named: Iterable[tuple[str, Json]]) -> tuple[list[Json], list[str]]:
    """Return the messages of a chat, and the name of the item that each begins with."""
    messages: list[Json] = []
    names: list[str] = []
    for name, item in named:
        last = messages[-1] if messages else {}
        match item["type"]:
            case "message" if item["role"] == "assistant" and _only_reasons(last):
                last["content"] = _chat_parts(item["content"])
                continue
            case "message":
                message: Json = {"role": item["role"], "content": _chat_parts(item["content"])}
            case "function_call":
                call = {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                }
                if last.get("role") == "assistant":
                    last.setdefault("tool_calls", []).append(call)
                    last["content"] = last["content"] or None
                    continue
                message = {"role": "assistant", "content": None, "tool_calls": [call]}
            case "item_reference":
                bad_value(f"{name}.id", f"is {shown(item['id'])}", "no stored response has this item")
            case "function_call_output":
                message = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            case _:
                text = "".join(part["text"] for part in item["content"])
                message = {"role": "assistant", "content": "", "reasoning_content": text}
        messages.append(message)
        names.append(name)
    return messages, names


def _only_reasons(message: Json) -> bool:
    return message.get("reasoning_content") is not None and not message["content"] and "tool_calls" not in message


def _chat_parts(parts: list[Json]) -> list[Json]:
    return [{**part, "type": "text"} for part in parts]


def read_item(name: str, item: object) -> Json:
    """Return an item in canonical form; `name` is that of the field. Raises InvalidRequestError."""
    if not isinstance(item, Mapping):
        bad_value(name, f"is {shown(item)}", "it must be an object such as a message")
    match item.get("type", "message"):
        case "message":
            return _with_id(name, item, _message(name, item))
        case "function_call":
            sent = {**item, "arguments": item.get("arguments") or ""}
            call = {key: _string(f"{name}.{key}", sent.get(key)) for key in ("call_id", "name", "arguments")}
            return _with_id(name, item, {"type": "function_call", **call})
        case "function_call_output":
            call_id = _string(f"{name}.call_id", item.get("call_id"), MAX_ID_CHARS)
            output = _output(f"{name}.output", item.get("output"))
            return _with_id(name, item, {"type": "function_call_output", "call_id": call_id, "output": output})
        case "reasoning":
            return _with_id(name, item, {"type": "reasoning", "summary": [], "content": _reasoning(name, item)})
        case "item_reference":
            return {"type": REFERENCE, "id": _string(f"{name}.id", item.get("id"), MAX_ID_CHARS)}
        case str() as kind:
            unsupported(name, f"items of type {shown(kind)} are not built; send messages, function calls and outputs")
        case kind:
            bad_value(f"{name}.type", f"is {shown(kind)}", 'it must be a string such as "message"')


def _with_id(name: str, item: Mapping[str, Any], read: Json) -> Json:
    """Return the canonical item with the id that the client sent, if any."""
    if item.get("id") is not None:
        read["id"] = _string(f"{name}.id", item["id"], MAX_ID_CHARS)
    return read


def _message(name: str, item: Mapping[str, Any]) -> Json:
    role = item.get("role")
    if role not in _ROLES:
        bad_value(f"{name}.role", f"is {shown(role)}", f"it must be one of {', '.join(_ROLES)}")
    content = item.get("content")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        return {
            "type": "message",
            "role": role,
            "content": [{"type": kind, "text": check_text(f"{name}.content", content)}],
        }
    parts = check_list(f"{name}.content", content, MAX_PARTS, "parts")
    read = [_part(f"{name}.content[{index}]", part, kind) for index, part in enumerate(parts)]
    return {"type": "message", "role": role, "content": read}


def _part(name: str, part: object, kind: str) -> Json:
    """Return a text part as `kind`, with the cache breakpoint behind it if there is one."""
    if not isinstance(part, Mapping):
        bad_value(name, f"is {shown(part)}", 'it must be an object such as {"type": "input_text", "text": "..."}')
    if part.get("type") not in _TEXT_PARTS:
        if isinstance(part.get("type"), str):
            unsupported(name, f"parts of type {shown(part['type'])} are not built; this server reads text only")
        bad_value(f"{name}.type", f"is {shown(part.get('type'))}", 'it must be "input_text" or "output_text"')
    key = "refusal" if part["type"] == "refusal" else "text"
    read: Json = {"type": kind, "text": _string(f"{name}.{key}", part.get(key))}
    if part.get("prompt_cache_breakpoint") is not None:
        read["prompt_cache_breakpoint"] = part["prompt_cache_breakpoint"]
    return read


def _output(name: str, value: object) -> str | list[Json]:
    """Return the output of a call as one text, or as two or more parts."""
    if isinstance(value, str):
        return check_text(name, value)
    parts = check_list(name, value, MAX_PARTS, "parts")
    read = [_part(f"{name}[{index}]", part, "input_text") for index, part in enumerate(parts)]
    return read if len(read) > 1 else "".join(part["text"] for part in read)


def _reasoning(name: str, item: Mapping[str, Any]) -> list[Json]:
    """Return the reasoning texts. Encrypted content of other servers cannot be read and is left out."""
    parts = check_list(f"{name}.content", item.get("content") or (), MAX_PARTS, "parts")
    read: list[Json] = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) else None
        read.append({"type": "reasoning_text", "text": _string(f"{name}.content[{index}].text", text)})
    return read


def _string(name: str, value: object, max_chars: int | None = None) -> str:
    if value is None:
        raise missing(name)
    if not isinstance(value, str) or (max_chars is not None and len(value) > max_chars):
        limit = "" if max_chars is None else f" of at most {max_chars} characters"
        bad_value(name, f"is {shown(value)}", f"it must be a string{limit}")
    return check_text(name, value)
