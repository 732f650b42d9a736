"""Answers have the schemas of /openapi.json: every field, no other, of the declared types."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from server.harness import Server, spawn

from headstart.apis import answer_schemas as schema
from headstart.apis.openapi import response_descriptions
from headstart.model.weights.init_model import write_random_model
from headstart.server.cache_api import cache_schema

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Which models of responses are there?"}]}
TEXT: dict[str, Any] = {"prompt": "Which models of responses are there?"}
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
CALLED: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
MANY: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 4}
ALL: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "echo": True, "max_tokens": 4}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    room = tmp_path_factory.mktemp("models")
    model = write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)
    options = ["--port", "0", "--num-blocks", "512", "--heartbeat-timeout", "600", "--tool-call-parser", "hermes"]
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options], room / "log") as running:
        yield running.wait_ready()


def closed(form: Any) -> Any:
    """Returns a schema of objects that have no other fields."""
    if isinstance(form, list):
        return [closed(one) for one in form]
    if not isinstance(form, dict):
        return form
    more = {"additionalProperties": False} if "properties" in form else {}
    return {name: closed(value) for name, value in form.items()} | more


def fits(form: Any, answer: Any) -> Any:
    """Holds a JSON value against a schema, and returns it."""
    jsonschema_rs.validator_for(closed(form)).validate(answer)
    return answer


def events(response: httpx.Response) -> list[Any]:
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("body", [{"max_tokens": 3}, ALL, {"max_tokens": 3, "n": 2, "logprobs": 0}])
def test_completions(tool_server: Server, body: dict[str, Any]) -> None:
    fits(schema.COMPLETION, tool_server.post("/v1/completions", json={**TEXT, **body}).json())
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    sent = {**TEXT, **body, **stream} | {"echo": False, "prompt_logprobs": None}
    chunks = events(tool_server.post("/v1/completions", json=sent))
    assert [fits(schema.COMPLETION_CHUNK, chunk) for chunk in chunks][-1]["usage"] is not None


@pytest.mark.parametrize("body", [{"max_tokens": 3}, MANY, CALLED | {"max_tokens": 100}])
def test_chats(tool_server: Server, body: dict[str, Any]) -> None:
    whole = fits(schema.CHAT_COMPLETION, tool_server.post("/v1/chat/completions", json={**CHAT, **body}).json())
    assert bool(whole["choices"][0]["message"].get("tool_calls")) == ("tools" in body)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(tool_server.post("/v1/chat/completions", json={**CHAT, **body, **stream}))
    assert [fits(schema.CHAT_CHUNK, chunk) for chunk in chunks][-1]["usage"] is not None


@pytest.mark.parametrize("is_called", [False, True])
def test_responses(tool_server: Server, is_called: bool) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    body: dict[str, Any] = {"input": "Which models?", "max_output_tokens": 100 if is_called else 3}
    body |= {"tools": [tool], "tool_choice": "required"} if is_called else {}
    whole = fits(schema.RESPONSE, tool_server.post("/v1/responses", json=body).json())
    assert ("function_call" in [item["type"] for item in whole["output"]]) == is_called
    path = f"/v1/responses/{whole['id']}"
    assert fits(schema.RESPONSE, tool_server.get(path).json()) == whole
    fits(schema.INPUT_ITEMS, tool_server.get(f"{path}/input_items").json())
    with tool_server.client() as client:
        fits(schema.DELETED_RESPONSE, client.delete(path).json())
    stream = [
        fits(schema.RESPONSE_EVENT, event)
        for event in events(tool_server.post("/v1/responses", json=body | {"stream": True}))
    ]
    assert stream[0]["type"] == "response.created" and stream[-1]["response"]["usage"] is not None


@pytest.mark.parametrize("is_called", [False, True])
def test_messages(tool_server: Server, is_called: bool) -> None:
    body: dict[str, Any] = {**CHAT, "model": "tiny", "max_tokens": 100 if is_called else 3}
    if is_called:
        body |= {"tools": [{"name": "weather", "input_schema": WEATHER}], "tool_choice": {"type": "any"}}
    whole = fits(schema.MESSAGE, tool_server.post("/v1/messages", json=body).json())
    assert ("tool_use" in [block["type"] for block in whole["content"]]) == is_called
    stream = [
        fits(schema.MESSAGE_EVENT, event)
        for event in events(tool_server.post("/v1/messages", json=body | {"stream": True}))
    ]
    assert stream[0]["message"] and stream[-1]["type"] == "message_stop"
    fits(
        schema.TOKEN_COUNT.success, tool_server.post("/v1/messages/count_tokens", json={**CHAT, "model": "tiny"}).json()
    )


def test_errors(tool_server: Server) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/nowhere"):
        fits(schema.ERROR, tool_server.post(path, json={"max_tokens": "many"}).json())
    fits(schema.MESSAGES_ERROR, tool_server.post("/v1/messages", json={"max_tokens": "many"}).json())


def test_the_model_and_its_tokenizer(tool_server: Server) -> None:
    (model,) = fits(schema.MODEL_LIST, tool_server.get("/v1/models").json())["data"]
    assert fits(schema.MODEL, tool_server.get(f"/v1/models/{model['id']}").json()) == model
    fits(schema.TOKENS, tool_server.post("/tokenize", json=TEXT).json())
    tokens = fits(schema.TOKENS, tool_server.post("/tokenize", json=TEXT | {"return_token_strs": True}).json())[
        "tokens"
    ]
    fits(schema.TEXT, tool_server.post("/detokenize", json={"tokens": tokens}).json())
    for path in ("/health", "/readyz", "/livez"):
        fits(schema.STATUS, tool_server.get(path).json())
    fits(schema.VERSION, tool_server.get("/version").json())
    fits(schema.STATUS, tool_server.get("/ping").json())
    assert fits(schema.SERVER_LOAD, tool_server.get("/load").json())["server_load"] == 0
    info = fits(schema.TOKENIZER_INFO, tool_server.get("/tokenizer_info").json())
    assert info["chat_template"] and info["model_max_length"] > 0


def test_the_prefix_cache(tool_server: Server) -> None:
    text = "A prefix that the models of responses pin, which is long enough to fill more than one block. "
    made = tool_server.post("/v1/prefixes", json={"name": "models", "text": text})
    assert made.status_code == 201 and fits(cache_schema.PINNED_PREFIX, made.json())["name"] == "models"
    fits(cache_schema.PINNED_PREFIXES, tool_server.get("/v1/prefixes").json())
    first = tool_server.post("/v1/completions", json={"prompt": text + "And more.", "max_tokens": 2}).json()
    fits(cache_schema.CACHE_STATISTICS, tool_server.get("/v1/cache/stats").json())
    fits(cache_schema.CACHE_EXPLANATION, tool_server.get(f"/v1/cache/explain?request_id={first['id']}").json())
    near = fits(
        cache_schema.CACHE_EXPLANATION,
        tool_server.post("/v1/cache/explain", json={"prompt": text[:40] + 2 * "Another."}).json(),
    )
    assert near["near_match"] is not None
    with tool_server.client() as client:
        fits(cache_schema.REMOVED_PREFIX, client.delete("/v1/prefixes/models").json())


def test_the_document_is_valid_and_names_every_answer(tool_server: Server) -> None:
    document = tool_server.get("/openapi.json").json()
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert len(operations) > 20
    for operation in operations:
        success = next(answer for status, answer in operation["responses"].items() if status in ("200", "201"))
        schemas = [content["schema"] for content in success["content"].values()]
        for one in schemas:
            jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **one})
        assert schemas[0]["type"] == "string" or schemas[0]["properties"], operation["operationId"]
        assert operation["responses"]["default"]["content"]["application/json"]["schema"]["properties"]["error"]
    assert "$ref" not in json.dumps(document["paths"]["/v1/chat/completions"])


def test_clients_of_the_document_accept_fields_of_later_versions() -> None:
    text = json.dumps(response_descriptions(schema.CHATS))
    assert '"additionalProperties": false' not in text and '"default": null' not in text and "$defs" not in text


def test_a_field_that_is_missing_or_unknown_is_noticed() -> None:
    answer: Any = {"object": "list", "data": []}
    fits(cache_schema.PINNED_PREFIXES, answer)
    for wrong in ({"object": "list"}, answer | {"more": 1}, answer | {"data": [{}]}):
        with pytest.raises(jsonschema_rs.ValidationError):
            fits(cache_schema.PINNED_PREFIXES, wrong)
