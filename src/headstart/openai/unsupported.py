"""Known but unsupported parameters: refused by name, since ignoring them would change the answer unnoticed."""

from collections.abc import Mapping
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.fields import Fields, shown, unsupported


def refuse_unsupported(fields: Fields) -> None:
    """Raise InvalidRequestError for an unsupported parameter; values that mean "off" are accepted."""
    _refuse_formats(fields)
    for name in ("tools", "functions"):
        if fields.items(name, 128):
            unsupported(name, "function calling is not built; leave it out or send an empty list")
    for name in ("tool_choice", "function_call"):
        if fields.take(name) not in (None, "none", "auto"):
            unsupported(name, "function calling is not built; leave it out")
    modalities = fields.items("modalities", 16)
    if any(modality != "text" for modality in modalities):
        unsupported("modalities", 'this server writes text only; send ["text"] or leave it out')
    if fields.take("suffix") not in (None, ""):
        unsupported("suffix", "insertion is not built; leave it out")
    for name in _UNSUPPORTED:
        if fields.take(name) not in (None, False, [], {}):
            unsupported(name, "leave it out")


_UNSUPPORTED = (
    *("audio", "prediction", "web_search_options", "moderation", "documents", "chat_template", "use_beam_search"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_embeds"),
    *("bad_words", "allowed_token_ids", "logits_processors", "truncate_prompt_tokens", "kv_transfer_params"),
)


def _refuse_formats(fields: Fields) -> None:
    value: Any = fields.take("response_format")
    if value is None or (isinstance(value, Mapping) and value.get("type") == "text"):
        return
    if isinstance(value, Mapping) and value.get("type") in ("json_object", "json_schema"):
        unsupported("response_format", 'structured output is not built; send {"type": "text"} or leave it out')
    raise InvalidRequestError(
        f'response_format is {shown(value)}; it must be an object such as {{"type": "text"}}', param="response_format"
    )
