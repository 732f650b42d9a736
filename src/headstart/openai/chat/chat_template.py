"""ChatTemplate: messages -> prompt text, with the Jinja template of the model.

The template comes from the model folder, never from a request. It runs in Jinja's immutable sandbox; time and length
are checked between any two pieces of output. Its variables are those of transformers' apply_chat_template. Servers use
it in a process that can be killed (chat_renderer.py), since this module cannot bound a single expression.
"""

import copy
import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.utils
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.openai.chat.template_forms import ContentForms, detect_content_forms

MAX_CHARS = 16 * 1024 * 1024
MAX_SECONDS = 2.0
MAX_SOURCE_CHARS = 256 * 1024  # the longest templates on the hub have about 30,000
_MARK = "\ue000headstart-continue\ue001 "  # the last one in the text is the one added here, even if messages contain it


class ChatTemplate:
    """A compiled template with the special tokens it may print. Thread-safe: rendering changes nothing."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], *, max_seconds: float = MAX_SECONDS) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # jinja2's, SyntaxError for a break outside of a loop, RecursionError
            raise _does_not_compile(error) from error
        self._named_tokens = dict(named_tokens)
        self._max_seconds = max_seconds

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Return the prompt. With `continue_final_message` it ends with the last message's content.

        Raises InvalidRequestError if the template rejects the messages, fails, or exceeds the limits.
        """
        if continue_final_message:
            messages = _marked(messages)
        variables = {
            **self._named_tokens,
            **(options or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._render(variables)
        except InvalidRequestError:
            raise
        except jinja2.TemplateError as error:
            raise _refused(f"the model's chat template refuses these messages: {error}") from None
        except MemoryError:
            raise _refused("the model's chat template needs too much memory for these messages") from None
        except Exception as error:  # a template is a program: its errors affect this request only
            raise _refused(f"the model's chat template fails on these messages ({type(error).__name__})") from None
        return _cut_at_mark(text) if continue_final_message else text

    def content_forms(self) -> ContentForms:
        """Return the forms of messages that the template takes, found by rendering conversations of a few words."""
        return detect_content_forms(self._tried)

    def _tried(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        """Return a rendered conversation, or None if the template does not take it."""
        try:
            return self.render(messages, tools=tools)
        except InvalidRequestError:
            return None

    def _render(self, variables: dict[str, Any]) -> str:
        deadline = time.thread_time() + self._max_seconds
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARS:
                raise _refused(f"the rendered conversation is longer than {MAX_CHARS} characters; shorten the messages")
            if time.thread_time() > deadline:
                raise _refused("the conversation takes too long to render; send fewer or shorter messages")
        return "".join(pieces)


def check_template_source(source: str) -> None:
    """Raise ConfigError for a template that is too long or is not valid Jinja. Only parses it.

    Compiling would evaluate constant expressions, such as 'a' * 2000000000.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise ConfigError(
            f"the model's chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read: shorten it"
        )
    environment = _environment()
    try:
        tree = environment.parse(source)
        unknown = [
            f"filter {node.name!r}" for node in tree.find_all(nodes.Filter) if node.name not in environment.filters
        ]
        unknown += [f"test {node.name!r}" for node in tree.find_all(nodes.Test) if node.name not in environment.tests]
    except Exception as error:  # jinja2's, RecursionError, ValueError for a number of too many digits
        raise _does_not_compile(error) from error
    if unknown:
        raise ConfigError(f"the model's chat template does not compile: there is no {unknown[0]}")


def _does_not_compile(error: Exception) -> ConfigError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:300]
    return ConfigError(f"the model's chat template does not compile: {reason}")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a mark after the last content, to find its end in the rendered text."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequestError(
            "continue_final_message needs a last message with a text to continue", param="continue_final_message"
        )
    last = copy.copy(messages[-1])
    last["content"] = content + _MARK
    return [*messages[:-1], last]


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise InvalidRequestError(
            "the model's chat template drops the last message, so it cannot be continued",
            param="continue_final_message",
        )
    # A template that trims contents trimmed after the mark instead: trim here.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


# ---------------------------------------------------------------------------------------- what templates expect to see


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks assistant text for training; renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 requires

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could access interpreter internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may use that name
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set the attribute {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals  # annotated with the types of its defaults only
    names |= {"namespace": _Namespace, "raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON. Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
