"""The table of fields, tools, items and parts beyond plain text and functions, by API, and what becomes of each.

The readers of the APIs look types up here, docs/agents.md shows the table, and a test sends one request per row. What
the table does not list: a field is ignored; a tool with a name and a schema is a function, any other is skipped; an
item or block is placed if it has text, else skipped; a part is placed.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Treatment(StrEnum):
    """The effect of a field, tool, item or part on the request."""

    IGNORED = "ignored"  # changes no answer of this server
    MAPPED = "mapped"  # means the same as text, a message or a function
    PLACED = "placed"  # its text, or a placeholder with its type, is in the prompt
    SKIPPED = "skipped"  # left out, named in SKIPPED_HEADER and counted in the metrics
    REFUSED = "refused"  # 400 with field and remedy


class ApiName(StrEnum):
    """An API by its path."""

    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


class Place(StrEnum):
    """The place of a name in a request."""

    FIELD = "field"
    TOOL = "tool"
    ITEM = "item"  # of a Responses conversation; a block of a Messages conversation
    PART = "part"  # of a message's content, or of a tool's result


class TreatedName(NamedTuple):
    """The treatment of one name. `note`: how, or the remedy of a refusal."""

    api: ApiName
    place: Place
    name: str
    treatment: Treatment
    note: str


IMAGE, AUDIO, VIDEO, FILE = "image", "audio", "video", "file"
UNREADABLE = {  # parts that this server cannot read, by type; they are named so in placeholders
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), IMAGE),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), AUDIO),
    **dict.fromkeys(("video", "video_url", "input_video"), VIDEO),
    **dict.fromkeys(("file", "input_file", "container_upload"), FILE),
}
_HOSTED = "runs on the vendor's servers"
_NO_STATE = "no state of the vendor's servers is here"
_NO_EFFECT = "no effect on the answer"
_AS_TEXT = "as text of the assistant, without ids and encrypted content"
_PLACEHOLDER = "as a placeholder"


def _rows(api: ApiName, place: Place, treatment: Treatment, note: str, *names: str) -> Iterator[TreatedName]:
    yield from (TreatedName(api, place, name, treatment, note) for name in names)


def _chat() -> Iterator[TreatedName]:
    api = ApiName.CHAT
    ignored = ("prediction", "store", "metadata", "service_tier", "verbosity", "prompt_cache_retention")
    yield from _rows(api, Place.FIELD, Treatment.IGNORED, _NO_EFFECT, *ignored)
    yield from _rows(api, Place.FIELD, Treatment.SKIPPED, _HOSTED, "web_search_options")
    yield from _rows(api, Place.FIELD, Treatment.REFUSED, "leave it out", "audio", "documents")
    yield from _rows(api, Place.TOOL, Treatment.MAPPED, "a function", "function")
    yield from _rows(api, Place.TOOL, Treatment.REFUSED, "send a function with one string parameter", "custom")
    yield from _rows(api, Place.TOOL, Treatment.SKIPPED, _HOSTED, "web_search", "web_search_preview", "mcp")
    yield from _rows(api, Place.PART, Treatment.PLACED, _PLACEHOLDER, "image_url", "input_audio", "video_url", "file")


def _responses() -> Iterator[TreatedName]:
    api, field, tool, item = ApiName.RESPONSES, Place.FIELD, Place.TOOL, Place.ITEM
    ignored = ("service_tier", "max_tool_calls", "stream_options", "client_metadata", "access_programs", "include")
    yield from _rows(api, field, Treatment.IGNORED, _NO_EFFECT, *ignored, "prompt_cache_retention")
    yield from _rows(api, field, Treatment.IGNORED, "a conversation that is too long is refused", "truncation")
    yield from _rows(api, field, Treatment.SKIPPED, "the client shortens its conversation itself", "context_management")
    yield from _rows(
        api, field, Treatment.REFUSED, "responses are computed while the request lasts; leave it out", "background"
    )
    yield from _rows(api, field, Treatment.REFUSED, "send the items as input, or previous_response_id", "conversation")
    yield from _rows(api, field, Treatment.REFUSED, "templates of prompts are not built; send input", "prompt")
    yield from _rows(api, field, Treatment.REFUSED, "leave it out", "moderation")

    yield from _rows(api, tool, Treatment.MAPPED, "a function", "function")
    yield from _rows(
        api, tool, Treatment.MAPPED, "as a function with the string `input`; a call is a `custom_tool_call`", "custom"
    )
    yield from _rows(
        api,
        tool,
        Treatment.MAPPED,
        "its functions as `namespace__function`; a call has both names apart",
        "namespace",
    )
    yield from _rows(
        api,
        tool,
        Treatment.MAPPED,
        "as a function of the same name; a call is an item of the tool's own type",
        *("local_shell", "shell", "apply_patch"),
    )
    yield from _rows(
        api, tool, Treatment.MAPPED, 'as a function with `execution: "client"`, else skipped', "tool_search"
    )
    hosted = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp")
    yield from _rows(api, tool, Treatment.SKIPPED, _HOSTED, *hosted, "programmatic_tool_calling")
    yield from _rows(
        api,
        tool,
        Treatment.SKIPPED,
        "works on screenshots",
        "computer",
        "computer_use_preview",
    )

    yield from _rows(api, item, Treatment.MAPPED, "a message, a call or a tool message", "message", "function_call")
    yield from _rows(api, item, Treatment.MAPPED, "a tool message", "function_call_output", "custom_tool_call_output")
    yield from _rows(api, item, Treatment.MAPPED, "a tool message", "local_shell_call_output", "shell_call_output")
    yield from _rows(api, item, Treatment.MAPPED, "a tool message", "apply_patch_call_output", "tool_search_output")
    calls = ("custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call", "tool_search_call")
    yield from _rows(api, item, Treatment.MAPPED, "a call of the tool's function", *calls)
    yield from _rows(api, item, Treatment.MAPPED, "content, else the summary; skipped if only encrypted", "reasoning")
    yield from _rows(api, item, Treatment.MAPPED, "the item of a stored response", "item_reference")
    placed = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call")
    yield from _rows(api, item, Treatment.PLACED, _AS_TEXT, *placed, "mcp_list_tools", "mcp_approval_request")
    yield from _rows(api, item, Treatment.PLACED, _AS_TEXT, "program", "program_output", "computer_call")
    yield from _rows(
        api, item, Treatment.PLACED, "as text of the user", "computer_call_output", "mcp_approval_response"
    )
    yield from _rows(api, item, Treatment.PLACED, "as text of its role", "additional_tools")
    yield from _rows(
        api, item, Treatment.SKIPPED, "encrypted for another server, or about one", "compaction", "configuration_update"
    )
    yield from _rows(
        api,
        item,
        Treatment.REFUSED,
        "summaries are not written on demand; send a message that asks for one",
        "compaction_trigger",
    )
    yield from _rows(api, Place.PART, Treatment.PLACED, _PLACEHOLDER, "input_image", "input_file", "input_audio")


def _messages() -> Iterator[TreatedName]:
    api, field, tool, item = ApiName.MESSAGES, Place.FIELD, Place.TOOL, Place.ITEM
    ignored = ("betas", "service_tier", "speed", "inference_geo", "fallbacks", "billing_policy", "user_profile_id")
    yield from _rows(api, field, Treatment.IGNORED, _NO_EFFECT, *ignored, "workspace_id", "fallback_credit_token")
    yield from _rows(api, field, Treatment.MAPPED, "`user_id` as `user`", "metadata")
    yield from _rows(api, field, Treatment.SKIPPED, "the client shortens its conversation itself", "context_management")
    yield from _rows(api, field, Treatment.SKIPPED, _HOSTED, "mcp_servers", "container")
    yield from _rows(api, field, Treatment.IGNORED, f"{_NO_STATE}; one that continues another is refused", "thread")
    yield from _rows(
        api,
        field,
        Treatment.REFUSED,
        "summaries are not written on demand; send a message that asks for one",
        "compaction",
    )

    yield from _rows(api, tool, Treatment.MAPPED, "a function", "custom")
    yield from _rows(
        api, tool, Treatment.MAPPED, "as a function with the vendor's parameters", "bash", "text_editor", "memory"
    )
    hosted = ("web_search", "web_fetch", "code_execution", "advisor", "mcp_toolset")
    yield from _rows(api, tool, Treatment.SKIPPED, _HOSTED, *hosted)
    yield from _rows(
        api, tool, Treatment.SKIPPED, "all tools are in the prompt", "tool_search_tool_bm25", "tool_search_tool_regex"
    )
    screens = ("computer", "computer_toolset", "browser_toolset")
    yield from _rows(api, tool, Treatment.SKIPPED, "works on screenshots", *screens)

    yield from _rows(api, item, Treatment.MAPPED, "text, reasoning, a call or a tool message", "text", "thinking")
    yield from _rows(api, item, Treatment.MAPPED, "a call, a tool message", "tool_use", "tool_result")
    calls = ("server_tool_use", "mcp_tool_use", "mcp_tool_listing")
    results = ("web_search", "web_fetch", "code_execution", "bash_code_execution", "text_editor_code_execution")
    yield from _rows(api, item, Treatment.PLACED, "as text, without ids and encrypted content", *calls)
    yield from _rows(
        api,
        item,
        Treatment.PLACED,
        "as text, without ids and encrypted content",
        *(f"{name}_tool_result" for name in (*results, "tool_search", "advisor", "mcp")),
    )
    yield from _rows(api, item, Treatment.PLACED, "as text; skipped if only encrypted", "compaction")
    yield from _rows(api, item, Treatment.PLACED, "as text", "search_result", "tool_addition", "tool_removal")
    yield from _rows(api, item, Treatment.PLACED, f"its text; another source {_PLACEHOLDER}", "document")
    yield from _rows(
        api, item, Treatment.SKIPPED, "encrypted for another server, or about one", "redacted_thinking", "fallback"
    )
    yield from _rows(api, Place.PART, Treatment.PLACED, _PLACEHOLDER, "image", "container_upload")
    yield from _rows(api, Place.PART, Treatment.PLACED, "as text", "tool_reference", "browser_state")


TREATMENTS = (*_chat(), *_responses(), *_messages())
"""All rows."""

_BY_NAME = {row[:3]: row for row in TREATMENTS}
_VERSION = re.compile(r"_20\d\d(?:_\d\d_\d\d|\d{4})$")  # web_search_20250305, web_search_2025_08_26


def unversioned(name: str) -> str:
    """Return a type without the date at its end."""
    return _VERSION.sub("", name)


def treatment(api: ApiName, place: Place, name: object) -> TreatedName | None:
    """Return the row of a name, with or without its date; None: the table does not list it."""
    if not isinstance(name, str):
        return None
    return _BY_NAME.get((api, place, name)) or _BY_NAME.get((api, place, unversioned(name)))
