"""The table of fields, tools, items and parts beyond plain text and functions, by API, and what becomes of each.

The readers of the APIs look types up here, docs/agents.md shows the table, and a test sends one request per row. What
the table does not list: a field is ignored; a tool with a name and a schema is a function, any other is skipped; an
item or block is placed if it has text, else skipped; a part is placed.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class NameTreatment(StrEnum):
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


class NameKind(StrEnum):
    """The place of a name in a request."""

    FIELD = "field"
    TOOL = "tool"
    ITEM = "item"  # of a Responses conversation; a block of a Messages conversation
    PART = "part"  # of a message's content, or of a tool's result


class TreatmentEntry(NamedTuple):
    """The treatment of one name. `note`: how, or the remedy of a refusal."""

    api: ApiName
    place: NameKind
    name: str
    treatment: NameTreatment
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
_CLIENT_SHORTENS = "the client shortens its conversation itself"
_NO_SUMMARY = "summaries are not written on demand; send a message that asks for one"
_SCREENS = "works on screenshots"
_ENCRYPTED = "encrypted for another server, or about one"
_WITHOUT_IDS = "as text, without ids and encrypted content"
_PLACEHOLDER = "as a placeholder"


_ROWS: Mapping[tuple[ApiName, NameKind], Sequence[tuple[NameTreatment, str, str]]] = {  # effect, note, names
    (ApiName.CHAT, NameKind.FIELD): (
        (NameTreatment.IGNORED, _NO_EFFECT, "prediction store metadata service_tier verbosity prompt_cache_retention"),
        (NameTreatment.SKIPPED, _HOSTED, "web_search_options"),
        (NameTreatment.REFUSED, "leave it out", "audio documents"),
    ),
    (ApiName.CHAT, NameKind.TOOL): (
        (NameTreatment.MAPPED, "a function", "function"),
        (NameTreatment.REFUSED, "send a function with one string parameter", "custom"),
        (NameTreatment.SKIPPED, _HOSTED, "web_search web_search_preview mcp"),
    ),
    (ApiName.CHAT, NameKind.PART): ((NameTreatment.PLACED, _PLACEHOLDER, "image_url input_audio video_url file"),),
    (ApiName.RESPONSES, NameKind.FIELD): (
        (
            NameTreatment.IGNORED,
            _NO_EFFECT,
            "service_tier max_tool_calls stream_options client_metadata access_programs include prompt_cache_retention",
        ),
        (NameTreatment.IGNORED, "a conversation that is too long is refused", "truncation"),
        (NameTreatment.SKIPPED, _CLIENT_SHORTENS, "context_management"),
        (NameTreatment.REFUSED, "responses are computed while the request lasts; leave it out", "background"),
        (NameTreatment.REFUSED, "send the items as input, or previous_response_id", "conversation"),
        (NameTreatment.REFUSED, "templates of prompts are not built; send input", "prompt"),
        (NameTreatment.REFUSED, "leave it out", "moderation"),
    ),
    (ApiName.RESPONSES, NameKind.TOOL): (
        (NameTreatment.MAPPED, "a function", "function"),
        (NameTreatment.MAPPED, "as a function with the string `input`; a call is a `custom_tool_call`", "custom"),
        (NameTreatment.MAPPED, "its functions as `namespace__function`; a call has both names apart", "namespace"),
        (
            NameTreatment.MAPPED,
            "as a function of the same name; a call is an item of the tool's own type",
            "local_shell shell apply_patch",
        ),
        (NameTreatment.MAPPED, 'as a function with `execution: "client"`, else skipped', "tool_search"),
        (
            NameTreatment.SKIPPED,
            _HOSTED,
            "web_search web_search_preview file_search code_interpreter image_generation mcp programmatic_tool_calling",
        ),
        (NameTreatment.SKIPPED, _SCREENS, "computer computer_use_preview"),
    ),
    (ApiName.RESPONSES, NameKind.ITEM): (
        (NameTreatment.MAPPED, "a message, a call or a tool message", "message function_call"),
        (
            NameTreatment.MAPPED,
            "a tool message",
            "function_call_output custom_tool_call_output local_shell_call_output shell_call_output "
            "apply_patch_call_output tool_search_output",
        ),
        (
            NameTreatment.MAPPED,
            "a call of the tool's function",
            "custom_tool_call local_shell_call shell_call apply_patch_call tool_search_call",
        ),
        (NameTreatment.MAPPED, "content, else the summary; skipped if only encrypted", "reasoning"),
        (NameTreatment.MAPPED, "the item of a stored response", "item_reference"),
        (
            NameTreatment.PLACED,
            _AS_TEXT,
            "web_search_call file_search_call code_interpreter_call image_generation_call mcp_call mcp_list_tools "
            "mcp_approval_request program program_output computer_call",
        ),
        (NameTreatment.PLACED, "as text of the user", "computer_call_output mcp_approval_response"),
        (NameTreatment.PLACED, "as text of its role", "additional_tools"),
        (NameTreatment.SKIPPED, _ENCRYPTED, "compaction configuration_update"),
        (NameTreatment.REFUSED, _NO_SUMMARY, "compaction_trigger"),
    ),
    (ApiName.RESPONSES, NameKind.PART): ((NameTreatment.PLACED, _PLACEHOLDER, "input_image input_file input_audio"),),
    (ApiName.MESSAGES, NameKind.FIELD): (
        (
            NameTreatment.IGNORED,
            _NO_EFFECT,
            "betas service_tier speed inference_geo fallbacks billing_policy user_profile_id workspace_id "
            "fallback_credit_token",
        ),
        (NameTreatment.MAPPED, "`user_id` as `user`", "metadata"),
        (NameTreatment.SKIPPED, _CLIENT_SHORTENS, "context_management"),
        (NameTreatment.SKIPPED, _HOSTED, "mcp_servers container"),
        (NameTreatment.IGNORED, f"{_NO_STATE}; one that continues another is refused", "thread"),
        (NameTreatment.REFUSED, _NO_SUMMARY, "compaction"),
    ),
    (ApiName.MESSAGES, NameKind.TOOL): (
        (NameTreatment.MAPPED, "a function", "custom"),
        (NameTreatment.MAPPED, "as a function with the vendor's parameters", "bash text_editor memory"),
        (NameTreatment.SKIPPED, _HOSTED, "web_search web_fetch code_execution advisor mcp_toolset"),
        (NameTreatment.SKIPPED, "all tools are in the prompt", "tool_search_tool_bm25 tool_search_tool_regex"),
        (NameTreatment.SKIPPED, _SCREENS, "computer computer_toolset browser_toolset"),
    ),
    (ApiName.MESSAGES, NameKind.ITEM): (
        (NameTreatment.MAPPED, "text, reasoning, a call or a tool message", "text thinking"),
        (NameTreatment.MAPPED, "a call, a tool message", "tool_use tool_result"),
        (
            NameTreatment.PLACED,
            _WITHOUT_IDS,
            "server_tool_use mcp_tool_use mcp_tool_listing web_search_tool_result web_fetch_tool_result "
            "code_execution_tool_result bash_code_execution_tool_result text_editor_code_execution_tool_result "
            "tool_search_tool_result advisor_tool_result mcp_tool_result",
        ),
        (NameTreatment.PLACED, "as text; skipped if only encrypted", "compaction"),
        (NameTreatment.PLACED, "as text", "search_result tool_addition tool_removal"),
        (NameTreatment.PLACED, f"its text; another source {_PLACEHOLDER}", "document"),
        (NameTreatment.SKIPPED, _ENCRYPTED, "redacted_thinking fallback"),
    ),
    (ApiName.MESSAGES, NameKind.PART): (
        (NameTreatment.PLACED, _PLACEHOLDER, "image container_upload"),
        (NameTreatment.PLACED, "as text", "tool_reference browser_state"),
    ),
}
TREATMENTS = tuple(
    TreatmentEntry(api, place, name, effect, note)
    for (api, place), rows in _ROWS.items()
    for effect, note, names in rows
    for name in names.split()
)
"""All rows."""

_BY_NAME = {row[:3]: row for row in TREATMENTS}
_VERSION = re.compile(r"_20\d\d(?:_\d\d_\d\d|\d{4})$")  # web_search_20250305, web_search_2025_08_26


def strip_date_suffix(name: str) -> str:
    """Return a type without the date at its end."""
    return _VERSION.sub("", name)


def find_treatment(api: ApiName, place: NameKind, name: object) -> TreatmentEntry | None:
    """Return the row of a name, with or without its date; None: the table does not list it."""
    if not isinstance(name, str):
        return None
    return _BY_NAME.get((api, place, name)) or _BY_NAME.get((api, place, strip_date_suffix(name)))
