"""Events and messages of Anthropic's Messages API, read by the models of the anthropic package."""

import hashlib
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from pydantic import TypeAdapter
from server.chat_deltas import THOUGHT_AND_CALLS, USAGE, chats, deltas_of

from headstart.anthropic.message_events import CacheBreakpointSummary, MessageEventBuilder
from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta
from headstart.openai.text.generation import OutputDelta

EVENT: Any = TypeAdapter(RawMessageStreamEvent)
NO_MARKS = CacheBreakpointSummary()
SIGNATURE = hashlib.sha256(b"Let me see. ").hexdigest()


def streamed(
    deltas: list[OutputDelta], marks: CacheBreakpointSummary = NO_MARKS
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, and the whole message of the same deltas."""
    events, whole = MessageEventBuilder("msg_1", "m", marks), MessageEventBuilder("msg_1", "m", marks)
    found = events.opening_events({**USAGE, "completion_tokens": 1})
    for delta in deltas:
        found += events.add(delta)
        whole.parts.add_delta(delta)
    return found + events.closing_events(USAGE), whole.message(USAGE)


def test_thinking_text_and_two_calls_are_four_blocks() -> None:
    events, whole = streamed(deltas_of(THOUGHT_AND_CALLS))
    for event in events:
        EVENT.validate_python(event, strict=True)
    kinds = [event["type"].removeprefix("content_block_") for event in events]
    block = ["start", "delta", "delta", "stop"]
    thinking = ["start", "delta", "delta", "delta", "stop"]  # the last delta is the signature
    rest = [*block * 2, "start", "delta", "stop", "message_delta", "message_stop"]
    assert kinds == ["message_start", *thinking, *rest]
    assert [event["index"] for event in events if "index" in event] == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 3
    assert events[4]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Let me see. ", "signature": SIGNATURE},
        {"type": "text", "text": "I will look.", "citations": None},
        {"type": "tool_use", "id": "call_a", "name": "find", "input": {"x": 1}},
        {"type": "tool_use", "id": "call_b", "name": "stop", "input": {}},
    ]
    assert Message.model_validate(whole, strict=True).stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("stop", "END", ("stop_sequence", "END")),
    ],
)
def test_the_stop_reason(finish: str, stop: str | None, expected: tuple[str, str | None]) -> None:
    events, whole = streamed(deltas_of([ChatDelta(content="a")], finish, stop))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert events[-2]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}


@pytest.mark.parametrize(
    ("marked", "expected"),
    [(0, (24, 0, 16)), (16, (24, 0, 16)), (32, (8, 16, 16))],
)
def test_the_input_tokens_add_up_and_the_marked_ones_are_created(marked: int, expected: tuple[int, int, int]) -> None:
    _, whole = streamed(deltas_of([]), CacheBreakpointSummary(marked, is_long=True))
    usage = Message.model_validate(whole, strict=True).usage
    found = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
    assert found == expected and sum(expected) == USAGE["prompt_tokens"]
    assert usage.cache_creation is not None
    assert usage.cache_creation.ephemeral_1h_input_tokens == expected[1]
    assert usage.cache_creation.ephemeral_5m_input_tokens == 0


def test_arguments_that_were_cut_are_closed_in_the_whole_message() -> None:
    call = ChatDelta(tool_calls=(ToolCallDelta(0, "call_a", "find", '{"x": [1'),))
    _, whole = streamed(deltas_of([call], "length"))
    assert whole["content"][0]["input"] == {"x": [1]} and whole["stop_reason"] == "max_tokens"


@settings(max_examples=60, deadline=None)
@given(chats())
def test_the_clients_own_accumulator_gives_the_whole_message(made: list[ChatDelta]) -> None:
    events, whole = streamed(deltas_of(made))
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        parsed = EVENT.validate_python(event, strict=True)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    grown = Message.model_validate(snapshot.to_dict(), strict=True)
    assert grown.model_dump() == Message.model_validate(whole, strict=True).model_dump()
