"""Events and objects of the Responses API, read by the models of the openai package."""

from typing import Any

import pytest
from hypothesis import given, settings
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server.chat_deltas import THOUGHT_AND_CALLS, USAGE, chats, deltas_of

from headstart.core.request import SamplingParams
from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_delta import ChatDelta
from headstart.openai.responses_api.response_events import ResponseEventBuilder, error_event_data
from headstart.openai.responses_api.response_objects import ResponseTemplate, echoed_request_fields, response_usage
from headstart.openai.responses_api.responses_request import parse_responses
from headstart.openai.text.generation import OutputDelta

EVENT: Any = TypeAdapter(ResponseStreamEvent)
BOUNDS = RequestBounds(vocab_size=100, max_model_len=1000)


def shape() -> ResponseTemplate:
    fields = parse_responses({"input": "Hello", "metadata": {"a": "b"}}, BOUNDS)
    return ResponseTemplate("resp_0123", 1, "m", echoed_request_fields(fields, SamplingParams()))


def streamed(deltas: list[OutputDelta]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, and the whole response of the same deltas."""
    events, whole = ResponseEventBuilder(shape()), ResponseEventBuilder(shape())
    found = events.opening_events()
    for delta in deltas:
        found += events.add(delta)
        whole.parts.add_delta(delta)
    usage = response_usage(USAGE, whole.parts)
    found += events.closing_events_and_response(usage)[0]
    return found, whole.finished_response(usage)


def test_reasoning_text_and_two_calls_are_four_items() -> None:
    events, whole = streamed(deltas_of(THOUGHT_AND_CALLS))
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    item = ["response.output_item.added", "response.content_part.added"]
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress"),
        *item,
        *["response.reasoning_text.delta"] * 2,
        *("response.reasoning_text.done", "response.content_part.done", "response.output_item.done"),
        *item,
        *["response.output_text.delta"] * 2,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 2,
        *("response.function_call_arguments.done", "response.output_item.done"),
        "response.output_item.added",
        "response.function_call_arguments.delta",
        *("response.function_call_arguments.done", "response.output_item.done"),
        "response.completed",
    ]
    response = Response.model_validate(whole, strict=True)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "I will look." and response.status == "completed"
    assert [item["arguments"] for item in whole["output"][2:]] == ['{"x":1}', "{}"]
    assert [item["call_id"] for item in whole["output"][2:]] == ["call_a", "call_b"]
    assert response.usage is not None and response.usage.input_tokens_details.cached_tokens == 16
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.metadata == {"a": "b"}


def test_an_answer_cut_by_max_output_tokens_is_incomplete() -> None:
    events, whole = streamed(deltas_of([ChatDelta(content="abc")], "length"))
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == whole
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert Response.model_validate(whole, strict=True).output_text == "abc"


def test_an_answer_without_text_has_an_empty_message() -> None:
    events, whole = streamed(deltas_of([]))
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]
    assert events[-1]["response"] == whole and events[2]["type"] == "response.output_item.added"


def test_a_failed_response_keeps_its_text_and_says_why() -> None:
    events = ResponseEventBuilder(shape())
    events.opening_events()
    events.add(OutputDelta("ab"))
    (event,) = events.failure_events({"code": "server_error", "message": "no"})
    parsed = EVENT.validate_python(event, strict=True)
    assert parsed.response.status == "failed" and parsed.response.error.message == "no"
    assert parsed.response.output_text == "ab"
    error = {"error": {"message": "no", "code": "internal_error", "param": None, "type": "server_error"}}
    assert EVENT.validate_python(error_event_data(error, 3), strict=True).sequence_number == 3


@settings(max_examples=60, deadline=None)
@given(chats())
def test_the_clients_own_accumulator_gives_the_whole_response(made: list[ChatDelta]) -> None:
    events, whole = streamed(deltas_of(made))
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event, strict=True))
    snapshot = state._ResponseStreamState__current_snapshot
    expected = Response.model_validate(whole, strict=True)
    assert state._completed_response.output_text == expected.output_text
    completed = state._completed_response  # the package adds fields to texts and calls
    assert [(item.type, item.id) for item in completed.output] == [(item.type, item.id) for item in expected.output]
    assert completed.model_dump(exclude={"output"}) == expected.model_dump(exclude={"output"})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    texts = {"message": lambda item: item.content[0].text, "function_call": lambda item: item.arguments}
    grown = [texts[item.type](item) for item in snapshot.output if item.type in texts]
    assert grown == [texts[item.type](item) for item in expected.output if item.type in texts]
    reasoning = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    assert reasoning == "".join(chat.reasoning for chat in made)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_last_event_has_the_whole_response(finish: str) -> None:
    events, whole = streamed(deltas_of(THOUGHT_AND_CALLS, finish))
    assert events[-1]["response"] == whole
