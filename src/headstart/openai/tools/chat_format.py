"""ChatFormat: the formats in which a model writes tool calls and reasoning, chosen by options or by its chat template.

A template is searched for the markers of a family; nothing else is known about a model. ChatOutput is what one answer
is parsed with.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.parsers.call_writer import CallRules
from headstart.openai.tools.parsers.chat_parser import ChatParser, ParserSetup, ReadCalls
from headstart.openai.tools.parsers.reasoning_reader import THINK_MARKERS
from headstart.openai.tools.parsers.tool_formats import (
    HERMES_MARKERS,
    LLAMA3_MARKERS,
    MISTRAL_MARKERS,
    PYTHONIC_MARKERS,
    read_hermes,
    read_llama3_json,
    read_mistral,
    read_pythonic,
)
from headstart.openai.tools.tool_fields import ToolParams

_TOOLS_VARIABLE = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """A format of tool calls."""

    name: str
    read_calls: ReadCalls
    markers: tuple[str, ...]
    new_id: Callable[[], str]


def _call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def _short_call_id() -> str:
    """Return nine letters and digits, which Mistral's templates require."""
    return uuid4().hex[:9]


TOOL_FAMILIES: Mapping[str, ToolFamily] = {
    family.name: family
    for family in (
        ToolFamily("hermes", read_hermes, HERMES_MARKERS, _call_id),
        ToolFamily("llama3_json", read_llama3_json, LLAMA3_MARKERS, _call_id),
        ToolFamily("mistral", read_mistral, MISTRAL_MARKERS, _short_call_id),
        ToolFamily("pythonic", read_pythonic, PYTHONIC_MARKERS, _call_id),
    )
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of one model."""

    family: ToolFamily | None = None  # None: tool calls are not recognized
    is_chosen: bool = False  # the family is set by an option
    reasoning: str | None = None  # qwen3 or deepseek_r1, as in vLLM
    shows_tools: bool = False  # the template shows tools to the model
    template: str = ""


def chat_format(template: str | None, tool_parser: str, reasoning_parser: str) -> ChatFormat:
    """Return the formats by the options: the name of a parser, auto or none."""
    template = template or ""
    name = _detected_family(template) if tool_parser == "auto" else tool_parser
    reasoning: str | None = reasoning_parser
    if reasoning_parser == "auto":
        reasoning = "qwen3" if THINK_MARKERS[0] in template else None
    return ChatFormat(
        family=TOOL_FAMILIES.get(name or "none"),
        is_chosen=tool_parser in TOOL_FAMILIES,
        reasoning=None if reasoning == "none" else reasoning,
        shows_tools=_TOOLS_VARIABLE.search(template) is not None,
        template=template,
    )


def _detected_family(template: str) -> str | None:
    if not _TOOLS_VARIABLE.search(template):
        return None
    if MISTRAL_MARKERS[0] in template:
        return "mistral"
    if HERMES_MARKERS[0] in template:  # other families write XML between these markers
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if PYTHONIC_MARKERS[0] in template or "func_name1(params_name1" in template:
        return "pythonic"
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return "llama3_json"
    return None


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The formats of one answer: its parsers, and the special tokens that they need."""

    family: ToolFamily | None = None  # None: no tool may be called, or calls are not recognized
    tool_names: frozenset[str] = frozenset()
    first_only: bool = False
    is_forced: bool = False  # a call is required
    is_named: bool = False  # one function must be called: OpenAI's finish reason is "stop" then
    is_reasoning: bool = False
    is_open: bool = False  # the prompt ends inside the reasoning
    special: Mapping[int, str] | None = None  # markers that are special tokens: kept in the text for the parsers

    def parser(self) -> ChatParser:
        """Return a parser for one choice."""
        rules = None
        if self.family is not None:
            special = tuple((self.special or {}).values())
            rules = CallRules(self.tool_names, self.family.new_id, special, self.first_only, self.is_forced)
        read_calls = None if self.family is None else self.family.read_calls
        return ChatParser(ParserSetup(read_calls, rules, self.is_reasoning, self.is_open))


def chat_output(
    form: ChatFormat, tools: ToolParams | None, ends_open: bool | None, tokenizer: Tokenizer, skips_special: bool
) -> ChatOutput | None:
    """Return the output of an answer, None if all of it is content. `ends_open`: from `reasoning_at_end`."""
    family = form.family if tools is not None and tools.choice.mode != "none" else None
    if family is None and form.reasoning is None:
        return None
    markers = (*(family.markers if family else ()), *(THINK_MARKERS if form.reasoning else ()))
    ids = {token_id: text for text in markers if (token_id := tokenizer.backend.token_to_id(text)) is not None}
    special = {token_id: text for token_id, text in ids.items() if token_id in tokenizer.vocabulary.special_ids}
    return ChatOutput(
        family=family,
        tool_names=frozenset(tool.name for tool in tools.callable_tools) if tools else frozenset(),
        first_only=tools is not None and not tools.parallel,
        is_forced=tools is not None and tools.choice.mode == "required",
        is_named=tools is not None and tools.choice.name is not None,
        is_reasoning=form.reasoning is not None,
        is_open=form.reasoning is not None and (form.reasoning == "deepseek_r1" if ends_open is None else ends_open),
        special=special if skips_special else None,
    )


def reasoning_at_end(prompt: str) -> bool | None:
    """Return True if the prompt ends with <think>, False if it ends with </think>, None if with neither."""
    end = prompt.rstrip()
    if end.endswith(THINK_MARKERS[0]):
        return True
    return False if end.endswith(THINK_MARKERS[1]) else None
