"""ChatDelta: new output of a chat, split into content, reasoning and tool calls."""

from typing import NamedTuple


class ToolCallDelta(NamedTuple):
    """New output of one tool call. Id and name come with its first delta; the pieces of arguments join to JSON."""

    call_index: int  # in the message, from 0
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ChatDelta(NamedTuple):
    """New output of a chat since the previous ChatDelta."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def join_deltas(*deltas: ChatDelta) -> ChatDelta:
    """Return the deltas of one answer as one, with one ToolCallDelta for each call."""
    calls: dict[int, ToolCallDelta] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        known = calls.get(call.call_index)
        arguments = call.arguments if known is None else known.arguments + call.arguments
        calls[call.call_index] = (known or call)._replace(arguments=arguments)
    return ChatDelta(
        "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas), tuple(calls.values())
    )
