"""Ollama's API: bodies as chats, whole answers and lines, the routes beside. The ollama package: tests/clients."""

import json
from dataclasses import replace
from typing import Any

import pytest
from server.harness import Server

from headstart.core.errors import InvalidRequestError
from headstart.ollama.ollama_answers import OllamaAnswerBuilder, RequestDurations
from headstart.ollama.ollama_request import translate_chat_body, translate_generate_body
from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta
from headstart.openai.forms.carried_text import REFUSE
from headstart.openai.forms.skipped import SkippedNames
from headstart.openai.text.generation import OutputDelta

BOUNDS = RequestBounds(vocab_size=100, max_model_len=200)
HELLO: Any = {"messages": [{"role": "user", "content": "Hello"}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def lines(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    answer = server.post(path, json=body)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_options_are_fields_of_the_chat_and_those_about_speed_are_ignored() -> None:
    options = {"num_predict": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": ["a"]}
    ignored = {"num_ctx": 64, "num_gpu": 1, "num_thread": 2, "use_mmap": True, "mirostat": 0, "typical_p": 1.0}
    body = {**HELLO, "options": {**options, "repeat_penalty": 1.1, **ignored}, "keep_alive": -1, "truncate": True}
    params = translate_chat_body(body, BOUNDS).to_chat_body(BOUNDS).params
    sampling = params.sampling
    assert params.max_tokens == 5 and params.stop == ("a",) and params.stream
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    assert sampling.repetition_penalty == 1.1 and sampling.seed == 1


@pytest.mark.parametrize("number", [-1, -2, 0])
def test_no_limit_is_what_the_context_holds(number: int) -> None:
    assert (
        translate_chat_body({**HELLO, "options": {"num_predict": number}}, BOUNDS)
        .to_chat_body(BOUNDS)
        .params.max_tokens
        is None
    )


def test_a_format_is_json_or_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for sent, expected in (("json", "json_object"), (schema, "json_schema")):
        assert translate_chat_body({**HELLO, "format": sent}, BOUNDS).values["response_format"]["type"] == expected
    assert "response_format" not in translate_chat_body({**HELLO, "format": ""}, BOUNDS).values


def test_outputs_of_tools_belong_to_the_calls_of_their_names() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("one", "two")]
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "two", "content": "2"},
        {"role": "tool", "content": "1"},
    ]
    messages = translate_chat_body({"messages": history}, BOUNDS).to_chat_body(BOUNDS).messages
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:]] == [ids[1], ids[0]]
    assert messages[1]["reasoning_content"] == "Hm." and messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "x": 1
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**HELLO, "options": {"temperature": 9}}, "options.temperature"),
        ({**HELLO, "options": {"num_predict": "x"}}, "options.num_predict"),
        ({**HELLO, "options": {"mirostat": 1}}, "options.mirostat"),
        ({**HELLO, "options": []}, "options"),
        ({**HELLO, "format": 5}, "format"),
        ({**HELLO, "stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": "a", "images": "AA=="}]}, "messages[0].images"),
        ({"messages": [{"role": "x", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": ["a"]}, "messages[0]"),
        ({}, "messages"),
    ],
)
def test_what_is_refused_is_named_in_ollamas_words(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        translate_chat_body(body, BOUNDS).to_chat_body(BOUNDS)
    assert caught.value.param is not None and caught.value.param.startswith(param)
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize("images", [["AA=="], ["AA==", "BB=="]])
def test_images_are_placeholders_that_are_named_or_refused_by_the_option(images: list[str]) -> None:
    bodies: list[Any] = [
        (translate_chat_body, {"messages": [{"role": "user", "content": "Look", "images": images}]}, "messages[0]"),
        (translate_generate_body, {"prompt": "Look", "images": images}, "prompt"),
    ]
    for read, body, param in bodies:
        bounds = replace(BOUNDS, skipped=SkippedNames())
        (message,) = read(body, bounds).to_chat_body(bounds).messages
        assert message["content"].startswith("Look") and message["content"].count("[image: ") == len(images)
        assert bounds.skipped.counts() == (("part.image", len(images)),)
        with pytest.raises(InvalidRequestError, match="--unreadable-parts") as caught:
            read(body, BOUNDS).to_chat_body(replace(BOUNDS, unreadable_parts=REFUSE))
        assert caught.value.param.startswith(param)
    with pytest.raises(InvalidRequestError, match="images"):
        translate_generate_body({"prompt": "a", "images": ["x"], "raw": True}, BOUNDS)


def test_a_call_that_num_predict_cut_keeps_its_arguments() -> None:
    answer = OllamaAnswerBuilder("m", 0, is_chat=True)
    answer.add(
        OutputDelta(finish_reason="length", chat=ChatDelta(tool_calls=(ToolCallDelta(0, "id", "one", '{"x": "Par'),)))
    )
    (call,) = answer.whole(USAGE, RequestDurations(0, 0, 0))["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"x": "Par"}


def test_as_many_tools_and_calls_are_legal_as_in_chats() -> None:
    tools = [{"type": "function", "function": {"name": f"tool.{number}"}} for number in range(150)]
    assert len(translate_chat_body({**HELLO, "tools": tools}, BOUNDS).to_chat_body(BOUNDS).params.tools.tools) == 150


@pytest.mark.parametrize("name", ["context", "suffix", "template"])
def test_what_would_change_a_generated_text_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        translate_generate_body({"prompt": "a", name: ["x"]}, BOUNDS)


def test_a_call_is_one_line_once_it_is_complete() -> None:
    answer = OllamaAnswerBuilder("m", 0, is_chat=True)
    found = answer.add(
        OutputDelta(chat=ChatDelta(reasoning="Hm.", tool_calls=(ToolCallDelta(0, "id", "one", '{"x"'),)))
    )
    found += answer.add(
        OutputDelta(chat=ChatDelta(tool_calls=(ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "", "two"))))
    )
    found += answer.add(OutputDelta(finish_reason="tool_calls", chat=ChatDelta()))
    found += answer.closing_events(USAGE, RequestDurations(3.0, 1.0, 2.0))
    messages = [line["message"] for line in found]
    assert [message.get("thinking") for message in messages] == ["Hm.", None, None, None]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [{"name": "one", "arguments": {"x": 1}}, {"name": "two", "arguments": {}}]
    assert [line["done"] for line in found] == [False, False, False, True] and found[-1]["done_reason"] == "stop"
    assert found[-1]["total_duration"] == 3_000_000_000 and found[-1]["eval_count"] == 3
    assert (found[-1]["prompt_eval_count"], found[-1]["prompt_eval_cached_count"]) == (7, 4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", HELLO),
        ("/api/generate", {"prompt": "Hello", "system": "Be brief."}),
        ("/api/generate", {"prompt": "Hello", "raw": True}),
    ],
)
def test_lines_join_to_the_whole_answer(real_server: Server, path: str, body: dict[str, Any]) -> None:
    body = {**body, "options": {"temperature": 0, "num_predict": 8}}
    whole = real_server.post(path, json={**body, "stream": False}).json()
    found = lines(real_server, path, body)

    def text(line: dict[str, Any]) -> str:
        return line["message"]["content"] if "message" in line else line["response"]

    assert "".join(map(text, found)) == text(whole) != ""
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    names = ("done_reason", "prompt_eval_count", "eval_count")
    assert [found[-1][name] for name in names] == [whole[name] for name in names]
    assert 0 < whole["eval_count"] <= 8 and whole["done_reason"] in ("stop", "length")
    assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 0


def test_a_limit_beyond_the_context_is_shortened(real_server: Server) -> None:
    body = {**HELLO, "stream": False, "options": {"num_predict": 10**6, "stop": ["e", "a", "o"]}}
    assert real_server.post("/api/chat", json=body).status_code == 200


def test_errors_are_one_text(real_server: Server) -> None:
    for path, body, status in (
        ("/api/chat", {"messages": []}, 400),
        ("/api/chat", {**HELLO, "model": "other"}, 404),
        ("/api/embed", {"input": "a"}, 400),
        ("/api/embeddings", {"prompt": "a"}, 400),
        ("/api/pull", {"model": "a"}, 404),
    ):
        answer = real_server.post(path, json=body)
        assert answer.status_code == status and isinstance(answer.json()["error"], str)
    refused = real_server.post("/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "embeddings"


def test_the_model_is_listed_and_described(real_server: Server) -> None:
    [name] = [model["id"] for model in real_server.get("/v1/models").json()["data"]]
    for path in ("/api/tags", "/api/ps"):
        assert [model["name"] for model in real_server.get(path).json()["models"]] == [name]
    described = real_server.post("/api/show", json={"model": name}).json()
    assert "completion" in described["capabilities"] and described["model_info"]["headstart.context_length"] > 0
    assert real_server.post("/api/show", json={"model": "other"}).status_code == 404
    tagged = {**HELLO, "model": f"{name}:latest", "stream": False, "options": {"num_predict": 1}}
    assert real_server.post("/api/chat", json=tagged).status_code == 200
    assert real_server.get("/api/version").json() == real_server.get("/version").json()
