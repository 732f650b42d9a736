"""/v1/responses, asked by the openai package and by hand."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from server.fake_engine import Gate
from server.harness import Server, fake_server, inside, num_told, parse_events, until, wait_for

SENTENCE = "By Responses: the quick brown fox jumps over the lazy dog, and the lazy dog does not mind it at all. "


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_a_stream_ends_with_what_a_whole_response_has(client: OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "input": SENTENCE,
        "instructions": "By Responses: be brief.",
        "max_output_tokens": 12,
    }
    whole = client.responses.create(**options, temperature=0)
    assert whole.status == "incomplete" and whole.output_text and whole.usage is not None
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 12 and whole.temperature == 0
    text, numbers, last = "", [], None
    for event in client.responses.create(**options, temperature=0, stream=True):
        numbers.append(event.sequence_number)
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert last is not None and last.type == "response.incomplete"
    assert text == whole.output_text == last.response.output_text and numbers == list(range(len(numbers)))
    usage = last.response.usage
    assert usage is not None and usage.input_tokens == whole.usage.input_tokens
    assert usage.input_tokens_details.cached_tokens == (usage.input_tokens - 1) // 16 * 16 > 0
    assert whole.usage.input_tokens_details.cached_tokens == 0
    assert whole.usage.input_tokens_details.cache_write_tokens == whole.usage.input_tokens // 16 * 16


def test_a_continued_response_computes_only_what_is_new(client: OpenAI) -> None:
    first = client.responses.create(model="tiny", input=SENTENCE * 3, max_output_tokens=4, temperature=0)
    options: Any = {"model": "tiny", "max_output_tokens": 4, "temperature": 0}
    second = client.responses.create(**options, input="And then?", previous_response_id=first.id)
    said = {"role": "assistant", "content": first.output_text}
    items: Any = [{"role": "user", "content": SENTENCE * 3}, said, {"role": "user", "content": "And then?"}]
    whole = client.responses.create(**options, input=items)
    assert second.usage is not None and whole.usage is not None and first.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens and second.output_text == whole.output_text
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16
    assert second.previous_response_id == first.id


def test_the_stream_helper_of_the_client_gives_the_response(client: OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Hello", max_output_tokens=3, temperature=0) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert last.type in ("response.completed", "response.incomplete") and last.response.output_text == text
    whole = client.responses.create(model="tiny", input="Hello", max_output_tokens=3, temperature=0)
    assert (whole.output_text, f"response.{whole.status}") == (text, last.type)


def test_a_stored_response_is_found_listed_and_deleted(client: OpenAI) -> None:
    made = client.responses.create(model="tiny", input="Hello", max_output_tokens=2, metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict() and found.metadata == {"a": "b"}
    items = client.responses.input_items.list(made.id)
    assert [(item.type, item.content[0].text) for item in items.data] == [("message", "Hello")]  # type: ignore[union-attr]
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.create(model="tiny", input="x", previous_response_id=made.id)


def test_a_response_that_is_not_stored_is_not_found(client: OpenAI) -> None:
    made = client.responses.create(model="tiny", input="Hello", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_errors_name_the_field_of_this_api(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x", max_output_tokens=100_000)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input=SENTENCE * 200)
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"lamp": {"enum": ["on", "off"]}},
    "required": ["lamp"],
    "additionalProperties": False,
}


def test_a_schema_bounds_the_text(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "input": "Switch it on", "max_output_tokens": 200, "extra_body": {"seed": 3}}
    shape: Any = {"format": {"type": "json_schema", "name": "light", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(**options, text=shape)
    assert made.status == "completed" and json.loads(made.output_text)["lamp"] in ("on", "off")
    assert made.text is not None and made.text.to_dict() == shape
    with pytest.raises(openai.BadRequestError) as caught:
        broken: Any = {"format": {"type": "json_schema", "name": "light", "schema": {"type": "lamp"}}}
        client.responses.create(**options, text=broken)
    assert (caught.value.param or "").startswith("text.format")


def test_the_input_items_come_in_pages(folder: str) -> None:
    async def go() -> None:
        async with inside(folder) as server:
            items = [{"role": "user", "content": str(number)} for number in range(5)]
            made = (await server.client.post("/v1/responses", json={"input": items, "max_output_tokens": 1})).json()

            async def page(**query: Any) -> tuple[list[str], bool, str]:
                answer = await server.client.get(f"/v1/responses/{made['id']}/input_items", params=query)
                data = answer.json()
                return [item["content"][0]["text"] for item in data["data"]], data["has_more"], data["last_id"]

            assert (await page())[:2] == (["4", "3", "2", "1", "0"], False)
            texts, more, last = await page(order="asc", limit=2)
            assert (texts, more) == (["0", "1"], True)
            assert (await page(order="asc", limit=3, after=last))[:2] == (["2", "3", "4"], False)
            bad = await server.client.get(f"/v1/responses/{made['id']}/input_items", params={"limit": 0})
            assert bad.status_code == 400 and bad.json()["error"]["param"] == "limit"

    run(go())


def test_another_tenant_cannot_find_a_response(folder: str) -> None:
    async def go() -> None:
        async with inside(folder, api_key=("one", "two"), admin_api_key=("root",)) as server:
            keys = {key: {"authorization": f"Bearer {key}"} for key in ("one", "two", "root")}
            body = {"input": "Hello", "max_output_tokens": 2}
            made = (await server.client.post("/v1/responses", json=body, headers=keys["one"])).json()["id"]

            async def statuses(key: str, response_id: str) -> list[tuple[int, str]]:
                client, headers = server.client, keys[key]
                answers = [
                    await client.get(f"/v1/responses/{response_id}", headers=headers),
                    await client.get(f"/v1/responses/{response_id}/input_items", headers=headers),
                    await client.post(
                        "/v1/responses", json={**body, "previous_response_id": response_id}, headers=headers
                    ),
                    await client.delete(f"/v1/responses/{response_id}", headers=headers),
                ]
                return [(one.status_code, one.text.replace(response_id, "ID")) for one in answers]

            unknown = await statuses("two", "resp_unknown")
            assert [status for status, _ in unknown] == [404] * 4
            assert await statuses("two", made) == unknown == await statuses("root", made)
            assert [status for status, _ in await statuses("one", made)] == [200] * 4  # the owner finds it

    run(go())


def test_the_memory_evicts_the_oldest_responses(folder: str) -> None:
    async def go() -> None:
        async with inside(folder, response_store_size=12_000) as server:
            made = [
                (await server.client.post("/v1/responses", json={"input": f"{n}", "max_output_tokens": 1})).json()["id"]
                for n in range(12)
            ]
            found = [(await server.client.get(f"/v1/responses/{name}")).status_code for name in made]
            assert found[0] == 404 and found[-1] == 200 and found == sorted(found, reverse=True)
            assert 0 < server.state.responses.num_bytes <= 12_000

    run(go())


def test_a_failure_in_the_middle_is_response_failed(folder: str, gate: Gate) -> None:
    async def go() -> None:
        async with inside(gate.holds(folder, 3, "poison=0&after=3")) as server:  # <|im_start|>, the first token, is 0
            body = {"input": "x", "stream": True, "max_output_tokens": 9}
            asked = asyncio.create_task(server.client.post("/v1/responses", json=body))
            await until(lambda: num_told(server) == 3)
            gate.open()
            answer = await asked
            events = parse_events(answer.text)
            assert answer.status_code == 200 and events[-1]["type"] == "response.failed"
            assert events[-1]["response"]["error"]["code"] == "server_error"
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            found = await server.client.get(f"/v1/responses/{events[0]['response']['id']}")
            assert found.status_code == 404

    run(go())


def test_a_client_that_disconnects_aborts_its_response(folder: str, gate: Gate, tmp_path: Path) -> None:
    with fake_server(gate.holds(folder, 3), tmp_path / "log") as server:
        with (
            server.client() as client,
            client.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as it,
        ):
            assert it.status_code == 200 and next(it.iter_lines()) == "event: response.created"
        wait_for(lambda: server.metric("vllm:num_requests_running") == 0)


def test_while_draining_new_responses_are_refused(folder: str) -> None:
    async def go() -> None:
        async with inside(folder) as server:
            server.state.start_draining()
            answer = await server.client.post("/v1/responses", json={"input": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            await until(lambda: server.state.num_jobs == 0)

    run(go())


def test_metrics_and_the_openapi_document_know_the_routes(folder: str) -> None:
    async def go() -> None:
        async with inside(folder) as server:
            await server.client.get("/v1/responses/resp_x")
            metrics = (await server.client.get("/metrics")).text
            assert '"/v1/responses/{id}"' in metrics
            paths = (await server.client.get("/openapi.json")).json()["paths"]
            schema = paths["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert {"input", "previous_response_id", "top_k", "cache_salt"} <= schema["properties"].keys()
            assert json.dumps(paths["/v1/messages"]).count("stop_sequences") >= 1
            assert {"get", "delete"} == paths["/v1/responses/{response_id}"].keys()

    run(go())
