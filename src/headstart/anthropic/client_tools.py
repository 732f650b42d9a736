"""Tools of the Messages API that a client executes although their schemas are the vendor's: shells, editors, memory.

Models that were not trained on these tools need the schema, which requests do not contain. Not here: tools that the
vendor executes, which are skipped.
"""

from collections.abc import Mapping
from typing import Any

from headstart.openai.forms.treatments import ApiName, Place, Treatment, treatment, unversioned
from headstart.openai.responses import Json

_TEXT, _RANGE = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
_EDITS = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": {"type": "integer"}}


def _commands(*names: str) -> Json:
    return {"command": {"type": "string", "enum": list(names)}}


_SCHEMAS: Mapping[str, tuple[str, Json, tuple[str, ...]]] = {  # description, properties, the required ones
    "bash": (
        "Run a command in a bash session on the user's machine that lasts; restart begins a new one.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        (),
    ),
    "text_editor": (
        "View, create and edit files on the user's machine.",
        {
            **_commands("view", "create", "str_replace", "insert"),
            **_EDITS,
            "insert_text": _TEXT,
            "view_range": _RANGE,
        },
        ("command", "path"),
    ),
    "memory": (
        "Read and write files of notes that last between conversations, below /memories.",
        {
            **_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            "insert_text": _TEXT,
            "view_range": _RANGE,
            "old_path": _TEXT,
            "new_path": _TEXT,
        },
        ("command",),
    ),
}


def as_client_tool(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a tool with name and schema; None if it is skipped. One of an unknown type may bring both itself."""
    kind = tool.get("type")
    if kind is None or kind == "custom":
        return tool
    row = treatment(ApiName.MESSAGES, Place.TOOL, kind)
    if row is None:
        return tool if "name" in tool and "input_schema" in tool else None
    if row.treatment is Treatment.SKIPPED:
        return None
    description, properties, required = _SCHEMAS[unversioned(kind)]
    schema = {"type": "object", "properties": properties, "required": list(required)}
    name = tool.get("name", unversioned(kind))
    return {"description": description, **tool, "name": name, "input_schema": schema}
