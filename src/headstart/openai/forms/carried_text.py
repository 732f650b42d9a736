"""The text of parts, items and blocks of any type: the same bytes for the same value in each turn.

Ids, states and encrypted content are left out, since the model cannot use them. What cannot be read here, such as an
image, becomes a placeholder with its kind, or is refused (`--unreadable-parts`). A router, whose replicas may read it,
has its digest in the place of a placeholder.
"""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from headstart.openai.bounds import RequestBounds
from headstart.openai.forms.treatments import UNREADABLE, NameKind
from headstart.openai.value_checks import check_encodable_text, raise_unsupported, safe_repr

REFUSE, DIGEST = "refuse", "digest"
_LEFT_OUT = frozenset(
    (
        *("type", "id", "status", "call_id", "tool_use_id", "role", "phase", "caller", "cache_control", "citations"),
        *("signature", "encrypted_content", "encrypted_stdout", "encrypted_index", "fingerprint", "container_id"),
        *("prompt_cache_breakpoint", "annotations", "logprobs", "detail", "media_type", "created_by", "file_id"),
        *("acknowledged_safety_checks", "pending_safety_checks", "size", "quality", "background", "output_format"),
    )
)
_TEXT_KEYS = ("text", "refusal", "thinking")
_SHOWN_TYPE_CHARS = 64
_BASE64 = re.compile(r"(?:data:[\w/+.-]*;base64,)?[A-Za-z0-9+/_-]{1024,}={0,2}")  # longer than any word


def item_text(name: str, value: Mapping[str, Any], bounds: RequestBounds) -> str:
    """Return `[type] text` of an item or block; empty if it carries none. Raises InvalidRequestError."""
    found = keep_readable_parts(name, value, bounds)
    if not found:
        return ""
    return check_encodable_text(name, f"[{str(value.get('type'))[:_SHOWN_TYPE_CHARS]}] {value_as_text(found)}\n")


def non_text_part_text(name: str, part: Mapping[str, Any], bounds: RequestBounds) -> str:
    """Return the text of a part that is no text part, perhaps a placeholder. Raises InvalidRequestError."""
    kind = part["type"]
    if kind in UNREADABLE:
        return _placeholder(name, kind, part, bounds)
    if kind == "document":
        return _document(name, part, bounds)
    return item_text(name, part, bounds) or _placeholder(name, kind, part, bounds)


def keep_readable_parts(name: str, value: object, bounds: RequestBounds) -> object:
    """Return a value without ids and encrypted content, with texts in place of text parts; empty if nothing is left."""
    if isinstance(value, Mapping):
        kind = value.get("type")
        if isinstance(kind, str) and kind in UNREADABLE:
            return _placeholder(name, kind, value, bounds)
        text = next((value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str)), None)
        if text is not None and not set(value) - _LEFT_OUT - set(_TEXT_KEYS):
            return text
        found = {
            key: inner
            for key, item in value.items()
            if key not in _LEFT_OUT
            and (inner := keep_readable_parts(f"{name}.{key}", item, bounds)) not in ("", None, [], {})
        }
        return next(iter(found.values())) if list(found) in (["content"], ["output"]) else found
    if isinstance(value, list | tuple):
        kept = [inner for item in value if (inner := keep_readable_parts(name, item, bounds)) not in ("", None, [], {})]
        texts = [item for item in kept if isinstance(item, str)]
        return "\n".join(texts) if texts and len(texts) == len(kept) else kept
    if isinstance(value, str) and _BASE64.fullmatch(value):
        return _placeholder(name, "file", value, bounds)
    return value


def value_as_text(value: object) -> str:
    """Return the text of a value from `keep_readable_parts`: JSON, unless it is one."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tool_result_content(value: object) -> Any:
    """Return the result of a tool as a text or a list of parts; any other value is its JSON, null nothing."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        is_parts = all(isinstance(item, Mapping) and isinstance(item.get("type"), str) for item in value)
        return value if is_parts else value_as_text(value)
    return value_as_text(value)


def _document(name: str, part: Mapping[str, Any], bounds: RequestBounds) -> str:
    source = part.get("source")
    inside = None
    if isinstance(source, Mapping) and source.get("type") == "text":
        inside = source.get("data")
    elif isinstance(source, Mapping) and source.get("type") == "content":
        inside = keep_readable_parts(f"{name}.source.content", source.get("content"), bounds)
    if not inside:
        return _placeholder(name, "file", part, bounds)
    head = " ".join(item for item in (part.get("title"), part.get("context")) if isinstance(item, str))
    return check_encodable_text(name, f"[document{head and ' '}{head}]\n{value_as_text(inside)}\n")


def digest_placeholder(kind: str, part: object) -> str:
    """Return a text that stands for the content of a part, the same in each turn: `[image 1f8a...]`."""
    kept = {key: item for key, item in part.items() if key != "cache_control"} if isinstance(part, Mapping) else part
    return f"[{UNREADABLE.get(kind, kind)} {sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()}]"


def _title(part: object) -> str:
    if not isinstance(part, Mapping):
        return ""
    inner = part.get("file")
    for holder in (part, inner if isinstance(inner, Mapping) else {}):
        for key in ("filename", "title"):
            if isinstance(holder.get(key), str):
                return holder[key][:_SHOWN_TYPE_CHARS]
    return ""


def _placeholder(name: str, kind: str, part: object, bounds: RequestBounds) -> str:
    """Return the placeholder of a part, and note it as skipped. Raises InvalidRequestError if the server refuses it."""
    if bounds.unreadable_parts == REFUSE:
        remedy = "this server reads text only; send text, or start it with --unreadable-parts placeholder"
        raise_unsupported(name, f"parts of type {safe_repr(kind)} are not read: {remedy}")
    known = UNREADABLE.get(kind, kind[:_SHOWN_TYPE_CHARS])
    bounds.note_omitted_from_prompt(NameKind.PART, known)
    if bounds.unreadable_parts == DIGEST:
        return digest_placeholder(known, part)
    title = _title(part)
    return check_encodable_text(name, f"[{known}{title and ' '}{title}: not shown, this server reads text only]")
