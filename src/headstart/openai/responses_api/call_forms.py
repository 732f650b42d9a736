"""Tools of the Responses API as functions of a chat, and calls of these functions as the items of their tools.

A client executes the calls of custom tools, shells and patches as it does those of functions; only their items differ.
A function of a namespace is called `namespace__function` in the prompt.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.forms.treatments import ApiName, NameKind, NameTreatment, find_treatment
from headstart.openai.request_json import parse_json_object
from headstart.openai.responses import Json
from headstart.openai.tools.tool_fields import MAX_TOOLS
from headstart.openai.value_checks import check_list, raise_invalid_value, safe_repr

_FUNCTION_KEYS = ("type", "name", "description", "parameters", "strict")
_TEXTS = {"type": "array", "items": {"type": "string"}}
_CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class CallItemForm:
    """The items of one tool's calls. `payload`: the item's field with the arguments."""

    item: str = "function_call"
    payload: str = "arguments"
    added: Mapping[str, Any] = field(default_factory=dict[str, Any])  # to arguments that are an object

    @property
    def is_text_payload(self) -> bool:
        """Whether the payload is a text and not an object."""
        return self.payload == "input" or self.item == "function_call"

    def payload_from_arguments(self, arguments: str) -> Any:
        """Return the payload of an item for the arguments of a call; what is cut short is kept as text only."""
        if self.item == "function_call":
            return arguments
        read = _object(arguments)
        if self.item == "custom_tool_call":
            text = read.get("input")
            return text if isinstance(text, str) else arguments
        return {**self.added, **read}

    def arguments_from_payload(self, payload: object) -> str:
        """Return the arguments of the function's call, from the payload of an item."""
        if self.item == "function_call":
            return payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
        if self.item == "custom_tool_call":
            return json.dumps({"input": payload if isinstance(payload, str) else ""}, ensure_ascii=False)
        kept = dict(payload) if isinstance(payload, Mapping) else {}
        for key, value in self.added.items():
            if kept.get(key) == value:
                del kept[key]
        return json.dumps({key: value for key, value in kept.items() if value is not None}, ensure_ascii=False)


_EXECUTED: Mapping[str, tuple[CallItemForm, str, Mapping[str, Any], tuple[str, ...]]] = {
    # tool: its calls; what the model is told: description, properties, the required ones
    "local_shell": (
        CallItemForm("local_shell_call", "action", {"type": "exec", "env": {}}),
        "Run a program on the user's machine: its path or name, then its arguments.",
        {"command": _TEXTS, "working_directory": {"type": "string"}, "timeout_ms": {"type": "integer"}},
        ("command",),
    ),
    "shell": (
        CallItemForm("shell_call", "action"),
        "Run commands in a shell on the user's machine, and return what they print.",
        {"commands": _TEXTS, "timeout_ms": {"type": "integer"}, "max_output_length": {"type": "integer"}},
        ("commands",),
    ),
    "apply_patch": (
        CallItemForm("apply_patch_call", "operation"),
        "Create, update or delete a file. The diff has the lines of the file, each behind a space, + or -.",
        {
            "type": {"enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {"type": "string"},
        },
        ("type", "path"),
    ),
    "tool_search": (CallItemForm("tool_search_call", "arguments", {}), "Find tools by a description.", {}, ()),
}
CALL_FORMS: Mapping[str, tuple[str, CallItemForm]] = {  # item: the name of its function, "" if the item has it
    "function_call": ("", CallItemForm()),
    "custom_tool_call": ("", CallItemForm("custom_tool_call", "input")),
    **{form.item: (name, form) for name, (form, *_) in _EXECUTED.items()},
}
OUTPUTS = frozenset(  # items with the output of such calls
    (*(f"{name}_output" for name in CALL_FORMS if name != "tool_search_call"), "tool_search_output")
)


@dataclass(frozen=True, slots=True)
class ChatTool:
    """A tool as a function of a chat. `field`: its name in the request."""

    field: str
    function: Json
    form: CallItemForm
    names: Json  # of the item of a call: name and namespace


def read_tools(value: object, bounds: RequestBounds) -> list[Json]:
    """Return the tools with the fields that matter, and note those that are skipped. Raises InvalidRequestError."""
    read: list[Json] = []
    for index, tool in enumerate(check_list("tools", value, MAX_TOOLS, "tools")):
        name = f"tools[{index}]"
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            problem = f"is {safe_repr(tool)}" if not isinstance(tool, Mapping) else "has no type"
            raise_invalid_value(name, problem, "it must be an object with type, name and parameters")
        read.append(_read(name, tool, bounds))
    return read


def _read(name: str, tool: Mapping[str, Any], bounds: RequestBounds) -> Json:
    """Return a tool with the fields that matter; of one that is skipped, its type."""
    kind = tool["type"]
    row = find_treatment(ApiName.RESPONSES, NameKind.TOOL, kind)
    is_function = kind == "function" or (row is None and "parameters" in tool and "name" in tool)
    if not is_function and (row is None or row.treatment is NameTreatment.SKIPPED or _is_hosted(tool)):
        bounds.note_omitted_from_prompt(NameKind.TOOL, kind)
        return {"type": kind}
    if kind not in _EXECUTED and not isinstance(tool.get("name"), str):
        raise_invalid_value(f"{name}.name", f"is {safe_repr(tool.get('name'))}", "it must be a string")
    if kind == "namespace":
        inner = check_list(f"{name}.tools", tool.get("tools"), MAX_TOOLS, "tools")
        for index, item in enumerate(inner):
            if not isinstance(item, Mapping) or item.get("type") not in ("function", "custom"):
                raise_invalid_value(
                    f"{name}.tools[{index}]", f"is {safe_repr(item)}", "it must be a function or a custom tool"
                )
        tools = [_read(f"{name}.tools[{index}]", item, bounds) for index, item in enumerate(inner)]
        description = tool.get("description")
        return {
            "type": kind,
            "name": tool["name"],
            "description": description if isinstance(description, str) else "",
            "tools": tools,
        }
    keys = (*_FUNCTION_KEYS, "format") if kind == "custom" else _FUNCTION_KEYS
    executed = {"execution": "client"} if kind in _EXECUTED else {}
    return {"type": kind, **executed} | {key: tool[key] for key in keys if tool.get(key) is not None}


def is_skipped_tool(tool: object) -> bool:
    """Return whether a tool that a choice allows is one that is skipped here."""
    row = find_treatment(ApiName.RESPONSES, NameKind.TOOL, tool.get("type")) if isinstance(tool, Mapping) else None
    return row is not None and row.treatment is NameTreatment.SKIPPED


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Return whether the vendor executes a tool that clients may execute as well."""
    environment = tool.get("environment")
    if tool["type"] == "shell" and isinstance(environment, Mapping):
        return environment.get("type") != "local"
    return tool["type"] == "tool_search" and tool.get("execution") != "client"


def chat_tools(tools: Iterable[Json]) -> list[ChatTool]:
    """Return the tools, as read, that are functions of a chat."""
    found: list[ChatTool] = []
    for index, tool in enumerate(tools):
        field_name = f"tools[{index}]"
        if tool["type"] == "namespace":
            found += _of_namespace(field_name, tool)
        elif "name" in tool or "execution" in tool:
            found.append(_chat_tool(field_name, tool))
    return found


def _of_namespace(field_name: str, tool: Json) -> list[ChatTool]:
    """Return the functions of a namespace; the first one begins with the description of all."""
    tools = [_chat_tool(f"{field_name}.tools[{at}]", inner, tool["name"]) for at, inner in enumerate(tool["tools"])]
    if tools and tool["description"]:
        own = tools[0].function.get("description")
        if isinstance(own, str | None):
            tools[0].function["description"] = "\n".join(filter(None, (tool["description"], own)))
    return tools


def special_tools_by_function(tools: Iterable[Json]) -> dict[str, ChatTool]:
    """Return the tools whose calls are other items than those of plain functions, by the name of the function."""
    found = {tool.function["name"]: tool for tool in chat_tools(tools)}
    return {
        name: tool for name, tool in found.items() if tool.form.item != "function_call" or "namespace" in tool.names
    }


def _chat_tool(field_name: str, tool: Json, namespace: str | None = None) -> ChatTool:
    kind = tool["type"]
    if kind in _EXECUTED:
        form, description, properties, required = _EXECUTED[kind]
        parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
        given = {key: tool[key] for key in ("description", "parameters") if key in tool}
        function = {"name": kind, "description": description, "parameters": parameters, **given}
        return ChatTool(field_name, function, form, {"execution": "client"} if kind == "tool_search" else {})
    names = {"name": tool["name"]} | ({} if namespace is None else {"namespace": namespace})
    if kind == "custom":
        function = {"name": tool["name"], "description": custom_tool_description(tool), "parameters": _CUSTOM_INPUT}
        form = CALL_FORMS["custom_tool_call"][1]
    else:
        function = {key: value for key, value in tool.items() if key in _FUNCTION_KEYS and key != "type"}
        form = CallItemForm()
    return ChatTool(field_name, {**function, "name": namespaced_function_name(tool["name"], namespace)}, form, names)


def namespaced_function_name(name: str, namespace: object) -> str:
    """Return the name of a function in the prompt."""
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def custom_tool_description(tool: Json) -> str:
    """Return the description with the grammar of the input, which is not enforced."""
    text = tool.get("description")
    format_ = tool.get("format")
    text = text if isinstance(text, str) else ""
    if isinstance(format_, Mapping) and format_.get("type") == "grammar":
        text += f"\nThe input follows this grammar ({format_.get('syntax')}):\n{format_.get('definition')}"
    return text


def _object(text: str) -> Json:
    try:
        value: object = parse_json_object(text.encode()) if text else {}
    except InvalidRequestError:
        return {}
    return dict(value) if isinstance(value, Mapping) else {}
