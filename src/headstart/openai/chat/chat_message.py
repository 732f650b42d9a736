"""The parts of a chat message in a response: content, reasoning and tool calls, whole or as they arrive."""

from typing import Any

from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta


def message_parts(chat: ChatDelta | None) -> dict[str, Any]:
    """Return the parts of a message that differ from plain text; content is null beside calls or reasoning only."""
    if chat is None:
        return {}
    parts = new_parts(chat)
    for call in parts.get("tool_calls", ()):
        del call["index"]
    return {"content": None if chat.tool_calls or chat.reasoning else "", **parts}


def new_parts(chat: ChatDelta) -> dict[str, Any]:
    """Return the new parts of a streamed message; reasoning under both of vLLM's names."""
    parts: dict[str, Any] = {}
    if chat.reasoning:
        parts |= {"reasoning": chat.reasoning, "reasoning_content": chat.reasoning}
    if chat.content:
        parts["content"] = chat.content
    if chat.tool_calls:
        parts["tool_calls"] = [_tool_call(call) for call in chat.tool_calls]
    return parts


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    if not call.call_id:
        return {"index": call.call_index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.call_index, "id": call.call_id, "type": "function", "function": function}
