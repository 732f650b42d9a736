"""Structured output over HTTP with the bundled model: both endpoints, streams, choices, refusals."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from server.harness import Server, spawn

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["light_on", "light_off"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["intent", "level"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "intent", "schema": SCHEMA, "strict": True}}
USER = [{"role": "user", "content": "turn on the light"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("structured") / "log"
    command = [sys.executable, "-m", "headstart", "serve", "--port", "0", "--num-blocks", "200", "--no-access-log"]
    with spawn(command, log) as running:
        yield running.wait_ready()


def ask(server: Server, path: str, **body: Any) -> Any:
    what = {"messages": USER} if path == CHAT else {"prompt": "turn on the light"}
    answer = server.post(path, json={**what, "max_tokens": 150, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def is_valid(text: str) -> bool:
    return jsonschema_rs.is_valid(SCHEMA, json.loads(text))


def test_answers_of_both_endpoints_match_the_schema(server: Server) -> None:
    (chat,) = ask(server, CHAT, response_format=FORMAT)
    (completion,) = ask(server, COMPLETIONS, response_format=FORMAT)
    assert chat["finish_reason"] == completion["finish_reason"] == "stop"
    assert is_valid(chat["message"]["content"]) and is_valid(completion["text"])


def test_choices_with_a_seed_are_reproducible_and_valid(server: Server) -> None:
    values = {"response_format": FORMAT, "n": 3, "seed": 4, "temperature": 1.0, "logprobs": True}
    first, again = (ask(server, CHAT, **values) for _ in range(2))
    texts = [choice["message"]["content"] for choice in first]
    assert texts == [choice["message"]["content"] for choice in again]
    assert all(is_valid(text) for choice, text in zip(first, texts, strict=True) if choice["finish_reason"] == "stop")
    assert ["".join(entry["token"] for entry in choice["logprobs"]["content"][:-1]) for choice in first] == texts


def test_a_stream_has_the_same_text(server: Server) -> None:
    values: dict[str, Any] = {"response_format": FORMAT, "temperature": 1.0, "seed": 4}
    (whole,) = ask(server, COMPLETIONS, **values)
    body = {"prompt": "turn on the light", "max_tokens": 150, "stream": True, **values}
    lines = server.post(COMPLETIONS, json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert server.metric("headstart:forced_tokens_total") > 0


def test_a_stream_of_choices_with_logprobs_penalties_and_a_stop_joins_to_the_whole_answers(server: Server) -> None:
    values: dict[str, Any] = {"response_format": FORMAT, "n": 3, "seed": 9, "temperature": 1.0, "logprobs": True}
    values |= {"presence_penalty": 1.0, "stop": ["level"], "max_tokens": 150}
    whole = ask(server, CHAT, **values)
    assert {choice["finish_reason"] for choice in whole} == {"stop"}
    lines = server.post(CHAT, json={"messages": USER, "stream": True, **values}).text.splitlines()
    pieces = [choice for line in lines if line.startswith("data: {") for choice in json.loads(line[6:])["choices"]]
    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["delta"].get("content") or "" for piece in own) == choice["message"]["content"]
        entries = [entry for piece in own if piece.get("logprobs") for entry in piece["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [entry["token"] for entry in choice["logprobs"]["content"]]
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}},
            "response_format",
            "has not, which a grammar cannot keep to; leave it out, or send strict: false",
        ),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar", "unknown name"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "only one"),
    ],
)
def test_what_cannot_be_a_grammar_is_a_400_by_name(
    server: Server, values: dict[str, Any], param: str, message: str
) -> None:
    answer = server.post(CHAT, json={"messages": USER, **values})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"]


def test_a_keyword_that_is_dropped_is_named_in_a_header(server: Server) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    for fields, strict in (({}, {}), ({"stream": True}, {}), ({}, {"strict": True})):
        chosen = {"type": "json_schema", "json_schema": {"schema": schema, **strict}}
        answer = server.post(CHAT, json={"messages": USER, "response_format": chosen, "max_tokens": 8, **fields})
        assert answer.status_code == 200
        assert answer.headers["x-headstart-dropped-keywords"] == "response_format: uniqueItems"
    plain = server.post(CHAT, json={"messages": USER, "response_format": {"type": "json_object"}, "max_tokens": 2})
    assert "x-headstart-dropped-keywords" not in plain.headers


def test_the_openapi_document_has_the_fields(server: Server) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    for path in (CHAT, COMPLETIONS):
        properties = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert "json_schema" in properties["response_format"]["properties"]
        assert {"json", "regex", "choice", "grammar"} <= set(properties["structured_outputs"]["properties"])
        assert "guided_json" in properties
