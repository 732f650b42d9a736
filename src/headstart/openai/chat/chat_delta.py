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
