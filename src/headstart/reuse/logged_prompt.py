"""LoggedPrompt: one request of a log as tools and messages, whatever API it was sent to. Tokens are estimated.

A line of a log is a JSON body of chat completions, completions, Responses or Anthropic's Messages, an object that
has the body under `body` or `request`, and perhaps the answer under `response`, or a line of a known engine's log.
LiteLLM writes a standard logging payload (`messages`, `model_parameters`) to S3, GCS and other sinks, and the body as
`proxy_server_request` into its spend logs. vLLM logs a rendered prompt, its token ids, or both; a rendered prompt is
split into messages where the marks of the template are known. Pure: lines in, values out.
"""

import json
import re
from array import array
from ast import literal_eval
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

CHARS_PER_TOKEN = 4
MANY_ALIKE = 3  # different prompts of one length, the largest of a log: they were cut
BODY_KEYS = ("body", "request", "request_body")
_THINK = ("<think>", "</think>")
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


class LoggedMessage(NamedTuple):
    """One message; `calls` are its tool calls as texts."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[str, ...] = ()

    @property
    def full_text(self) -> str:
        """The message as it is counted."""
        return "".join((f"<{self.role}>\n", self.reasoning, self.content, *self.calls, "\n"))


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """A request of line `line` (from 1). `tools` are texts of JSON, in the order and form in which they were sent."""

    line: int
    tools: tuple[str, ...]
    messages: tuple[LoggedMessage, ...]
    answer: LoggedMessage | None = None
    group: str = ""  # prompts of different groups share no cache: the request's cache_salt

    @property
    def text(self) -> str:
        """The prompt as one text: tools, then messages, as in most chat templates."""
        return "\n".join((*self.tools, "")) + "".join(message.full_text for message in self.messages)


@dataclass(frozen=True, slots=True)
class IdTracePrompt:
    """A request of line `line` as ids of `id_tokens` tokens each (the last may stand for fewer); `length`: tokens."""

    line: int
    ids: Sequence[int]
    length: int
    id_tokens: int = 1
    group: str = ""  # prompts of different groups share nothing
    session: str = ""  # a conversation, whose prompts are expected to continue each other


@dataclass(slots=True)
class ParsedLog:
    """The prompts of a log with texts, those with ids only, the number of other lines, and notes with their counts."""

    prompts: list[LoggedPrompt] = field(default_factory=list[LoggedPrompt])
    id_prompts: list[IdTracePrompt] = field(default_factory=list[IdTracePrompt])
    num_skipped: int = 0
    notes: Counter[str] = field(default_factory=Counter[str])

    def notes_as_sentences(self) -> list[str]:
        """Return the notes as sentences, with those that mixed forms need."""
        counted = [f"{count:,} {'request' if count == 1 else 'requests'}: {note}" for note, count in self.notes.items()]
        if self.prompts and self.id_prompts:
            counted.append(f"{len(self.id_prompts):,} requests with token ids only are left out: lint them alone")
        return counted


def parse_log(lines: Iterable[str | Mapping[str, Any]]) -> ParsedLog:
    """Return the requests of a log in order, one per line or object; blank lines do not count."""
    found = ParsedLog()
    lengths: dict[tuple[int, bool], set[int]] = {}  # of vLLM's prompts: the different ones
    hidden: set[str] = set()
    shown: set[str] = set()
    for number, line in enumerate(lines, 1):
        if isinstance(line, str) and not line.strip():
            continue
        entry = parse_log_line(line) if isinstance(line, str) else normalise_log_entry(line)
        (hidden if entry.note == VLLM_HIDDEN else shown).add(entry.request_id)
        if entry.note and entry.note != VLLM_HIDDEN:
            found.notes[entry.note] += 1
        if not _add(found, number, entry) and entry.note != VLLM_HIDDEN:
            found.num_skipped += 1
        lengths.setdefault((len(entry.prompt), isinstance(entry.prompt, str)), set()).add(hash(entry.prompt))
    (longest, is_text), ends = max(lengths.items(), default=((0, True), set[int]()))
    if longest and len(ends) >= MANY_ALIKE:
        found.notes[CUT_AT.format(longest, "characters" if is_text else "tokens")] = len(ends)
    found.notes.update({VLLM_HIDDEN: len(hidden - shown)} if hidden - shown else {})
    return found


def _add(found: ParsedLog, number: int, entry: LogEntry) -> bool:
    """Add the prompt of a line; return whether it holds one."""
    prompt = logged_prompt_of_entry(number, entry.value)
    if prompt is not None:
        found.prompts.append(prompt)
        return True
    body = find_request_body(entry.value)
    ids = list_or_empty(body.get("prompt"))
    if not ids or not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in ids):
        return False
    found.id_prompts.append(IdTracePrompt(number, array("i", ids), len(ids), group=_salt(body)))
    return True


def find_request_body(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body that an object has under a known key; the object itself if it has none."""
    return next((object_or_empty(value[key]) for key in BODY_KEYS if object_or_empty(value.get(key))), value)


def _salt(body: Mapping[str, Any]) -> str:
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) else ""


def logged_prompt_of_entry(number: int, entry: object) -> LoggedPrompt | None:
    """Return the prompt of a decoded line; None if it holds none."""
    value = object_or_empty(entry)
    body = find_request_body(value)
    messages = tuple(_messages(body))
    if not messages:
        return None
    tools = list_or_empty(body.get("tools") or body.get("functions"))
    answer = _answer(object_or_empty(value.get("response")))
    return LoggedPrompt(number, tuple(map(_json, tools)), messages, answer, _salt(body))


def _messages(body: Mapping[str, Any]) -> Iterator[LoggedMessage]:
    """Yield the messages of a body, with a system prompt of its own first."""
    for key in ("system", "instructions"):
        if body.get(key):
            yield LoggedMessage("system", _text(body[key]))
    items = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(items, str):
        yield LoggedMessage("user", items)
    for item in list_or_empty(items):
        if isinstance(item, str):
            yield LoggedMessage("user", item)
        elif object_or_empty(item):
            yield _message(object_or_empty(item))


def _message(item: Mapping[str, Any]) -> LoggedMessage:
    """Return a message of any of the APIs, or an item of Responses."""
    role = str(
        item.get("role") or {"function_call": "assistant", "reasoning": "assistant"}.get(item.get("type", ""), "tool")
    )
    role = "system" if role == "developer" else role
    reasoning = _text(item.get("reasoning_content") or item.get("reasoning") or item.get("summary") or "")
    content: Any = item.get("content", item.get("output", ""))
    calls = [_json(object_or_empty(call).get("function", call)) for call in list_or_empty(item.get("tool_calls"))]
    if item.get("type") == "function_call":
        calls.append(_json({"name": item.get("name"), "arguments": item.get("arguments")}))
    for part in map(object_or_empty, list_or_empty(content)):
        if part.get("type") == "thinking":
            reasoning += _text(part.get("thinking"))
        elif part.get("type") == "tool_use":
            calls.append(_json({"name": part.get("name"), "arguments": part.get("input")}))
    text = _text(content)
    if text.startswith(_THINK[0]) and _THINK[1] in text:
        thought, _, text = text.partition(_THINK[1])
        reasoning, text = reasoning + thought.removeprefix(_THINK[0]).strip(), text.lstrip()
    return LoggedMessage(role, text, reasoning, tuple(calls))


def _answer(response: Mapping[str, Any]) -> LoggedMessage | None:
    """Return the message of a chat's answer, if the log has it."""
    choices = list_or_empty(response.get("choices"))
    message = object_or_empty(object_or_empty(choices[0]).get("message")) if choices else {}
    return _message({"role": "assistant", **message}) if message else None


def _text(value: Any) -> str:
    """Return the text of a content: a string, or a list of parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        items: list[Any] = list_or_empty(cast("object", value))
        parts = [part if isinstance(part, str) else _part(object_or_empty(part)) for part in items]
        return "\n".join(part for part in parts if part)
    return "" if value is None else _json(value)


def _part(part: Mapping[str, Any]) -> str:
    if not part or part.get("type") in ("thinking", "tool_use"):
        return ""
    for key in ("text", "content", "output"):
        if key in part:
            return _text(part[key])
    return _json(part)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def parse_log_line(line: str) -> LogEntry:
    """Return what a line holds."""
    text = line.strip("\ufeff \t\r\n")
    if not text.startswith("{"):
        return _vllm(text)
    try:
        value = object_or_empty(json.loads(text))
    except (ValueError, RecursionError):
        return NOTHING
    message = value.get("message")
    if isinstance(message, str):  # a record of a JSON log
        found = _record(message)
        if found is not NOTHING or str(value.get("component")).startswith("LiteLLM"):
            return found  # LiteLLM repeats the fields of one request in many records
    return normalise_log_entry(value)


def normalise_log_entry(value: Mapping[str, Any]) -> LogEntry:
    """Return a decoded line with LiteLLM's forms made into `body` and `response`; others are returned as they are."""
    payload = next((object_or_empty(value[key]) for key in _NESTED if key in value), value)
    if "proxy_server_request" in payload:
        body = _object(payload["proxy_server_request"])
        body = object_or_empty(body.get("body")) or body
        if not body:
            return LogEntry({}, NOT_STORED)
    elif "model_parameters" in payload:
        body = {**object_or_empty(payload["model_parameters"]), **_logged_messages(payload.get("messages"))}
    else:
        return LogEntry(payload)
    text = json.dumps(body, ensure_ascii=False)
    if f'"{_REDACTED_TEXT}"' in text:
        return LogEntry({}, REDACTED)
    return LogEntry({"body": body, "response": _object(payload.get("response"))}, CUT if _CUT_TEXT in text else "")


def split_rendered_prompt(prompt: str) -> list[dict[str, str]]:
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
            return LogEntry({"messages": split_rendered_prompt(prompt)}, "", found[1], prompt)
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
    value = parse_object_or_empty(body if received else message)
    return normalise_log_entry(value) if value else _vllm(message)


def _logged_messages(messages: object) -> dict[str, Any]:
    """Return the field of a body for the `messages` of a payload: a list, a text, or an object of fields."""
    if isinstance(messages, str):
        found = _object(messages) or _list(messages)
        return _logged_messages(found) if found else {"prompt": messages}
    return {"messages": messages} if list_or_empty(messages) else object_or_empty(messages)


def _list(text: str) -> list[Any]:
    try:
        return list_or_empty(json.loads(text)) if text.startswith("[") else []
    except (ValueError, RecursionError):
        return []


def _object(value: object) -> dict[str, Any]:
    """Return a JSON object, also if it is given as text."""
    return parse_object_or_empty(value) if isinstance(value, str) else object_or_empty(value)


def object_or_empty(value: object) -> dict[str, Any]:
    """Return a JSON object; {} for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}  # JSON has no other keys


def list_or_empty(value: object) -> list[Any]:
    """Return a JSON list; [] for any other value."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def parse_object_or_empty(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is; {} for any other text."""
    try:
        return object_or_empty(json.loads(text))
    except (ValueError, RecursionError):
        return {}
