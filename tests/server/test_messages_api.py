"""/v1/messages, asked by the anthropic package and by hand."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from server.fake_engine import Gate
from server.harness import Server, inside, num_told, parse_events, until

SENTENCE = "By Messages: the quick brown fox jumps over the lazy dog, and the lazy dog does not mind it at all. "
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=real_server.url, api_key="none", max_retries=0) as client:
        yield client


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_a_streamed_message_is_the_whole_message(client: Anthropic) -> None:
    options: Any = {"model": "tiny", "max_tokens": 12, "system": "Be brief.", "messages": HELLO}
    greedy: Any = {"extra_body": {"temperature": 0}}
    whole = client.messages.create(**options, **greedy)
    with client.messages.stream(**options, **greedy) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert whole.stop_reason == "max_tokens" == final.stop_reason and whole.usage.output_tokens == 12
    assert final.content == whole.content or final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert whole._request_id is not None and whole._request_id.startswith("req-")


def test_the_second_request_reads_the_cache(client: Anthropic) -> None:
    system: Any = [{"type": "text", "text": SENTENCE * 4, "cache_control": {"type": "ephemeral"}}]
    options: Any = {"model": "tiny", "max_tokens": 2, "system": system}
    first = client.messages.create(**options, messages=HELLO).usage
    again = client.messages.create(**options, messages=[{"role": "user", "content": "Other words"}]).usage
    total = client.messages.count_tokens(model="tiny", system=system, messages=HELLO).input_tokens
    created = first.cache_creation_input_tokens or 0
    assert created > 0 and created % 16 == 0 and first.cache_read_input_tokens == 0
    assert first.input_tokens + created == total
    assert again.cache_read_input_tokens == created and again.cache_creation_input_tokens == 0


def test_without_breakpoints_nothing_counts_as_created(client: Anthropic) -> None:
    usage = client.messages.create(
        model="tiny", max_tokens=2, messages=[{"role": "user", "content": "No breakpoints! " + SENTENCE * 3}]
    ).usage
    assert usage.cache_creation_input_tokens == 0 and usage.input_tokens > 100


def test_a_schema_bounds_the_text(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"lamp": {"enum": ["on", "off"]}}, "required": ["lamp"]}
    options: Any = {"model": "tiny", "max_tokens": 200, "messages": HELLO}
    shape: Any = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    message = client.messages.create(**options, output_config=shape)
    text: Any = message.content[0]
    assert message.stop_reason == "end_turn" and json.loads(text.text)["lamp"] in ("on", "off")
    for refused in ({"type": "x"}, {"type": "array", "contains": {}}):  # as Anthropic's API does
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format") as caught:
            client.messages.create(**options, output_config={"format": {"type": "json_schema", "schema": refused}})
        assert "strict" not in caught.value.message  # this API has no such field


def test_errors_have_anthropics_form(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="tiny", max_tokens=-1, messages=HELLO)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "max_tokens" and body["request_id"] == caught.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    assert missing.value.type == "not_found_error"


def test_max_tokens_may_exceed_the_context(folder: str) -> None:
    """As in Anthropic's API; clients have large defaults. The fake model has a context of 40 tokens."""

    async def go() -> None:
        async with inside(f"{folder}?length=40") as server:
            prompt = (await server.client.post("/v1/messages/count_tokens", json={"messages": HELLO})).json()
            for max_tokens, reason in (
                (40 - prompt["input_tokens"], "max_tokens"),
                (41 - prompt["input_tokens"], "model_context_window_exceeded"),
                (16_384, "model_context_window_exceeded"),
            ):
                body = {"max_tokens": max_tokens, "messages": HELLO}
                message = (await server.client.post("/v1/messages", json=body)).json()
                assert message["stop_reason"] == reason
                assert message["usage"]["output_tokens"] == 40 - prompt["input_tokens"]
                events = parse_events((await server.client.post("/v1/messages", json={**body, "stream": True})).text)
                assert events[-2]["delta"]["stop_reason"] == reason
            stopped = {"max_tokens": 500, "messages": HELLO, "stop_sequences": ["er"]}
            message = (await server.client.post("/v1/messages", json=stopped)).json()
            assert message["stop_reason"] == "stop_sequence"
            long = {"max_tokens": 1, "messages": [{"role": "user", "content": SENTENCE}]}
            refused = await server.client.post("/v1/messages", json=long)
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"

    run(go())


def test_anthropics_client_lists_models_with_its_own_header(client: Anthropic, folder: str) -> None:
    page = client.models.list()
    assert [model.id for model in page] == ["tiny"] and page.first_id == page.last_id == "tiny"
    model = client.models.retrieve("tiny")
    assert (model.type, model.max_input_tokens, model.created_at.year > 2000) == ("model", 1024, True)

    async def go() -> None:
        async with inside(folder, api_key=("right",)) as server:
            for key, status in (("right", 200), ("wrong", 401)):
                for path in ("/v1/models", "/v1/models/fake"):
                    answer = await server.client.get(path, headers={"x-api-key": key})
                    assert answer.status_code == status
            listed = await server.client.get("/v1/models", headers={"x-api-key": "right"})
            assert listed.json()["object"] == "list"  # without anthropic-version, OpenAI's form

    run(go())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "right", "anthropic-version": "2023-06-01"}, 200),
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "right"}, 401),
    ],
)
def test_a_key_comes_in_either_header(folder: str, headers: dict[str, str], status: int) -> None:
    async def go() -> None:
        async with inside(folder, api_key=("right",)) as server:
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                answer = await server.client.post(path, json={"max_tokens": 1, "messages": HELLO}, headers=headers)
                assert answer.status_code == status, answer.text
                if status == 401:
                    assert answer.json()["error"]["type"] == "authentication_error"
            chat = await server.client.post(
                "/v1/chat/completions", json={"messages": HELLO}, headers={"x-api-key": "right"}
            )
            assert chat.status_code == 401  # OpenAI's routes take OpenAI's header only

    run(go())


def test_a_stop_sequence_ends_the_message(folder: str) -> None:
    async def go() -> None:
        async with inside(folder) as server:
            body = {"max_tokens": 9, "messages": HELLO, "stop_sequences": ["er"]}
            answer = (await server.client.post("/v1/messages", json=body)).json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "er")
            assert answer["content"][0]["text"] == "us"  # the fake engine repeats "<|im_start|>user"

    run(go())


def test_a_failure_in_the_middle_is_an_error_event(folder: str, gate: Gate) -> None:
    async def go() -> None:
        async with inside(gate.holds(folder, 3, "poison=0&after=3")) as server:  # <|im_start|>, the first token, is 0
            body = {"max_tokens": 9, "messages": HELLO, "stream": True}
            asked = asyncio.create_task(server.client.post("/v1/messages", json=body))
            await until(lambda: num_told(server) == 3)
            gate.open()
            answer = await asked
            assert "event: error\n" in answer.text and "[DONE]" not in answer.text
            last = parse_events(answer.text)[-1]
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
            assert last["request_id"] == answer.headers["request-id"]

    run(go())


def test_unknown_fields_are_ignored(folder: str) -> None:
    async def go() -> None:
        async with inside(folder) as server:
            body = {"max_tokens": 2, "messages": HELLO, "speed": "fast", "inference_geo": "x", "newer": {"a": 1}}
            answer = await server.client.post("/v1/messages", json=body, headers={"anthropic-beta": "x-2026"})
            assert answer.status_code == 200, answer.text

    run(go())
