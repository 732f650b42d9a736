"""Sequences of deltas as the parser of a chat gives them, made by hand or at random."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta
from headstart.openai.text.generation import OutputDelta

USAGE: dict[str, Any] = {
    "prompt_tokens": 40,
    "completion_tokens": 7,
    "total_tokens": 47,
    "prompt_tokens_details": {
        "cached_tokens": 16,
        "cache_write_tokens": 16,
        "pinned_tokens": 0,
        "shared_tokens": 16,
        "store_tokens": 0,
        "followed_tokens": 0,
    },
}
THOUGHT_AND_CALLS = [
    ChatDelta(reasoning="Let me "),
    ChatDelta(reasoning="see. ", content="I will "),
    ChatDelta(content="look."),
    ChatDelta(tool_calls=(ToolCallDelta(0, "call_a", "find"),)),
    ChatDelta(tool_calls=(ToolCallDelta(0, arguments='{"x":'),)),
    ChatDelta(tool_calls=(ToolCallDelta(0, arguments="1}"), ToolCallDelta(1, "call_b", "stop", "{}"))),
]
_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)


def deltas_of(chats: Sequence[ChatDelta], finish_reason: str = "stop", stop: str | None = None) -> list[OutputDelta]:
    """Return a delta of one token per chat delta, and the last one, which ends the answer."""
    made = [OutputDelta(chat.content, (1,), chat=chat) for chat in chats]
    return [*made, OutputDelta(token_ids=(2,), finish_reason=finish_reason, stop_reason=stop, chat=ChatDelta())]


@st.composite
def chats(draw: st.DrawFn) -> list[ChatDelta]:
    """Deltas of reasoning, content and calls in any order; the arguments of each call are a JSON object in pieces."""
    made: list[ChatDelta] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=6)):
        texts = draw(st.lists(_TEXTS, min_size=1, max_size=3))
        if kind == "call":
            made.append(ChatDelta(tool_calls=(ToolCallDelta(num_calls, f"call_{num_calls}", f"f{num_calls}"),)))
            pieces = ['{"a":', str(draw(st.integers(0, 99))), "}"]
            made += [ChatDelta(tool_calls=(ToolCallDelta(num_calls, arguments=piece),)) for piece in pieces]
            num_calls += 1
        elif kind == "reasoning":
            made += [ChatDelta(reasoning=text) for text in texts]
        else:
            made += [ChatDelta(content=text) for text in texts]
    return made
