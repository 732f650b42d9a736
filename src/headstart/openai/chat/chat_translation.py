"""TranslatedChatRequest: the body of another API as values of a chat request, and errors in the words of that API."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.forms.fields import UNSUPPORTED
from headstart.openai.generation_fields import SamplingFields
from headstart.openai.request_bodies import ChatBody, parse_chat
from headstart.openai.structured.structured_fields import StructuredFields

_MESSAGE = re.compile(r"\bmessages\[(\d+)\](?:\.\w+|\[\d+\])*")
_TOOL = re.compile(r"\btools\[(\d+)\]")

Renames = tuple[tuple[re.Pattern[str], str], ...]


@dataclass(frozen=True, slots=True)
class TranslatedChatRequest:
    """The values of a chat request that mean the same as a body of another API.

    `message_names`: per message, the field that it comes from. `renames`: patterns of chat fields and the fields that
    the client sent instead. `whole`: the field that all messages come from.
    """

    values: dict[str, Any]
    whole: str
    message_names: Sequence[str] = ()
    renames: Renames = ()
    thinks: bool | None = field(default=None)  # None: as the template does by default
    tool_names: Sequence[str] = ()  # per tool, the field that it comes from; beyond: the same

    def to_chat_body(self, bounds: RequestBounds) -> ChatBody:
        """Return the validated chat request. Raises InvalidRequestError in the words of the API."""
        with self.renaming_error_fields():
            return parse_chat(self.values, bounds)

    def without_values(self) -> "TranslatedChatRequest":
        """Return the translation for the names in errors only, which refers to no message."""
        return replace(self, values={})

    @contextmanager
    def renaming_error_fields(self) -> Generator[None]:
        """Rename the fields in any InvalidRequestError that is raised inside."""
        try:
            yield
        except InvalidRequestError as error:
            error.args = (self._renamed(str(error)),)
            param = error.param
            if param is not None:
                error.param = self.whole if param in ("messages", "prompt") else self._renamed(param)
            raise

    def _renamed(self, text: str) -> str:
        def of_message(found: re.Match[str]) -> str:
            index = int(found[1])
            return self.message_names[index] if index < len(self.message_names) else self.whole

        def of_tool(found: re.Match[str]) -> str:
            index = int(found[1])
            return self.tool_names[index] if index < len(self.tool_names) else found[0]

        text = _MESSAGE.sub(of_message, text)
        if text.startswith("messages "):  # a complaint about the list itself
            text = self.whole + text.removeprefix("messages")
        for pattern, name in self.renames:
            text = pattern.sub(name, text)
        return _TOOL.sub(of_tool, text)


def shared_chat_params(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that mean the same in a chat request: shared parameters, and those that it refuses by name.

    `own`: fields of the other API, left out unless they are shared parameters.
    """
    shared = SamplingFields.model_fields.keys() | (StructuredFields.model_fields.keys() - {"response_format"})
    return {
        name: value for name, value in values.items() if name in shared or (name in UNSUPPORTED and name not in own)
    }


def template_variables(values: Mapping[str, Any], **variables: Any) -> dict[str, Any]:
    """Return chat_template_kwargs with `variables` that are not None; those that the client sent take precedence."""
    sent = values.get("chat_template_kwargs")
    chosen = {name: value for name, value in variables.items() if value is not None}
    if sent is not None and not isinstance(sent, Mapping):
        return {"chat_template_kwargs": sent}  # refused with the other fields
    merged = {**chosen, **(sent or {})}
    return {"chat_template_kwargs": merged} if merged else {}
