"""Streams, byte by byte: framing, order, usage, errors before and behind the first token."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.fake_engine import Gate
from server.harness import Server, fake_server, inside, num_told, parse_events, until

from headstart.http import sse
from headstart.http.http_errors import HttpError

TEXT = "the quick brown fox é 東京 jumps"


def stream(server: Server, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return server.post(path, json={"stream": True, **body})


def test_every_event_is_one_data_line_and_an_empty_one_with_lf_only(server: Server) -> None:
    answer = stream(server, prompt=TEXT, max_tokens=20)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    assert b"\r" not in answer.content and answer.content.endswith(b"\n\ndata: [DONE]\n\n")
    for event in answer.content.removesuffix(b"\n\n").split(b"\n\n"):
        assert event.startswith(b"data: ") and b"\n" not in event


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_pieces_are_the_whole(server: Server, path: str) -> None:
    prompt = {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": TEXT}]}
    body = {**prompt, "max_tokens": 40, "n": 2, "stop": ["jum"]}
    whole = server.post(path, json=body).json()
    events = parse_events(stream(server, path, **body).text)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    for index in range(2):
        choices = [choice for c in chunks for choice in c["choices"] if choice["index"] == index]
        expected = whole["choices"][index]
        if path == "/v1/completions":
            assert "".join(choice["text"] for choice in choices) == expected["text"]
        else:
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in choices[1:])
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            assert text == expected["message"]["content"]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[-1] == expected["finish_reason"] and set(reasons[:-1]) == {None}


def test_usage_comes_once_behind_everything_if_asked_for(server: Server) -> None:
    plain = parse_events(stream(server, prompt=[1, 2], max_tokens=3).text)
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in plain[:-1])
    events = parse_events(stream(server, prompt=[1, 2], max_tokens=3, stream_options={"include_usage": True}).text)
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 3
    assert events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert all(chunk["usage"] is None for chunk in events[:-2])


def test_continuous_usage_is_on_every_chunk_and_grows(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = parse_events(stream(server, prompt=[1, 2], max_tokens=4, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events[:-1]]
    assert counts == sorted(counts) and counts[-1] == 4


def test_an_error_before_the_first_token_is_an_http_error(folder: str) -> None:
    async def run() -> None:
        async with inside(f"{folder}?poison=7") as server:
            answer = await server.complete([7], stream=True)
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "request_failed"
            assert answer.headers["x-should-retry"] == "false"

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_behind_the_first_token_ends_the_stream_as_an_error(folder: str, gate: Gate, n: int) -> None:
    async def run() -> None:
        async with inside(gate.holds(folder, 30, "poison=7&after=30")) as server:
            fields = {"stream": True, "max_tokens": 40, "n": n, "stream_options": {"include_usage": True}}
            asked = asyncio.create_task(server.complete([7, 8], **fields))
            await until(lambda: num_told(server) == n * 30)
            gate.open()
            answer = await asked
            assert answer.status_code == 200
            *_, error, done, rest = answer.text.split("\n\n")
            name, data = error.split("\n")
            assert name == "event: error" and done == "data: [DONE]" and rest == ""
            assert json.loads(data.removeprefix("data: "))["error"]["type"] == "server_error"
            events = parse_events(answer.text)
            assert not any(c["finish_reason"] for e in events[:-2] for c in e["choices"])
            assert not any(e["usage"] for e in events[:-2])

    asyncio.run(run())


def test_a_waiting_stream_is_kept_alive_by_comments(folder: str, tmp_path: Path, gate: Gate) -> None:
    constants = {"server.inference.PING_SECONDS": 0.1}
    with fake_server(gate.holds(folder, 0), tmp_path / "log", constants=constants) as server, server.client() as client:
        body = {"prompt": [7, 8], "stream": True, "max_tokens": 2}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            begin = [next(lines) for _ in range(4)]
            gate.open()
            rest = list(lines)
    assert begin == [": ping", ""] * 2
    assert [event["choices"][0]["text"] for event in parse_events("\n".join(rest))[:-1]]


def test_an_event_never_holds_a_line_break() -> None:
    assert sse.encode_event({"text": "a\nb\r\n\u2028"}).count(b"\n") == 2
    assert sse.encode_error_event(HttpError(503, "a\nb", code="x")).count(b"\n") == 3
