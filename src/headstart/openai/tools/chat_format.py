"""ChatFormat: the formats in which a model writes tool calls and reasoning, chosen by options or by its chat template.

A template is searched for the markers of a family; nothing else is known about a model. ChatOutputFormat is what one
answer is parsed with.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.parsers.call_writer import ToolCallRules
from headstart.openai.tools.parsers.chat_parser import THINK_MARKERS, ChatParser, ReadCalls
from headstart.openai.tools.parsers.tool_formats import (
    HERMES_MARKERS,
    LLAMA3_MARKERS,
    MISTRAL_MARKERS,
    PYTHONIC_MARKERS,
    read_hermes_calls,
    read_llama3_json_calls,
    read_mistral_calls,
    read_pythonic_calls,
)
from headstart.openai.tools.parsers.xml_calls import (
    CALL_MARKERS,
    GLM45_FORM,
    QWEN3_CODER_FORM,
    read_glm45_calls,
    read_qwen3_coder_calls,
)
from headstart.openai.tools.tool_fields import ToolParams

_TOOLS_VARIABLE = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
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


TOOL_FAMILIES: Mapping[str, ToolCallFormat] = {
    family.name: family
    for family in (
        ToolCallFormat("hermes", read_hermes_calls, HERMES_MARKERS, _call_id),
        ToolCallFormat("llama3_json", read_llama3_json_calls, LLAMA3_MARKERS, _call_id),
        ToolCallFormat("mistral", read_mistral_calls, MISTRAL_MARKERS, _short_call_id),
        ToolCallFormat("pythonic", read_pythonic_calls, PYTHONIC_MARKERS, _call_id),
        ToolCallFormat("qwen3_coder", read_qwen3_coder_calls, (*CALL_MARKERS, *QWEN3_CODER_FORM.ends), _call_id),
        ToolCallFormat("glm45", read_glm45_calls, (*CALL_MARKERS, *GLM45_FORM.key, *GLM45_FORM.value), _call_id),
    )
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of one model."""

    family: ToolCallFormat | None = None  # None: tool calls are not recognized
    is_chosen: bool = False  # the family is set by an option
    reasoning: str | None = None  # qwen3 or deepseek_r1, as in vLLM
    shows_tools: bool = False  # the template shows tools to the model
    template: str = ""


def find_chat_format(template: str | None, tool_parser: str, reasoning_parser: str) -> ChatFormat:
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
    if HERMES_MARKERS[0] in template:  # some families write XML between these markers
        if GLM45_FORM.key[0] in template:
            return "glm45"
        if QWEN3_CODER_FORM.name[0] in template:
            return "qwen3_coder" if QWEN3_CODER_FORM.key[0] in template else None
        return "hermes"
    if PYTHONIC_MARKERS[0] in template or "func_name1(params_name1" in template:
        return "pythonic"
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return "llama3_json"
    return None


@dataclass(frozen=True, slots=True)
class ChatOutputFormat:
    """The formats of one answer: its parsers, and the special tokens that they need."""

    family: ToolCallFormat | None = None  # None: no tool may be called, or calls are not recognized
    rules: ToolCallRules | None = None  # with a family
    is_named: bool = False  # one function must be called: OpenAI's finish reason is "stop" then
    is_reasoning: bool = False
    is_open: bool = False  # the prompt ends inside the reasoning
    special: Mapping[int, str] | None = None  # markers that are special tokens: kept in the text for the parsers

    def make_parser(self) -> ChatParser:
        """Return a parser for one choice."""
        read_calls = None if self.family is None else self.family.read_calls
        return ChatParser(read_calls, self.rules, is_reasoning=self.is_reasoning, is_open=self.is_open)


def make_chat_output_format(
    form: ChatFormat, tools: ToolParams | None, ends_open: bool | None, tokenizer: Tokenizer, skips_special: bool
) -> ChatOutputFormat | None:
    """Return the output of an answer, None if all of it is content. `ends_open`: from `is_reasoning_open_at_end`."""
    family = form.family if tools is not None and tools.choice.mode != "none" else None
    reasons = form.reasoning is not None
    if family is None and not reasons:
        return None
    markers = (*(family.markers if family else ()), *(THINK_MARKERS if reasons else ()))
    ids = {token_id: text for text in markers if (token_id := tokenizer.backend.token_to_id(text)) is not None}
    special = {token_id: text for token_id, text in ids.items() if token_id in tokenizer.vocabulary.special_ids}
    rules = None
    if family is not None and tools is not None:
        parameters = {tool.name: tool.parameters for tool in tools.callable_tools}
        rules = ToolCallRules(
            frozenset(parameters),
            family.new_id,
            special=tuple(special.values()) if skips_special else (),
            first_only=not tools.parallel,
            parameters=parameters,
            is_forced=tools.choice.mode == "required",
            needs_marker=tools.is_constrained,
        )
    return ChatOutputFormat(
        family=family,
        rules=rules,
        is_named=tools is not None and tools.choice.name is not None,
        is_reasoning=reasons,
        is_open=reasons and (form.reasoning == "deepseek_r1" if ends_open is None else ends_open),
        special=special if skips_special else None,
    )


def is_reasoning_open_at_end(prompt: str) -> bool | None:
    """Return True if the prompt ends with <think>, False if it ends with </think>, None if with neither."""
    end = prompt.rstrip()
    if end.endswith(THINK_MARKERS[0]):
        return True
    return False if end.endswith(THINK_MARKERS[1]) else None
