"""Clients that hang up or do not read: their work stops, their blocks are free, and other clients are unaffected."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from server.fake_engine import Gate
from server.harness import PATIENCE, Server, fake_server, gone_at_once, inside, turns, until, wait_for

from headstart.http.long_work import HUGE_BODY_BYTES
from headstart.server import inference
from headstart.server.app import build_app

HELD = 40  # tokens: who asked for more is not finished before the gate is open


class Slow(NamedTuple):
    """A server whose requests are held at HELD tokens."""

    server: Server
    gate: Gate


@pytest.fixture(scope="module")
def slow_server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    room = tmp_path_factory.mktemp("slow")
    gate = Gate(room / "gate")
    with fake_server(gate.holds(folder, HELD), room / "log") as running:
        yield Slow(running, gate)


@pytest.fixture
def slow(slow_server: Slow) -> Server:
    return slow_server.server


def open_request(server: Server, **body: object) -> socket.socket:
    """Sends a completion request over a socket of its own."""
    address = urlsplit(server.url)
    payload = json.dumps({"prompt": [1, 2, 3] * 20, "max_tokens": 400, **body}).encode()
    connection = socket.create_connection((address.hostname, address.port), PATIENCE)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


def running(server: Server) -> float:
    return server.metric("vllm:num_requests_running")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 4}, {"n": 4, "stream": True}])
def test_hanging_up_frees_the_blocks_of_every_choice(slow: Server, fields: dict[str, object]) -> None:
    def hung_up() -> list[str]:
        return [line for line in slow.log.splitlines() if "client_closed" in line]

    aborted, before = slow.metric("vllm:request_success_total"), len(hung_up())
    connection = open_request(slow, **fields)
    wait_for(lambda: running(slow) == fields.get("n", 1))
    assert slow.metric("vllm:kv_cache_usage_perc") > 0
    connection.close()
    wait_for(lambda: running(slow) == 0 and slow.metric("vllm:kv_cache_usage_perc") == 0)
    (line,) = wait_for(lambda: hung_up()[before:])
    assert slow.metric("vllm:request_success_total") - aborted == fields.get("n", 1)
    assert json.loads(line)["status"] == 499 and json.loads(line)["finish_reason"] == "abort"


def test_a_stop_string_ends_the_work_in_the_engine_too(slow: Server) -> None:
    before = slow.metric("vllm:generation_tokens_total")
    body = {"prompt": "the quick brown fox", "max_tokens": 400, "stop": "quick"}
    answer = slow.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["stop_reason"] == "quick"
    wait_for(lambda: running(slow) == 0)  # held as it is, it would not have ended by itself
    assert slow.metric("vllm:generation_tokens_total") - before <= HELD


def test_hanging_up_among_others_leaves_them_unharmed(slow_server: Slow) -> None:
    slow, gate = slow_server
    victims = [open_request(slow, stream=bool(i % 2)) for i in range(6)]
    kept = open_request(slow, max_tokens=HELD + 20, return_token_ids=True)
    wait_for(lambda: running(slow) == 7)
    for victim in victims:
        victim.close()
    wait_for(lambda: running(slow) == 1)
    gate.open()
    data = b""
    while b"}}}" not in data:
        data += kept.recv(65536)
    gate.close()
    answer = json.loads(data.split(b"\r\n\r\n", 1)[1])
    assert answer["choices"][0]["token_ids"] == [1, 2, 3] * 20
    kept.close()
    wait_for(lambda: running(slow) == 0)


def test_hanging_up_in_the_middle_of_a_body_leaves_nothing(slow: Server) -> None:
    address = urlsplit(slow.url)
    for _ in range(20):
        with socket.create_connection((address.hostname, address.port), PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
    assert slow.get("/health").status_code == 200 and running(slow) == 0


def test_a_client_that_does_not_read_delays_no_other(folder: str, tmp_path) -> None:
    with fake_server(folder, tmp_path / "log") as server:
        readers = []
        for _ in range(8):
            connection = open_request(server, stream=True, n=16, max_tokens=440, logprobs=5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            readers.append(connection)
        # the engine finishes them all, although no client reads their output
        wait_for(lambda: server.metric("vllm:generation_tokens_total") == 8 * 16 * 440)
        for _ in range(5):
            body = {"prompt": [9], "max_tokens": 20}
            assert server.post("/v1/completions", json=body).status_code == 200
        for connection in readers:
            connection.close()
        wait_for(lambda: server.log.count('"path": "/v1/completions"') == 8 + 5)


def test_a_slow_reader_gets_everything(folder: str, tmp_path) -> None:
    with fake_server(folder, tmp_path / "log") as server:
        connection = open_request(server, stream=True, max_tokens=300)
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(2000)
            time.sleep(0.001)
        assert data.count(b'"finish_reason":"length"') == 1
        connection.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_what_has_not_begun_when_its_client_disconnects_is_dropped(folder: str, path: str) -> None:
    """Work on large bodies waits for its turn: that of clients that are gone is never done."""
    user = [{"role": "user", "content": "a"}]
    own: dict[str, object] = {"prompt": "a"} if path == "/v1/completions" else {"messages": user, "max_tokens": 1}
    own = {"input": "a"} if path == "/v1/responses" else own
    body = json.dumps({**own, "metadata": {"x": "y" * HUGE_BODY_BYTES}})

    async def run() -> None:
        async with inside(folder) as server:
            begun: list[bytes] = []
            original = inference.parse_json_object

            def noted(data: bytes, max_numbers: int | None = None) -> object:
                begun.append(data)
                return original(data, max_numbers)

            inference.parse_json_object = noted
            try:
                app = build_app(server.state)
                async with server.state.long_work._huge.turn("another"):
                    asks = [asyncio.create_task(gone_at_once(app, path, body.encode())) for _ in range(5)]
                    await until(lambda: server.state.bodies.total_held_bytes >= 5 * len(body))
                    await turns()  # all of them wait, and their clients disconnect
                assert await asyncio.gather(*asks) == [499] * 5
            finally:
                inference.parse_json_object = original
            assert begun == [] and server.state.num_jobs == 0

    asyncio.run(run())
