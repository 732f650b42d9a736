"""The rule `plain_items`: items, blocks and tools that other engines refuse, as those that they read.

What a vendor's server has done is text of the conversation, calls of any tool are calls of functions, arguments that
were cut are closed; what only the vendor can read goes. Tools that a client executes stay, since an answer with their
calls comes from the engine: of a custom one only the grammar goes, which is in its description then. What is invalid
is left to the engine.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.canonical.prompt_rules import has_replaced_items
from headstart.openai.forms.carried_text import DIGEST, item_text
from headstart.openai.forms.treatments import UNREADABLE, ApiName, NameKind, NameTreatment, find_treatment
from headstart.openai.request_json import parse_json_object
from headstart.openai.responses_api.call_forms import CALL_FORMS, OUTPUTS, custom_tool_description
from headstart.openai.responses_api.input_items import read_input_item
from headstart.openai.tools.call_arguments import parse_call_arguments

Values = Mapping[str, Any]
_BOUNDS = RequestBounds(vocab_size=1, max_model_len=1, unreadable_parts=DIGEST)
_AS_SENT = frozenset({"message", "item_reference"})
_OWN_CALLS = frozenset(name for name, _ in CALL_FORMS.values() if name)  # tools whose calls no other engine makes


def replace_unsupported_tools(api: str, tools: list[Values], counts: Counter[str]) -> list[Values]:
    """Return the tools that engines read or may know of; the same objects where nothing changes."""
    found: list[Values] = []
    for sent in tools:
        tool = sent
        row = find_treatment(ApiName(api), NameKind.TOOL, sent.get("type"))
        if sent.get("type") in _OWN_CALLS or (row is not None and row.treatment is NameTreatment.SKIPPED):
            continue
        if sent.get("type") == "custom" and isinstance(sent.get("format"), Mapping):
            tool = {key: item for key, item in sent.items() if key != "format"}
            tool["description"] = custom_tool_description(dict(sent))
        found.append(tool)
    counts["plain_items"] += len(tools) - sum(any(tool is one for one in tools) for tool in found)
    return found


def replace_unsupported_items(items: Sequence[Values], counts: Counter[str]) -> list[Values]:
    """Return the items of a Responses conversation as messages, calls of functions, their outputs and reasoning."""
    found: list[Values] = []
    was_placed = False
    for item in items:
        try:
            plain = _plain_item(item)
        except InvalidRequestError:
            plain = item
        counts["plain_items"] += plain is not item
        if plain is None:
            continue
        is_placed = plain is not item and plain["type"] == "message"
        if found and (is_placed or was_placed) and (joined := _joined(found[-1], plain)):
            found[-1] = joined
        else:
            found.append(plain)
        was_placed = is_placed
    return found


def _joined(one: Values, other: Values) -> Values | None:
    """Return two messages of the assistant as one with one text: vLLM reads no other part; None: they are no such."""
    parts: list[Any] = []
    for message in (one, other):
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, list):
            return None
        parts += cast("list[Any]", content)
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        return None
    return {**one, "content": [{"type": "output_text", "text": "\n".join(texts)}]}


def _plain_item(item: Values) -> Values | None:
    kind = item.get("type", "message")
    if kind in _AS_SENT or "role" in item:
        return item
    read = read_input_item("input", item, _BOUNDS)
    match kind:
        case "function_call":
            return _with_closed(item, read["arguments"])
        case "function_call_output":
            return item
        case "reasoning":
            is_plain = bool(item.get("content")) and not item.get("encrypted_content")
            kept = {"type": kind, "id": item.get("id") or "rs_plain", "summary": [], "content": read["content"]}
            return item if is_plain else kept if read["content"] else None
        case str() if kind in CALL_FORMS:
            own_name, form = CALL_FORMS[kind]
            call = {"type": "function_call", "call_id": read["call_id"], "name": own_name or read["name"]}
            return {**call, "arguments": form.arguments_from_payload(read[form.payload])}
        case str() if kind in OUTPUTS:
            output = item["output"] if kind == "custom_tool_call_output" else read["output"]
            return {"type": "function_call_output", "call_id": read["call_id"], "output": output}
        case _ if "content" in read:
            part = "output_text" if read["role"] == "assistant" else "input_text"
            texts = [{"type": part, "text": one["text"]} for one in read["content"]]
            return {"type": "message", "role": read["role"], "content": texts}
        case _:
            return None


def supported_messages(api: str, messages: list[Values], counts: Counter[str]) -> list[Values]:
    """Return the messages of a chat or of the Messages API, without those of which nothing is left."""
    plain_message = close_call_arguments if api == ApiName.CHAT else replace_unsupported_blocks
    found = [plain_message(message, counts) for message in messages]
    return [message for message in found if message is not None]


def replace_unsupported_blocks(message: Values, counts: Counter[str]) -> Values | None:
    """Return a message of the Messages API with text in place of blocks of a vendor's tools; None if nothing is left.

    Images and documents stay: engines may read them.
    """
    blocks = message.get("content")
    if not isinstance(blocks, list):
        return message
    found: list[Any] = []
    for block in cast("list[Any]", blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        row = find_treatment(ApiName.MESSAGES, NameKind.ITEM, kind)
        if row is None or kind in UNREADABLE or row.treatment is NameTreatment.MAPPED or kind == "document":
            found.append(block)
            continue
        counts["plain_items"] += 1
        text = "" if row.treatment is NameTreatment.SKIPPED else item_text("messages", block, _BOUNDS)
        found += [{"type": "text", "text": text}] if text else []
    if not has_replaced_items(found, blocks):
        return message
    return {**message, "content": found} if found else None


def close_call_arguments(message: Values, counts: Counter[str]) -> Values:
    """Return a message of a chat with the arguments of its calls closed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found: list[Any] = []
    for call in cast("list[Any]", calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        sent = cast("Values", function).get("arguments") if isinstance(function, Mapping) else None
        closed = _with_closed(cast("Values", function), sent) if isinstance(sent, str) else function
        counts["plain_items"] += closed is not function
        found.append(call if closed is function else {**call, "function": closed})
    return {**message, "tool_calls": found} if has_replaced_items(found, calls) else message


def _with_closed(call: Values, arguments: str) -> Values:
    """Return a call whose arguments are a JSON object; the same call if they are one."""
    try:
        parse_json_object(arguments.encode())
    except (InvalidRequestError, UnicodeEncodeError):
        return {**call, "arguments": msgspec.json.encode(parse_call_arguments(arguments)).decode()}
    return call
