"""Items of a Responses conversation: checked, in one canonical form, and as the messages of a chat.

Reasoning, text and calls of the assistant that follow each other become one message of the chat, in that order.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headstart.openai.bounds import RequestBounds
from headstart.openai.forms.carried_text import (
    item_text,
    keep_readable_parts,
    non_text_part_text,
    tool_result_content,
    value_as_text,
)
from headstart.openai.forms.treatments import ApiName, NameKind, NameTreatment, find_treatment
from headstart.openai.responses import Json
from headstart.openai.responses_api.call_forms import CALL_FORMS, OUTPUTS, namespaced_function_name
from headstart.openai.value_checks import (
    check_encodable_text,
    check_list,
    check_string,
    missing_parameter_error,
    raise_invalid_value,
    raise_unsupported,
    safe_repr,
)

REFERENCE = "item_reference"  # to an output item of a stored response
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})[0-9a-f]{2,8}")  # has that of the response (response_objects.py)
MAX_ITEMS = 4096
MAX_PARTS = 1024
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def read_canonical_items(value: object, bounds: RequestBounds) -> list[Json]:
    """Return the items of `input` in canonical form. Raises InvalidRequestError."""
    if value is None:
        raise missing_parameter_error("input")
    if isinstance(value, str):
        part = {"type": "input_text", "text": check_encodable_text("input", value)}
        return [{"type": "message", "role": "user", "content": [part]}]
    items = check_list("input", value, MAX_ITEMS, "items")
    if not items:
        raise_invalid_value("input", "is empty", "send a string or at least one item")
    read = [read_input_item(f"input[{index}]", item, bounds) for index, item in enumerate(items)]
    _check_references(read)
    return read


def _check_references(items: Iterable[Json]) -> None:
    """Raise InvalidRequestError for an item that is referred to twice: its size would count several times."""
    known: set[str] = set()
    for index, item in enumerate(items):
        if item["type"] != REFERENCE:
            continue
        if item["id"] in known:
            raise_invalid_value(f"input[{index}].id", f"is {safe_repr(item['id'])}", "an item may be referred to once")
        known.add(item["id"])


def response_id_of_item(item_id: str) -> str | None:
    """Return the id of the response with this output item; None if no item of any server has such an id."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def referenced_item_ids(items: object) -> Iterator[str]:
    """Yield the ids of the items that an unchecked `input` refers to."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping) and item.get("type") == REFERENCE and isinstance(item.get("id"), str):
            yield item["id"]


def first_referenced_response(items: object) -> str | None:
    """Return the id of the response that the first reference of an unchecked `input` is about; None without any."""
    first = next(referenced_item_ids(items), None)
    return None if first is None else response_id_of_item(first)


def find_output_item_by_id(response: Mapping[str, Any], item_id: str) -> Json | None:
    """Return the output item of a response object; None if it has none with this id."""
    return next((item for item in response["output"] if item["id"] == item_id), None)


def check_call_outputs(history: Iterable[Json], items: Sequence[Json]) -> None:
    """Raise InvalidRequestError for an output of a function call that is not in the conversation before it."""
    known = {item["call_id"] for item in history if item["type"] in CALL_FORMS}
    for index, item in enumerate(items):
        if item["type"] in CALL_FORMS:
            known.add(item["call_id"])
        elif item["type"] in OUTPUTS and item["call_id"] not in known:
            name = f"input[{index}].call_id"
            raise_invalid_value(name, f"is {safe_repr(item['call_id'])}", "no function call before it has this id")


def items_as_chat_messages(named: Iterable[tuple[str, Json]]) -> tuple[list[Json], list[str]]:
    """Return the messages of a chat, and the name of the item that each begins with."""
    messages: list[Json] = []
    names: list[str] = []
    for name, item in named:
        last = messages[-1] if messages else {}
        kind = item["type"]
        if kind in CALL_FORMS:
            call = _chat_call(item)
            if last.get("role") == "assistant":
                last.setdefault("tool_calls", []).append(call)
                last["content"] = last["content"] or None
                continue
            message: Json = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind in OUTPUTS:
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        elif kind == REFERENCE:
            raise_invalid_value(f"{name}.id", f"is {safe_repr(item['id'])}", "no stored response has this item")
        elif kind == "reasoning" and item["content"]:
            text = "".join(part["text"] for part in item["content"])
            message = {"role": "assistant", "content": "", "reasoning_content": text}
        elif "role" in item:  # a message, or an item that is placed
            parts = [{**part, "type": "text"} for part in item["content"]]
            if item["role"] == "assistant" and (_only_reasons(last) or _joins(last, parts)):
                last["content"] = [*(last["content"] or ()), *parts]
                continue
            message = {"role": item["role"], "content": parts}
        else:  # skipped
            continue
        messages.append(message)
        names.append(name)
    return messages, names


def _joins(last: Json, parts: list[Json]) -> bool:
    """Return whether text of the assistant belongs to its message before it: one of both is a placed item."""
    if last.get("role") != "assistant" or "tool_calls" in last:
        return False
    return any("placed" in part for part in (*(last["content"] or ()), *parts))


def _chat_call(item: Json) -> Json:
    own_name, form = CALL_FORMS[item["type"]]
    name = own_name or namespaced_function_name(item["name"], item.get("namespace"))
    function = {"name": name, "arguments": form.arguments_from_payload(item[form.payload])}
    return {"id": item["call_id"], "type": "function", "function": function}


def _only_reasons(message: Json) -> bool:
    return message.get("reasoning_content") is not None and not message["content"] and "tool_calls" not in message


def read_input_item(name: str, item: object, bounds: RequestBounds) -> Json:
    """Return an item in canonical form; `name` is that of the field. Raises InvalidRequestError."""
    if not isinstance(item, Mapping):
        raise_invalid_value(name, f"is {safe_repr(item)}", "it must be an object such as a message")
    match item.get("type", "message"):
        case "message":
            return _with_id(name, item, _message(name, item, bounds))
        case str() as kind if kind in CALL_FORMS:
            return _with_id(name, item, _call(name, item))
        case str() as kind if kind in OUTPUTS:
            sent = item["id"] if item.get("call_id") is None and "id" in item else item.get("call_id")
            call_id = check_string(f"{name}.call_id", sent)
            return _with_id(name, item, {"type": kind, "call_id": call_id, "output": _output(name, item, bounds)})
        case "reasoning":
            read = {"type": "reasoning", "summary": [], "content": _reasoning(name, item)}
            if not read["content"]:
                bounds.note_omitted_from_prompt(NameKind.ITEM, "reasoning")
            return _with_id(name, item, read)
        case "item_reference":
            return {"type": REFERENCE, "id": check_string(f"{name}.id", item.get("id"))}
        case str() as kind:
            return _with_id(name, item, _other(name, kind, item, bounds))
        case kind:
            raise_invalid_value(f"{name}.type", f"is {safe_repr(kind)}", 'it must be a string such as "message"')


def _call(name: str, item: Mapping[str, Any]) -> Json:
    """Return a call that a client executes, with its name, if it has one, and its payload."""
    own_name, form = CALL_FORMS[item["type"]]
    sent = item.get("id") if item.get("call_id") is None and own_name else item.get("call_id")
    call: Json = {"type": item["type"], "call_id": check_string(f"{name}.call_id", sent)}
    if not own_name:
        call["name"] = check_string(f"{name}.name", item.get("name"))
        payload = item.get(form.payload)
        if item["type"] == "function_call":
            payload = value_as_text("" if payload is None else payload)  # null: as sent by those who had an answer cut
        call[form.payload] = check_string(f"{name}.{form.payload}", payload)
        if item.get("namespace") is not None:
            call["namespace"] = check_string(f"{name}.namespace", item["namespace"])
        return call
    payload = item.get(form.payload)
    if not isinstance(payload, Mapping):
        raise_invalid_value(f"{name}.{form.payload}", f"is {safe_repr(payload)}", "it must be an object")
    return {**call, form.payload: dict(payload)}


def _other(name: str, kind: str, item: Mapping[str, Any], bounds: RequestBounds) -> Json:
    """Return an item of another server's tools with its text; without one if it has none, or is skipped."""
    row = find_treatment(ApiName.RESPONSES, NameKind.ITEM, kind)
    if row is not None and row.treatment is NameTreatment.REFUSED:
        raise_unsupported(name, row.note)
    text = "" if row is not None and row.treatment is NameTreatment.SKIPPED else item_text(name, item, bounds)
    if not text:
        bounds.note_omitted_from_prompt(NameKind.ITEM, kind)
        return {"type": kind}
    role = item.get("role")
    is_users = kind.endswith(("_output", "_response")) and kind != "program_output"
    role = role if role in _ROLES else "user" if is_users else "assistant"
    return {"type": kind, "role": role, "content": [{"type": "text", "text": text, "placed": True}]}


def _with_id(name: str, item: Mapping[str, Any], read: Json) -> Json:
    """Return the canonical item with the id that the client sent, if any."""
    if item.get("id") is not None:
        read["id"] = check_string(f"{name}.id", item["id"])
    return read


def _message(name: str, item: Mapping[str, Any], bounds: RequestBounds) -> Json:
    role = item.get("role")
    if role not in _ROLES:
        raise_invalid_value(f"{name}.role", f"is {safe_repr(role)}", f"it must be one of {', '.join(_ROLES)}")
    content = item.get("content")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        return {
            "type": "message",
            "role": role,
            "content": [{"type": kind, "text": check_encodable_text(f"{name}.content", content)}],
        }
    parts = check_list(f"{name}.content", content, MAX_PARTS, "parts")
    read = [_part(f"{name}.content[{index}]", part, kind, bounds) for index, part in enumerate(parts)]
    return {"type": "message", "role": role, "content": read}


def _part(name: str, part: object, kind: str, bounds: RequestBounds) -> Json:
    """Return a part as text of `kind`, with the cache breakpoint behind it if there is one."""
    if not isinstance(part, Mapping):
        raise_invalid_value(
            name, f"is {safe_repr(part)}", 'it must be an object such as {"type": "input_text", "text": "..."}'
        )
    if not isinstance(part.get("type"), str):
        raise_invalid_value(
            f"{name}.type", f"is {safe_repr(part.get('type'))}", 'it must be "input_text" or "output_text"'
        )
    if part["type"] in _TEXT_PARTS:
        key = "refusal" if part["type"] == "refusal" else "text"
        read: Json = {"type": kind, "text": check_string(f"{name}.{key}", part.get(key))}
    else:
        read = {"type": kind, "text": non_text_part_text(name, part, bounds)}
    if part.get("prompt_cache_breakpoint") is not None:
        read["prompt_cache_breakpoint"] = part["prompt_cache_breakpoint"]
    return read


def _output(name: str, item: Mapping[str, Any], bounds: RequestBounds) -> str | list[Json]:
    """Return the output of a call as one text, or as two or more parts; other values than texts and parts as JSON."""
    value, is_own = item.get("output"), item["type"] in ("function_call_output", "custom_tool_call_output")
    if is_own:
        value = tool_result_content(value)
    if isinstance(value, str):
        return check_encodable_text(f"{name}.output", value)
    if not is_own:
        sent = {"tools": item.get("tools")} if value is None else value
        found = keep_readable_parts(f"{name}.output", sent, bounds) or item.get("status")
        return value_as_text(found) if found else ""
    parts = check_list(f"{name}.output", value, MAX_PARTS, "parts")
    read = [_part(f"{name}.output[{index}]", part, "input_text", bounds) for index, part in enumerate(parts)]
    return read if len(read) > 1 else "".join(part["text"] for part in read)


def _reasoning(name: str, item: Mapping[str, Any]) -> list[Json]:
    """Return the reasoning texts, else those of the summary. Encrypted content of other servers cannot be read."""
    for key in ("content", "summary"):
        read: list[Json] = []
        for index, part in enumerate(check_list(f"{name}.{key}", item.get(key) or (), MAX_PARTS, "parts")):
            text = part.get("text") if isinstance(part, Mapping) else None
            read.append({"type": "reasoning_text", "text": check_string(f"{name}.{key}[{index}].text", text)})
        if read:
            return read
    return []
