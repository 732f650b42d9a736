"""Lines of logs as entries with a request body: bodies, LiteLLM's payloads and logs, vLLM's request log.

LiteLLM writes a standard logging payload (`messages`, `model_parameters`) to S3, GCS and other sinks, and the body as
`proxy_server_request` into its spend logs. vLLM logs a rendered prompt, its token ids, or both; a rendered prompt is
split into messages where the marks of the template are known. Pure: text in, values out.
"""

import json
import re
from ast import literal_eval
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

VLLM_HIDDEN = "vLLM logs prompts only with VLLM_LOGGING_LEVEL=DEBUG, beside --enable-log-requests"
REDACTED = "LiteLLM has removed the texts (turn_off_message_logging)"
NOT_STORED = "LiteLLM stores bodies only with store_prompts_in_spend_logs: true"
CUT_AT = "vLLM has cut prompts at {:,} {} (--max-log-len): what stood behind is not known, and figures are too low"
CUT = "LiteLLM has cut long texts (MAX_STRING_LENGTH_PROMPT_IN_DB): lengths and costs are too low"

_REDACTED_TEXT = "redacted-by-litellm"
_CUT_TEXT = "litellm_truncated"
_RECEIVED = "Request received by LiteLLM:"
_NESTED = ("standard_logging_object", "standard_logging_payload")
_QUOTED = r"'(?:[^'\\]|\\.)*+'" + r'|"(?:[^"\\]|\\.)*+"'
_PROMPT = re.compile(rf"(?:Received request|Request) (\S+?)(?: details)?: prompt: ({_QUOTED}|None), ", re.DOTALL)
_NO_PROMPT = re.compile(r"Received request (\S+?): params: ")
_TOKEN_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")
_TURN = re.compile(
    r"<\|im_start\|>(\w+)\n?|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*|<start_of_turn>(\w+)\n?"
    r"|<\|(system|developer|user|assistant|tool|observation)\|>\n?"
)
_ROLES = {"model": "assistant", "ipython": "tool", "observation": "tool"}


class LogEntry(NamedTuple):
    """One line: an object that holds a body (empty: none), what is to be told about it, and the engine's request id."""

    value: Mapping[str, Any]
    note: str = ""
    request_id: str = ""
    prompt: str | tuple[int, ...] = ""  # as vLLM logged it, perhaps cut


NOTHING = LogEntry({})


def log_entry(line: str) -> LogEntry:
    """Return what a line holds."""
    text = line.strip("\ufeff \t\r\n")
    if not text.startswith("{"):
        return _vllm(text)
    try:
        value = as_object(json.loads(text))
    except (ValueError, RecursionError):
        return NOTHING
    message = value.get("message")
    if isinstance(message, str):  # a record of a JSON log
        found = _record(message)
        if found is not NOTHING or str(value.get("component")).startswith("LiteLLM"):
            return found  # LiteLLM repeats the fields of one request in many records
    return entry_of(value)


def entry_of(value: Mapping[str, Any]) -> LogEntry:
    """Return a decoded line with LiteLLM's forms made into `body` and `response`; others are returned as they are."""
    payload = next((as_object(value[key]) for key in _NESTED if key in value), value)
    if "proxy_server_request" in payload:
        body = _object(payload["proxy_server_request"])
        body = as_object(body.get("body")) or body
        if not body:
            return LogEntry({}, NOT_STORED)
    elif "model_parameters" in payload:
        body = {**as_object(payload["model_parameters"]), **_messages(payload.get("messages"))}
    else:
        return LogEntry(payload)
    text = json.dumps(body, ensure_ascii=False)
    if f'"{_REDACTED_TEXT}"' in text:
        return LogEntry({}, REDACTED)
    return LogEntry({"body": body, "response": _object(payload.get("response"))}, CUT if _CUT_TEXT in text else "")


def split_rendered(prompt: str) -> list[dict[str, str]]:
    """Return the messages of a rendered prompt; one message of the user if the template's marks are not known.

    The mark of the answer at the end is left out.
    """
    turns = list(_TURN.finditer(prompt))
    if not turns:
        return [{"role": "user", "content": prompt}]
    messages = [{"role": "system", "content": prompt[: turns[0].start()]}] if prompt[: turns[0].start()].strip() else []
    ends = [turn.start() for turn in turns[1:]] + [len(prompt)]
    for turn, end in zip(turns, ends, strict=True):
        role = next(name for name in turn.groups() if name)
        messages.append({"role": _ROLES.get(role, role), "content": prompt[turn.end() : end]})
    if len(messages) > 1 and messages[-1]["role"] == "assistant" and len(messages[-1]["content"]) < 32:
        del messages[-1]
    return messages


def _vllm(text: str) -> LogEntry:
    found = _PROMPT.search(text)
    if found is None:
        hidden = _NO_PROMPT.search(text)
        return NOTHING if hidden is None else LogEntry({}, VLLM_HIDDEN, hidden[1])
    if found[2] != "None":
        try:
            prompt = literal_eval(found[2])
            return LogEntry({"messages": split_rendered(prompt)}, "", found[1], prompt)
        except (ValueError, SyntaxError):  # cut within the text of the log
            return NOTHING
    ids = _TOKEN_IDS.search(text, found.end())
    if ids is None:
        return LogEntry({}, VLLM_HIDDEN, found[1])
    tokens = tuple(int(token) for token in ids[1].split(",") if token.strip())
    return LogEntry({"prompt": list(tokens)}, "", found[1], tokens)


def _record(message: str) -> LogEntry:
    """Return the entry of the message of a JSON log."""
    _, received, body = message.partition(_RECEIVED)
    value = parsed_object(body if received else message)
    return entry_of(value) if value else _vllm(message)


def _messages(messages: object) -> dict[str, Any]:
    """Return the field of a body for the `messages` of a payload: a list, a text, or an object of fields."""
    if isinstance(messages, str):
        found = _object(messages) or _list(messages)
        return _messages(found) if found else {"prompt": messages}
    return {"messages": messages} if as_list(messages) else as_object(messages)


def _list(text: str) -> list[Any]:
    try:
        return as_list(json.loads(text)) if text.startswith("[") else []
    except (ValueError, RecursionError):
        return []


def _object(value: object) -> dict[str, Any]:
    """Return a JSON object, also if it is given as text."""
    return parsed_object(value) if isinstance(value, str) else as_object(value)


def as_object(value: object) -> dict[str, Any]:
    """Return a JSON object; {} for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}  # JSON has no other keys


def as_list(value: object) -> list[Any]:
    """Return a JSON list; [] for any other value."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def parsed_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is; {} for any other text."""
    try:
        return as_object(json.loads(text))
    except (ValueError, RecursionError):
        return {}
