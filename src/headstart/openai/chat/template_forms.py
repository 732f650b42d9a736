"""ContentForms: the messages that a chat template shows as they are, found by rendering conversations of a few words.

Templates refuse, drop and move messages. Each probe is a conversation of markers; it is shown if every marker is in the
prompt once, and those of a message stand behind those of all earlier ones. What a template does not show,
placed_messages.py writes in another form. Nothing depends on the text of a request, so the prompt of a longer
conversation extends that of a shorter one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

Message = dict[str, Any]
Tried = Callable[[list[Message], list[dict[str, Any]] | None], str | None]  # None: the template does not take them
SYSTEM_ROLES = ("system", "developer")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
UNDESCRIBED_TOOL = "undescribed tool"
_PARTS = ("7f3a1", "9c2be")
_SEPARATORS = ("", "\n", " ", "\n\n")
_LONG_ID = "call_0123456789abcdef"


class ContentForms(NamedTuple):
    """The forms of messages that a template takes beside one text."""

    separators: Mapping[str, str]  # by role: the text it prints between two text parts; else it prints no parts
    takes_null: bool  # content beside tool calls may be null
    takes_no_parameters: bool  # a tool may have none
    shown: frozenset[str] | None = None  # names of the probes that are shown; None: not known, all are taken as shown
    reasoning_key: str = REASONING_KEYS[0]  # of a message, for its reasoning

    def shows_probe(self, probe: str) -> bool:
        """Return whether the template shows the messages of a probe."""
        return self.shown is None or probe in self.shown


ONE_TEXT = ContentForms({}, takes_null=False, takes_no_parameters=False)


class ToolCallsProbeCase(NamedTuple):
    """Tool calls of one message and their results, as far as a template may treat them differently."""

    has_content: bool = False
    is_parallel: bool = False
    is_answered: bool = True
    before_user: bool = False  # else before an answer, or at the end, where the next answer will be

    @property
    def label(self) -> str:
        """The name of the probe."""
        return " ".join(("calls", *(name for name, is_so in self._asdict().items() if is_so)))


PLAIN_CALL = ToolCallsProbeCase().label


def detect_content_forms(tried: Tried) -> ContentForms:
    """Return the forms of a template; `tried` renders a conversation with it.

    A list of parts is printed between the same texts as one text, or as a Python list, which no model was trained
    on: only in the first case is its separator the template's.
    """
    tools: list[dict[str, Any]] | None = None if tried([_user("a")], None) is not None else []

    def shows(messages: list[Message]) -> bool:
        return are_texts_rendered(messages, tried(messages, tools))

    shown = {"no tools"} if tools is None else set[str]()
    arguments = "" if not shows(_one_call(None)) and shows(_one_call("")) else None
    if arguments is None:
        shown.add("object arguments")
    shown |= {name for name, messages in _probes(arguments) if shows(messages)}
    shown |= {name for name, all_of in _calls_probes(arguments) if all(map(shows, all_of))}
    for role in SYSTEM_ROLES:
        calls = [_called("", _call(1, "x", arguments)), _result(1, "y")] if PLAIN_CALL in shown else []
        if all(map(shows, _leading(role, calls))):
            shown.add(role)
        if all(map(shows, _inline(role, calls))):
            shown.add(f"inline {role}")
    separators = {role: found for role in _AROUND if (found := _separator(tried, role, tools)) is not None}
    null = tried([_user("a"), {**_called("", _call(1, "b", arguments)), "content": None}, _result(1, "c")], tools)
    no_parameters = tried([_user("a")], [{"type": "function", "function": {"name": "f"}}])
    parameters = {"type": "object", "properties": {}}
    if tried([_user("a")], [{"type": "function", "function": {"name": "f", "parameters": parameters}}]) is not None:
        shown.add(UNDESCRIBED_TOOL)
    return ContentForms(
        separators,
        takes_null=null is not None and "None" not in null,
        takes_no_parameters=no_parameters is not None,
        shown=frozenset(shown),
        reasoning_key=_reasoning_key(tried, tools, arguments),
    )


def are_texts_rendered(messages: Sequence[Mapping[str, Any]], text: str | None) -> bool:
    """Return whether each text of the messages is in `text` once, behind those of all earlier messages."""
    if text is None:
        return False
    end = 0
    for message in messages:
        places = [(text.find(marker), len(marker)) for marker in probe_message_texts(message)]
        if any(at < end for at, _ in places) or any(text.count(marker) != 1 for marker in probe_message_texts(message)):
            return False
        end = max((at + length for at, length in places), default=end)
    return True


def probe_message_texts(message: Mapping[str, Any]) -> list[str]:
    """Return the content and the arguments of calls of a probe's message."""
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    found = [json.loads(one)["city"] if isinstance(one, str) else one["city"] for one in calls]
    return [*([message["content"]] if message["content"] else ()), *found]


def encode_content_forms(forms: ContentForms) -> str:
    """Return the forms as JSON."""
    shown = None if forms.shown is None else sorted(forms.shown)
    return json.dumps((*forms[:3], shown, forms.reasoning_key))


def parse_content_forms(answer: str) -> ContentForms:
    """Return the forms from JSON that is not trusted."""
    try:
        separators, takes_null, takes_no_parameters, shown, key = json.loads(answer)
        known = {role: text for role, text in separators.items() if isinstance(text, str) and not text.strip()}
        names = None if shown is None else frozenset(name for name in shown if isinstance(name, str))
    except (ValueError, TypeError, AttributeError):
        return ONE_TEXT
    return ContentForms(
        known,
        takes_null=takes_null is True,
        takes_no_parameters=takes_no_parameters is True,
        shown=names,
        reasoning_key=key if key in REASONING_KEYS else REASONING_KEYS[0],
    )


# ------------------------------------------------------------------------------------------------- the conversations


def _marker(name: str) -> str:
    return f"Mk{name}7q"


def _text(role: str, name: str) -> Message:
    return {"role": role, "content": _marker(name)}


def _user(name: str) -> Message:
    return _text("user", name)


def _call(number: int, name: str, arguments: Any = None, call_id: str | None = None) -> dict[str, Any]:
    text = json.dumps({"city": _marker(name)}) if isinstance(arguments, str) else {"city": _marker(name)}
    function = {"name": "weather", "arguments": text}
    return {"id": call_id or f"call0000{number}", "type": "function", "function": function}


def _called(name: str, *calls: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": _marker(name) if name else "", "tool_calls": list(calls)}


def _result(number: int, name: str, call_id: str | None = None) -> Message:
    return {"role": "tool", "tool_call_id": call_id or f"call0000{number}", "content": _marker(name)}


def _one_call(arguments: Any) -> list[Message]:
    return [_user("a"), _called("", _call(1, "b", arguments)), _result(1, "c")]


def _probes(arguments: Any) -> Iterator[tuple[str, list[Message]]]:
    """Yield the conversations of the probes by name; `arguments` of calls: a text, or None for an object."""
    for role in SYSTEM_ROLES:
        yield f"{role} alone", [_text(role, "a")]
        for other in SYSTEM_ROLES:
            yield (
                f"{role} {other}",
                [_text(role, "a"), _text(other, "b"), _user("c"), _text("assistant", "d"), _user("e")],
            )
    yield "user user", [_user("a"), _user("b"), _text("assistant", "c"), _user("d"), _user("e")]
    yield "assistant assistant", [_user("a"), _text("assistant", "b"), _text("assistant", "c"), _user("d")]
    yield "empty answer", [_user("a"), {"role": "assistant", "content": ""}, _user("b")]
    yield "result alone", [_user("a"), _text("assistant", "b"), _result(1, "c"), _text("assistant", "d"), _user("e")]
    long_id = [_called("", _call(1, "b", arguments, _LONG_ID)), _result(1, "c", _LONG_ID)]
    yield "long id", [_user("a"), *long_id]
    text_and_call = [_text("assistant", "b"), _called("", _call(1, "c", arguments)), _result(1, "d")]
    yield "content call", [_user("a"), *text_and_call, _text("assistant", "e"), _user("f")]


def _calls_probes(arguments: Any) -> Iterator[tuple[str, list[list[Message]]]]:
    """Yield the conversations of each ToolCallsProbeCase by name: all must be shown."""
    user = [_user("g"), _text("assistant", "h"), _user("i")]
    answers = [[_text("assistant", "g"), _user("h")], [_called("", _call(3, "g", arguments)), _result(3, "h")]]
    for shape in map(ToolCallsProbeCase._make, product((False, True), repeat=4)):
        calls = [_call(1, "c", arguments), *([_call(2, "d", arguments)] if shape.is_parallel else [])]
        results = [_result(1, "e"), *([_result(2, "f")] if shape.is_parallel else [])] if shape.is_answered else []
        behind = [user] if shape.before_user else [*answers, *([[]] if shape.is_answered else [])]
        before = [_user("a"), _called("b" if shape.has_content else "", *calls), *results]
        yield shape.label, [[*before, *more] for more in behind]


def _leading(role: str, calls: list[Message]) -> list[list[Message]]:
    """Return conversations that begin with a message of `role`, which some templates move with each turn."""
    begin = [_text(role, "a"), _user("b")]
    return [begin, [*begin, _text("assistant", "c"), _user("d")], [*begin, *calls]]


def _inline(role: str, calls: list[Message]) -> list[list[Message]]:
    """Return conversations with a message of `role` between others; `calls`: a call and its result, if shown."""
    inner, answered = _text(role, "m"), [_user("a"), _text("assistant", "b")]
    return [
        [_text("system", "s"), _user("a"), inner, _user("b")],
        [*answered, inner, _user("c")],
        [*answered, _user("c"), inner, _text("assistant", "d"), _user("e")],
        [*answered, inner],
        [_user("a"), inner],
        [_user("a"), *calls, inner],
    ]


def _reasoning_key(tried: Tried, tools: list[dict[str, Any]] | None, arguments: Any) -> str:
    """Return the key under which the template shows the reasoning of a last turn, beside a call or a text."""
    marker = _marker("r")
    called = [_called("", _call(1, "b", arguments)), _result(1, "c")]
    for key in REASONING_KEYS:
        for answer, *behind in (called, [_text("assistant", "b")]):
            if marker in (tried([_user("a"), {**answer, key: marker}, *behind], tools) or ""):
                return key
    return REASONING_KEYS[0]


_AROUND: dict[str, tuple[list[Message], list[Message]]] = {  # by role: messages before and after one
    "system": ([], [_user("a")]),
    "developer": ([], [_user("a")]),
    "user": ([], []),
    "assistant": ([_user("a")], [_user("b")]),
    "tool": ([_user("a"), _called("", _call(1, "b"))], []),
}


def _separator(tried: Tried, role: str, tools: list[dict[str, Any]] | None) -> str | None:
    """Return the text between two text parts of a message of `role`; None if the template prints no parts."""
    (before, after), kept = _AROUND[role], _result(1, "c") if role == "tool" else {}

    def shown(content: Any) -> str | None:
        return tried([*before, {**kept, "role": role, "content": content}, *after], tools)

    found = shown([{"type": "text", "text": text} for text in _PARTS])
    if found is None or not all(text in found for text in _PARTS):
        return None
    return next((one for one in _SEPARATORS if shown(one.join(_PARTS)) == found), None)
