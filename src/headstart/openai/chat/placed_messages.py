"""Placement of messages: what a chat template would refuse, drop or move is written in a form that it shows, in place.

Only messages that the template does not show change (template_forms.py). How a message is written depends on the
template and on its neighbours, never on texts, so the prompt of the next turn extends that of this one. Idempotent.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from headstart.openai.chat.template_forms import (
    PLAIN_CALL,
    REASONING_KEYS,
    SYSTEM_ROLES,
    ContentForms,
    Message,
    ToolCallsProbeCase,
)
from headstart.openai.tools.chat_format import ToolCallFormat
from headstart.openai.tools.default_prompt import tool_calls_as_text, tool_result_as_text

SEPARATOR = "\n\n"  # between messages that become one
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


class TemplateMessages(NamedTuple):
    """Messages for a chat template, and how often each placement was made: keys of PLACEMENT_TEXTS."""

    messages: list[Message]
    counts: Counter[str]


def fit_messages_to_template(
    messages: Sequence[Message], forms: ContentForms, family: ToolCallFormat, *, shows_results: bool
) -> TemplateMessages:
    """Return the messages in forms that the template shows; `messages` stay unchanged.

    `family`: how calls are written that the template has no form for. `shows_results`: it knows messages of role
    `tool`, rather than printing any role.
    """
    placement = _Placement(forms, family, shows_results)
    return TemplateMessages(placement.placed(messages), placement.counts)


class _Placement:
    def __init__(self, forms: ContentForms, family: ToolCallFormat, shows_results: bool) -> None:
        self._forms = forms
        self._family = family
        self._needs_short_ids = forms.shows_probe(PLAIN_CALL) and not forms.shows_probe("long id")
        self._keeps_results = shows_results and forms.shows_probe("result alone")
        self.counts: Counter[str] = Counter()

    def placed(self, messages: Sequence[Message]) -> list[Message]:
        num_leading = next((i for i, one in enumerate(messages) if one["role"] not in SYSTEM_ROLES), len(messages))
        has_user = any(message["role"] == "user" for message in messages)
        found = self._leading(messages[:num_leading], has_user=has_user)
        found += [self._inline(message) for message in messages[num_leading:]]
        found = self._joined(self._without_empty([self._with_fields(message) for message in found]))
        return self._joined(self._with_calls(found))

    # ------------------------------------------------------------------------------------------------ system messages

    def _leading(self, messages: Sequence[Message], *, has_user: bool) -> list[Message]:
        """Return the system messages that begin a conversation."""
        found = [self._as_role(message, self._leading_role(message["role"], has_user=has_user)) for message in messages]
        roles = [message["role"] for message in found]
        pairs = pairwise(roles)
        if "user" in roles or all(self._forms.shows_probe(f"{one} {other}") for one, other in pairs):
            return found
        self.counts["joined_turns"] += len(found) - 1
        return [{**found[0], "content": SEPARATOR.join(message["content"] for message in found)}]

    def _leading_role(self, role: str, *, has_user: bool) -> str:
        for known in (role, "system"):
            if self._forms.shows_probe(known if has_user else f"{known} alone"):
                return known
        return "user"

    def _inline(self, message: Message) -> Message:
        """Return a message behind the first ones: a system message that is refused or moved there is a user's."""
        role = message["role"]
        if role not in SYSTEM_ROLES:
            return message
        known = (known for known in (role, "system") if self._forms.shows_probe(f"inline {known}"))
        return self._as_role(message, next(known, "user"))

    def _as_role(self, message: Message, role: str) -> Message:
        if role == message["role"]:
            return message
        self.counts["inline_system" if role == "user" else "developer_as_system"] += 1
        return {**message, "role": role}

    # ------------------------------------------------------------------------------------------- fields of one message

    def _with_fields(self, message: Message) -> Message:
        """Return a message with its reasoning, ids and arguments in the forms of the template."""
        key = self._forms.reasoning_key
        if key != REASONING_KEYS[0] and REASONING_KEYS[0] in message:
            message = {key if name == REASONING_KEYS[0] else name: value for name, value in message.items()}
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        if "tool_call_id" in message and self._needs_short_ids:
            message = {**message, "tool_call_id": self._short_id(message["tool_call_id"])}
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if not self._forms.shows_probe("object arguments") and not isinstance(function["arguments"], str):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        return {**call, "id": self._short_id(call["id"])} if self._needs_short_ids else call

    def _short_id(self, call_id: str | None) -> str:
        """Return nine letters and digits, which Mistral's templates require; an id of that form stays."""
        call_id = call_id or ""
        if _SHORT_ID.fullmatch(call_id):
            return call_id
        self.counts["short_ids"] += 1
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def _without_empty(self, messages: list[Message]) -> list[Message]:
        """Return the messages without answers that have no text, if the template refuses them."""
        if self._forms.shows_probe("empty answer"):
            return messages
        return [
            message
            for message in messages
            if message["role"] != "assistant" or message["content"] or message.get("tool_calls")
        ]

    def _joined(self, messages: list[Message]) -> list[Message]:
        """Return the messages with turns of one role as one where the template demands that roles alternate."""
        joined: list[Message] = []
        for message in messages:
            joined.append(self._joined_to_last(joined, message))
        return joined

    def _joined_to_last(self, found: list[Message], message: Message) -> Message:
        """Return a message, with the last one of `found` before its text if that has to be one turn with it."""
        role = message["role"]
        if not found or found[-1]["role"] != role or found[-1].get("tool_calls") or role == "tool":
            return message
        if self._forms.shows_probe("content call" if message.get("tool_calls") else f"{role} {role}"):
            return message
        self.counts["joined_turns"] += 1
        return _together(found.pop(), message)

    # ---------------------------------------------------------------------------------------------- calls and results

    def _with_calls(self, messages: list[Message]) -> list[Message]:
        """Return the messages with calls and results in forms that are shown."""
        found: list[Message] = []
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            if message["role"] == "tool":
                found.append(message if self._keeps_results else self._plain_result(message))
                continue
            if not message.get("tool_calls"):
                found.append(message)
                continue
            message = self._joined_to_last(found, message)  # to calls that became text, perhaps
            end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
            behind = next((i for i in range(end, len(messages)) if messages[i]["role"] != "user"), len(messages))
            results, users = messages[at:end], messages[end:behind]
            is_system = behind == end < len(messages) and messages[end]["role"] in SYSTEM_ROLES
            group = self._group(message, results, users, before_user=bool(users) or (is_system and not results))
            found += group
            at = behind
        return found

    def _group(
        self, message: Message, results: list[Message], users: list[Message], *, before_user: bool
    ) -> list[Message]:
        """Return one message with calls, its results, and the user messages behind them."""
        calls = message["tool_calls"]
        shape = ToolCallsProbeCase(bool(message["content"]), len(calls) > 1, bool(results), before_user)
        if self._shows(shape, len(calls), len(results)):
            return [message, *results, *users]
        if users and results and self._shows(shape._replace(before_user=False), len(calls), len(results)):
            self.counts["joined_turns"] += len(users)
            texts = [one["content"] for one in (results[-1], *users)]
            return [message, *results[:-1], {**results[-1], "content": SEPARATOR.join(texts)}]
        if shape.has_content and self._forms.shows_probe("content call"):
            alone = shape._replace(has_content=False)
            single = alone._replace(is_parallel=False)
            if self._shows(alone, len(calls), len(results)) or self._shows(single, 1, 1):
                self.counts["separate_calls"] += 1
                text = {"role": "assistant", "content": message["content"]}
                return [text, *self._group({**message, "content": ""}, results, users, before_user=before_user)]
        one = ToolCallsProbeCase(shape.has_content)
        if shape.is_parallel and len(calls) == len(results) and self._shows(one, 1, 1):
            self.counts["separate_calls"] += len(calls) - 1
            return self._one_by_one(message, results, users, before_user=before_user)
        self.counts["plain_calls"] += len(calls)
        text = "\n".join(part for part in (message["content"], tool_calls_as_text(calls, self._family)) if part)
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        keeps = self._keeps_results and not before_user
        return [{**kept, "content": text}, *(results if keeps else map(self._plain_result, results)), *users]

    def _shows(self, shape: ToolCallsProbeCase, num_calls: int, num_results: int) -> bool:
        """Return whether calls are shown as they are. Results of only some must be shown with and without all."""
        is_complete = num_results in (0, num_calls)
        shapes = [shape] if is_complete else [shape._replace(is_answered=one) for one in (True, False)]
        return all(self._forms.shows_probe(one.label) for one in shapes)

    def _one_by_one(
        self, message: Message, results: list[Message], users: list[Message], *, before_user: bool
    ) -> list[Message]:
        """Return parallel calls as one message each, with its result behind it."""
        calls = message["tool_calls"]
        by_id = {result.get("tool_call_id"): result for result in results}
        if len(by_id) == len(results) and all(call["id"] in by_id for call in calls):
            results = [by_id[call["id"]] for call in calls]
        found: list[Message] = []
        for index, (call, result) in enumerate(zip(calls, results, strict=True)):
            is_last = index == len(calls) - 1
            kept = {"role": "assistant", "content": ""} if index else message
            own: Message = {**kept, "tool_calls": [call]}
            found += self._group(own, [result], users if is_last else [], before_user=before_user and is_last)
        return found

    def _plain_result(self, message: Message) -> Message:
        self.counts["plain_calls"] += 1
        return {"role": "user", "content": tool_result_as_text(message["content"])}


def _together(one: Message, other: Message) -> Message:
    """Return two messages of one role as one, with a blank line between their texts."""
    texts = [text for text in (one["content"], other["content"]) if text]
    reasoning = {
        key: SEPARATOR.join(text for text in (one.get(key), other.get(key)) if text)
        for key in REASONING_KEYS
        if key in one or key in other
    }
    return {**one, **other, "content": SEPARATOR.join(texts), **reasoning}
