"""The fields of a request about tools and reasoning: `tools`, `tool_choice`, `parallel_tool_calls`, `reasoning_effort`.

`tools` is checked by hand, since its schemas are passed on as they are. Rules between the fields: `make_tool_params`.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import Field

from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.template_forms import UNDESCRIBED_TOOL
from headstart.openai.forms.treatments import ApiName, NameKind, NameTreatment, find_treatment
from headstart.openai.request_model import RequestModel, custom_validator
from headstart.openai.value_checks import (
    check_encodable_text,
    check_list,
    missing_parameter_error,
    raise_invalid_value,
    raise_unsupported,
    safe_repr,
)

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_MODES = ("none", "auto", "required")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `definition` is what the chat template sees."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema
    definition: Mapping[str, Any]
    strict: bool = False
    is_closed: bool = False  # the arguments have no properties but those that the schema lists


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may or must call."""

    mode: str = "auto"  # none, auto, required
    name: str | None = None  # of the only tool, which must be called
    allowed: tuple[str, ...] | None = None  # None: all


@dataclass(frozen=True, slots=True)
class ToolParams:
    """The tools of a request. `callable_tools` are those that its choice allows."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice()
    parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        choice = self.choice
        if choice.mode == "none":
            return ()
        names = (choice.name,) if choice.name is not None else choice.allowed
        return self.tools if names is None else tuple(tool for tool in self.tools if tool.name in names)

    @property
    def is_constrained(self) -> bool:
        """Whether the output of calls must follow a grammar."""
        tools = self.callable_tools
        return bool(tools) and (self.choice.mode == "required" or any(tool.strict for tool in tools))

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools for the chat template."""
        return [dict(tool.definition) for tool in self.tools]


class SentFunction(RequestModel):
    """A function of `tools`."""

    name: str = Field(pattern="^[a-zA-Z0-9_.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; by default no parameters")
    strict: bool | None = Field(None, description="Arguments must match the schema")


class SentTool(RequestModel):
    """An item of `tools`."""

    type: Literal["function"]
    function: SentFunction


class SentToolChoiceFunction(RequestModel):
    """The function of a `tool_choice`."""

    name: str


class SentNamedChoice(RequestModel):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: SentToolChoiceFunction


def _tools(value: object, bounds: RequestBounds) -> tuple[Tool, ...]:
    sent = enumerate(check_list("tools", value, MAX_TOOLS, "tools"))
    tools = tuple(
        _tool(f"tools[{index}]", item, bounds) for index, item in sent if not _is_skipped(index, item, bounds)
    )
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            raise_invalid_value("tools", f"contains {safe_repr(name)} twice", "names must be unique")
    return tools


def _is_skipped(index: int, tool: object, bounds: RequestBounds) -> bool:
    """Return whether a tool is one that this server leaves out, and note it. Raises InvalidRequestError."""
    if not _is_hosted(tool):
        return False
    kind = tool["type"]
    row = find_treatment(ApiName.CHAT, NameKind.TOOL, kind)
    if row is not None and row.treatment is NameTreatment.REFUSED:
        raise_unsupported(f"tools[{index}]", row.note)
    bounds.note_omitted_from_prompt(NameKind.TOOL, kind)
    return True


def _is_hosted(tool: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a tool, or the choice of one, is of a type other than a function."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "function"


def _tool(name: str, value: object, bounds: RequestBounds) -> Tool:
    if not isinstance(value, Mapping):
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be an object with type and function")
    if value.get("type") != "function":
        raise_invalid_value(f"{name}.type", f"is {safe_repr(value.get('type'))}", 'it must be "function"')
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise_invalid_value(f"{name}.function", f"is {safe_repr(function)}", "it must be an object with a name")
    called = function.get("name")
    if not isinstance(called, str) or not _NAME.fullmatch(called):
        problem = f"is {safe_repr(called)}"
        raise_invalid_value(
            f"{name}.function.name", problem, "use 1 to 128 of the characters a-z, A-Z, 0-9, _ . : / and -"
        )
    parameters = _NO_PARAMETERS if function.get("parameters") is None else function["parameters"]
    if not isinstance(parameters, Mapping):
        raise_invalid_value(
            f"{name}.function.parameters", f"is {safe_repr(parameters)}", "it must be a JSON schema of an object"
        )
    if parameters.get("type", "object") != "object":
        raise_invalid_value(
            f"{name}.function.parameters.type", f"is {safe_repr(parameters['type'])}", 'it must be "object"'
        )
    _check_texts(parameters)
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise_invalid_value(f"{name}.function.strict", f"is {safe_repr(strict)}", "it must be true or false")
    definition: dict[str, Any] = {"name": called}
    if function.get("description") is not None:
        if not isinstance(function["description"], str):
            raise_invalid_value(
                f"{name}.function.description", f"is {safe_repr(function['description'])}", "it must be a string"
            )
        definition["description"] = check_encodable_text("tools", function["description"])
    elif not bounds.content_forms().shows_probe(UNDESCRIBED_TOOL):
        definition["description"] = ""
    if function.get("parameters") is not None or not bounds.content_forms().takes_no_parameters:
        definition["parameters"] = dict(parameters)
    if strict is not None:
        definition["strict"] = strict
    return Tool(called, parameters, {"type": "function", "function": definition}, bool(strict), bounds.closes_objects)


def _check_texts(value: object) -> None:
    """Raise InvalidRequestError if a schema contains a lone surrogate or no plain JSON. Its depth is checked before."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise_invalid_value("tools", f"has the key {safe_repr(key)}", "keys must be strings")
            check_encodable_text("tools", key)
            _check_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(item)
    elif isinstance(value, str):
        check_encodable_text("tools", value)
    elif not isinstance(value, bool | int | float | None) or (isinstance(value, float) and value - value != 0):
        raise_invalid_value("tools", f"contains {safe_repr(value)}", "send plain JSON")


def _choice(value: object, _: RequestBounds) -> ToolChoice:
    name = "tool_choice"
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(value)
    if isinstance(value, Mapping) and value.get("type") == "function":
        return ToolChoice("required", name=_function_name(value))
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools")
        allowed = allowed if isinstance(allowed, Mapping) else value
        if allowed.get("mode") not in ("auto", "required"):
            raise_invalid_value(name, f"has the mode {safe_repr(allowed.get('mode'))}", "it must be auto or required")
        tools = check_list(name, allowed.get("tools"), MAX_TOOLS, "tools")
        return ToolChoice(
            allowed["mode"], allowed=tuple(_function_name(tool) for tool in tools if not _is_hosted(tool))
        )
    remedy = 'it must be none, auto, required, or {"type": "function", "function": {"name": "..."}}'
    raise_invalid_value(name, f"is {safe_repr(value)}", remedy)


def _function_name(value: object) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise_invalid_value("tool_choice", f"names {safe_repr(name)}", "each function needs its name")
    return name


Tools = Annotated[tuple[Tool, ...], custom_validator(_tools, Annotated[list[SentTool], Field(max_length=MAX_TOOLS)])]
Choice = Annotated[
    ToolChoice | None, custom_validator(_choice, Literal["none", "auto", "required"] | SentNamedChoice | dict[str, Any])
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def read_reasoning_effort(
    value: object, bounds: RequestBounds, name: str = "effort", known: tuple[str, ...] = get_args(ReasoningEffort)
) -> str | None:
    """Return an effort; None, and `name` is noted as skipped, for one that is newer than this server."""
    if isinstance(value, str) and value in known:
        return value
    bounds.note_omitted_from_prompt(NameKind.FIELD, name)
    return None


Effort = Annotated[
    str | None,
    custom_validator(lambda value, bounds: read_reasoning_effort(value, bounds, "reasoning_effort"), ReasoningEffort),
]


def make_tool_params(tools: tuple[Tool, ...], choice: ToolChoice | None, parallel: bool) -> ToolParams | None:
    """Return the tools of a request, None without any. Raises InvalidRequestError for a choice that cannot be kept."""
    if not tools:
        if choice is not None and choice.mode == "required":
            raise missing_parameter_error("tools")
        return None
    choice = choice or ToolChoice()
    known = {tool.name for tool in tools}
    for name in [choice.name] if choice.name is not None else choice.allowed or ():
        if name not in known:
            raise_invalid_value("tool_choice", f"names {safe_repr(name)}", "no function of tools has that name")
    if choice.allowed == ():
        raise_invalid_value("tool_choice", "allows no tool", "name at least one, or send none")
    return ToolParams(tools, choice, parallel and choice.name is None)  # as in OpenAI's API, one function is one call
