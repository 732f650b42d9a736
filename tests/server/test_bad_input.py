"""Bad input, over the wire: an OpenAI error object, the right status, and a server that is unharmed."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from server.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE
from server.harness import PATIENCE, Server
from starlette.requests import Request

from headstart.core.errors import QueueFullError
from headstart.http import body_reader as body
from headstart.http.http_errors import HttpError

CHAT, COMPLETIONS, JSON = "/v1/chat/completions", "/v1/completions", {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def check_error(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The answer is an error object that says nothing of the server's insides."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and "x-request-id" in answer.headers
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and isinstance(error["code"], str)
    assert not re.search(r"Traceback|0x[0-9a-f]{6,}|/work|/home|site-packages|\.py", answer.text)
    if code is not None:
        assert error["code"] == code
    return error


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """After every test: the same process still answers correctly."""
    yield
    answer = server.post(COMPLETIONS, json={"prompt": [3, 4], "max_tokens": 4, "return_token_ids": True})
    assert answer.json()["choices"][0]["token_ids"] == [3, 4, 3, 4] and server.process.poll() is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 10_000,
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b'{"prompt": "a"}x',
        "{“prompt”: 1}".encode(),
    ],
    ids=range(16),
)
def test_what_is_not_a_json_object_is_400(server: Server, path: str, body: bytes) -> None:
    check_error(server.post(path, content=body, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (COMPLETIONS, {}, 400, "missing_required_parameter", "prompt"),
        (COMPLETIONS, {"prompt": None}, 400, "missing_required_parameter", "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": 5}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [2**40]}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [1] * MAX_MODEL_LEN}, 400, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": [1], "max_tokens": MAX_MODEL_LEN}, 400, "context_length_exceeded", "max_tokens"),
        (COMPLETIONS, {"prompt": "ab " * 100_000}, 400, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        (COMPLETIONS, {"prompt": "a", "model": "../../etc/passwd"}, 404, "model_not_found", "model"),
        (COMPLETIONS, {"prompt": "a", "model": 5}, 400, "invalid_value", "model"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, 400, "invalid_value", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 20, "max_tokens": 5}, 400, "invalid_value", "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "invalid_value", "n"),
        (COMPLETIONS, {"prompt": "a", "n": 10**9}, 400, "invalid_value", "n"),
        (COMPLETIONS, {"prompt": "a", "n": True}, 400, "invalid_value", "n"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, 400, "unsupported_parameter", "best_of"),
        (COMPLETIONS, {"prompt": "a", "temperature": -0.1}, 400, "invalid_value", "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": 3.5e38}, 400, "invalid_value", "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "invalid_value", "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": 2**70}, 400, "invalid_value", "top_k"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, 400, "invalid_value", "seed"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "invalid_value", "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}}, 400, "invalid_value", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, 400, "invalid_value", "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, 400, "invalid_value", "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "invalid_value", "stop"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}, 400, "invalid_value", "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "invalid_value", "stream"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "unsupported_parameter", "suffix"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "x" * 10**6}, 400, "invalid_value", "cache_salt"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, 400, "invalid_value", "cache_salt"),
        (COMPLETIONS, {"prompt": "a", "cache": "write-only"}, 400, "invalid_value", "cache"),
        (COMPLETIONS, {"prompt": "a", "cache": {"mode": "bypass"}}, 400, "invalid_value", "cache"),
        (COMPLETIONS, {"prompt": "a", "cache_priority": 101}, 400, "invalid_value", "cache_priority"),
        (COMPLETIONS, {"prompt": "a", "cache": "bypass", "cache_ttl": 9}, 400, "invalid_value", "cache_ttl"),
        (COMPLETIONS, {"prompt": "a", "cache_ttl": 86401}, 400, "invalid_value", "cache_ttl"),
        (COMPLETIONS, {"prompt": "a", "cache_ttl": 1e308}, 400, "invalid_value", "cache_ttl"),
        (COMPLETIONS, {"prompt": "a", "prompt_cache_options": "30m"}, 400, "invalid_value", "prompt_cache_options"),
        (COMPLETIONS, {"prompt": "a", "prompt_cache_options": {"ttl": "30d"}}, 400, None, "prompt_cache_options.ttl"),
        (COMPLETIONS, {"prompt": "a", "prompt_cache_options": {"mode": 1}}, 400, None, "prompt_cache_options.mode"),
        (COMPLETIONS, {"prompt": "a", "priority": 1}, 400, "unsupported_parameter", "priority"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "yaml"}}, 400, None, "response_format.type"),
        (COMPLETIONS, {"prompt": "a", "guided_json": "{"}, 400, "invalid_value", "guided_json"),
        (COMPLETIONS, {"prompt": "a", "guided_choice": []}, 400, "invalid_value", "guided_choice"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {}}, 400, "invalid_value", "structured_outputs"),
        (COMPLETIONS, {"prompt": "a", "kv_transfer_params": {"a": 1}}, 400, "unsupported_parameter", None),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"}, 400, "unsupported_parameter", "prompt_embeds"),
        (CHAT, {}, 400, "missing_required_parameter", "messages"),
        (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
        (CHAT, {"messages": "hi"}, 400, "invalid_value", "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_value", "messages[0].role"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "invalid_value", "tools[0].function"),
        (CHAT, {"messages": USER, "tools": [{"type": "custom"}]}, 400, "unsupported_parameter", "tools[0]"),
        (CHAT, {"messages": USER, "tools": TOOLS}, 400, "unsupported_parameter", "tools"),
        (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, 400, "unsupported_parameter", "functions"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, 400, "missing_required_parameter", "tools"),
        (CHAT, {"messages": USER, "tool_choice": "some"}, 400, "invalid_value", "tool_choice"),
        (CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}, 400, "unsupported_parameter", "chat_template"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": 5}]}]}, 400, "invalid_value", None),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 9999}]}, 400, "context_length_exceeded", "messages"),
        ("/tokenize", {}, 400, None, "prompt"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": "1"}, 400, "invalid_value", "tokens"),
    ],
)
def test_a_wrong_value_is_named(
    server: Server, path: str, body: dict, status: int, code: str | None, param: str | None
) -> None:
    error = check_error(server.post(path, json=body), status, code)
    assert param is None or error["param"] == param
    if path in (COMPLETIONS, CHAT) and "stream" not in body and "stream_options" not in body:
        check_error(server.post(path, json={**body, "stream": True}), status, code)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_another_content_type_is_415(server: Server, kind: str) -> None:
    error = check_error(server.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind}), 415)
    assert "Content-Type: application/json" in error["message"]


def test_a_compressed_body_is_415_and_never_inflated(server: Server) -> None:
    check_error(server.post(COMPLETIONS, content=b"x", headers={"content-encoding": "gzip"}), 415)


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/json; charset=utf-8"}])
def test_a_missing_content_type_is_forgiven(server: Server, headers: dict[str, str]) -> None:
    body = json.dumps({"prompt": "the", "max_tokens": 1}).encode()
    assert server.post(COMPLETIONS, content=body, headers=headers).status_code == 200


class Raw:
    """A connection on which anything can be said."""

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.url)
        self.socket = socket.create_connection((address.hostname, address.port), PATIENCE)
        self.sent = 0

    def say(self, data: bytes) -> bool:
        """Sends; False once the server has closed."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        self.sent += len(data)
        return True

    def answer(self) -> tuple[int, str]:
        """Returns status and everything that was said until the server closed."""
        data = b""
        try:
            while piece := self.socket.recv(65536):
                data += piece
        except OSError:
            pass
        self.socket.close()
        return int(data.split(b" ", 2)[1]), data.decode("latin-1")


def test_a_body_of_100_mb_in_chunks_is_413_long_before_its_end(server: Server) -> None:
    raw = Raw(server)
    raw.say(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
    for _ in range(100):
        if not raw.say(chunk):
            break
    status, text = raw.answer()
    assert status == 413 and '"code":"body_too_large"' in text and raw.sent < 40e6


def test_a_body_announced_too_large_is_413_without_being_read(server: Server) -> None:
    raw = Raw(server)
    raw.say(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 100000000\r\n\r\n"
    )
    status, text = raw.answer()
    assert status == 413 and "100 Continue" not in text and "--max-body-bytes" in text


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-big: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_a_head_that_is_too_large_is_431(server: Server, head: bytes) -> None:
    raw = Raw(server)
    raw.say(head)
    try:
        status, text = raw.answer()
    except IndexError:  # reset before the answer could be read
        return
    assert status == 431 and '"code":"headers_too_large"' in text


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x00" * 100 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_is_400_and_the_connection_closes(server: Server, data: bytes) -> None:
    raw = Raw(server)
    raw.say(data)
    status, text = raw.answer()
    assert status == 400 and '"code":"invalid_http"' in text


def test_unfinished_bodies_are_bounded_in_all_and_slow_ones_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(body, "ROOM_SECONDS", 0.05)
    reader = body.BudgetedBodyReader(100, 200)

    async def read(*pieces: bytes) -> bytes:
        """Reads a body whose end never comes unless it is b""."""
        messages = [{"type": "http.request", "body": piece, "more_body": bool(piece)} for piece in pieces]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.sleep(60)
            return messages.pop(0)

        return await reader.read(Request({"type": "http", "headers": []}, receive))

    async def run() -> None:
        waiting = [asyncio.create_task(read(b"a" * 99)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(read(b"a" * 3)))  # the one that may go on
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await read(b"a" * 3)
        for task in waiting:
            with pytest.raises(HttpError) as caught:
                await task
            assert caught.value.status == 408
        assert await read(b"ab", b"c", b"") == b"abc"  # and all of it was given back

    asyncio.run(run())


def test_a_body_without_room_waits_until_others_were_worked_on() -> None:
    reader = body.BudgetedBodyReader(100, 200)
    most = 0

    async def work(at_once: asyncio.Semaphore) -> int:
        nonlocal most
        pieces = [b"a" * 30] * 3

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

        async with reader.read_and_hold_body(Request({"type": "http", "headers": []}, receive)) as data:
            async with at_once:
                most = max(most, reader.total_held_bytes)
                await asyncio.sleep(0.01)
            return len(data)

    async def run() -> None:
        one = asyncio.Semaphore(1)
        assert await asyncio.gather(*(work(one) for _ in range(6))) == [90] * 6

    asyncio.run(run())
    assert most <= 300 and reader.total_held_bytes == 0  # 200, and one body more


def test_many_pipelined_requests_are_answered_in_order(server: Server) -> None:
    raw = Raw(server)
    raw.say(
        b"".join(b"GET /p%d HTTP/1.1\r\nhost: localhost\r\nx-request-id: id-%d\r\n\r\n" % (i, i) for i in range(200))
    )
    raw.say(b"GET /last HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    _, text = raw.answer()
    assert re.findall(r"x-request-id: id-(\d+)", text) == [str(i) for i in range(200)]


def test_a_body_that_drips_is_408_however_short_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.5)
    reader = body.BudgetedBodyReader(100, 200)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    with pytest.raises(HttpError) as caught:  # and no 413, which it would be after 2 s
        asyncio.run(reader.read(Request({"type": "http", "headers": []}, receive)))
    assert caught.value.status == 408


def test_a_body_that_comes_fast_enough_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.5)
    reader = body.BudgetedBodyReader(2**20)
    left = [b"a" * 16 * 1024] * 20

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    assert len(asyncio.run(reader.read(Request({"type": "http", "headers": []}, receive)))) == 20 * 16 * 1024
