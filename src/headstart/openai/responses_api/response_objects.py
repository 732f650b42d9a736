"""Objects of the Responses API as plain dicts: the response, its output items, its usage. Only shapes, no decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.openai.chat.chat_parts import ChatOutputPart, ChatOutputPartKind, ChatOutputParts
from headstart.openai.responses import CACHE_SOURCES, Json
from headstart.openai.responses_api.call_forms import CallItemForm, ChatTool

_PREFIXES = {
    ChatOutputPartKind.CONTENT: "msg_",
    ChatOutputPartKind.REASONING: "rs_",
    ChatOutputPartKind.TOOL_CALL: "fc_",
}
_INPUT_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
PART_TYPES = {ChatOutputPartKind.CONTENT: "output_text", ChatOutputPartKind.REASONING: "reasoning_text"}


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The parts of a response object that do not change while it is computed. `echo`: fields of the request.

    `tools`: by the name of their functions, those whose calls are other items than calls of plain functions.
    """

    response_id: str
    created_at: int  # seconds since 1970
    model: str
    echo: Json
    tools: Mapping[str, ChatTool] = field(default_factory=dict[str, ChatTool])

    def output_item_id(self, part: ChatOutputPart) -> str:
        """Return the id of the output item of a part: unique, since the response's id is."""
        return f"{_PREFIXES[part.kind]}{self.response_id.rpartition('_')[2]}{part.index:02x}"

    def item(self, part: ChatOutputPart, status: str, *, is_empty: bool = False) -> Json:
        """Return the output item of a part; `is_empty`: as it is before any text."""
        item: Json = {"id": self.output_item_id(part)}
        text = "" if is_empty else part.text
        if part.kind is ChatOutputPartKind.TOOL_CALL:
            assert part.call is not None
            tool = self.tools.get(part.call.name)
            form, names = (CallItemForm(), {"name": part.call.name}) if tool is None else (tool.form, tool.names)
            call = {"call_id": part.call.call_id, **names, form.payload: form.payload_from_arguments(text)}
            return {**item, "type": form.item, "status": status, **call}
        content = [] if is_empty else [content_part(part.kind, text)]
        if part.kind is ChatOutputPartKind.REASONING:
            return {**item, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {**item, "type": "message", "status": status, "role": "assistant", "content": content}

    def call_item_form(self, part: ChatOutputPart) -> CallItemForm:
        """Return the form of a call."""
        assert part.call is not None
        tool = self.tools.get(part.call.name)
        return CallItemForm() if tool is None else tool.form

    def response(
        self, status: str, output: list[Json], usage: Json | None = None, error: Json | None = None, reason: str = ""
    ) -> Json:
        """Return the response object; `reason` why it is incomplete. The usage is last, where routers look for it."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": self.model,
            "output": output,
            **self.echo,
            "usage": usage,
        }


def content_part(kind: ChatOutputPartKind, text: str) -> Json:
    """Return the content part of a message or of reasoning."""
    part: Json = {"type": PART_TYPES[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind is ChatOutputPartKind.CONTENT else part


def response_usage(usage: Json, parts: ChatOutputParts) -> Json:
    """Return the usage of a response from that of a chat."""
    details = usage["prompt_tokens_details"]
    cached = {f"{source}_tokens": details[f"{source}_tokens"] for source in CACHE_SOURCES}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": details["cache_write_tokens"],
            **cached,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": parts.num_reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


def listed_input_item(item: Json, response_id: str, index: int) -> Json:
    """Return an item of the input as `/v1/responses/{id}/input_items` lists it: with id and status."""
    prefix = _INPUT_PREFIXES.get(item["type"], "item_")
    shaped: Json = {"id": f"{prefix}{response_id.rpartition('_')[2]}i{index:02x}", "status": "completed", **item}
    if item["type"] == "message" and item["role"] == "assistant":
        shaped["content"] = [{"annotations": [], **part} for part in item["content"]]
    return shaped


def item_list_response(items: list[Json], *, has_more: bool) -> Json:
    """Return a list of items; all of them have ids."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}


def deletion_response(response_id: str) -> Json:
    """Return the answer to a deletion."""
    return {"id": response_id, "object": "response", "deleted": True}


def echoed_request_fields(fields: Any, sampling: Any) -> Json:
    """Return the fields of a response that repeat its request; `sampling`: the parameters in force."""
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": None,
        "metadata": fields.metadata,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_diagnostics": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "prompt_cache_options": _cache_options(fields.prompt_cache_options),
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store,
        "temperature": sampling.temperature,
        "text": {"format": fields.text.format or {"type": "text"}},
        "tool_choice": fields.tool_choice,
        "tools": [
            {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool
            for tool in fields.tools
        ],
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }


def _cache_options(sent: Any) -> Json:
    """Return the options of the prompt cache in force; OpenAI's types have the lifetimes 30m and 12h only."""
    minutes, seconds = divmod(sent.ttl or 1800.0, 60)
    ttl = f"{minutes * 60 + seconds:g}s" if seconds else "12h" if minutes == 720 else f"{minutes:g}m"
    mode = sent.mode or "implicit"
    return {"mode": mode, "ttl": ttl, "comparison_response_id": sent.comparison_response_id}
