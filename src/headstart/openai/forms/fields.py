"""Fields of a body that this server does not build: refused or noted as skipped, by the tables.

Ignoring an unsupported parameter would change the answer unnoticed.
"""

from collections.abc import Container, Mapping
from typing import Any

from headstart.openai.bounds import RequestBounds
from headstart.openai.forms.treatments import TREATMENTS, ApiName, NameKind, NameTreatment
from headstart.openai.value_checks import check_list, raise_unsupported

_LISTED = {api: [row for row in TREATMENTS if (row.api, row.place) == (api, NameKind.FIELD)] for api in ApiName}


def refuse_or_skip_fields(api: ApiName, values: Mapping[str, Any], bounds: RequestBounds) -> None:
    """Note fields that are skipped, unless their value means "off". Raises InvalidRequestError for refused ones."""
    for row in _LISTED[api]:
        if values.get(row.name) in (None, False, [], {}):
            continue
        if row.treatment is NameTreatment.REFUSED:
            raise_unsupported(row.name, row.note)
        if row.treatment is NameTreatment.SKIPPED:
            bounds.note_omitted_from_prompt(NameKind.FIELD, row.name)


_OTHERS = (
    *("audio", "moderation", "documents", "chat_template", "use_beam_search"),
    "prompt_embeds",
    *("bad_words", "allowed_token_ids", "logits_processors", "truncate_prompt_tokens", "kv_transfer_params"),
)
_CALLS = "only chats call functions, with tools and tool_choice; leave it out"
_MAX_ITEMS = {"tools": 128, "functions": 128, "modalities": 16}  # of parameters that are lists
# The accepted values (of a list: of its items; of response_format: of its type), and the reason to refuse all others.
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("tools", "functions"), ((), f"{_CALLS} or send an empty list")),
    **dict.fromkeys(("tool_choice", "function_call"), (("none", "auto"), _CALLS)),
    "modalities": (("text",), 'this server writes text only; send ["text"] or leave it out'),
    "ebnf": (("",), "write it in Lark, as structured_outputs.grammar"),
    "structural_tag": (("", {}), "send tools with strict: true, or structured_outputs"),
    "suffix": (("",), "insertion is not built; leave it out"),
    **dict.fromkeys(_OTHERS, ((False, [], {}), "leave it out")),
}


def refuse_unsupported_params(values: Mapping[str, Any], supported: Container[str] = ()) -> None:
    """Raise InvalidRequestError for an unsupported parameter; values that mean "off" are accepted."""
    for name, value in values.items():
        if value is None or name not in UNSUPPORTED or name in supported:
            continue
        accepted, why = UNSUPPORTED[name]
        chosen = [value]
        if name in _MAX_ITEMS:
            chosen = check_list(name, value, _MAX_ITEMS[name])
        if any(one not in accepted for one in chosen):
            raise_unsupported(name, why)
