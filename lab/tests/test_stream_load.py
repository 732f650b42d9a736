"""The client of the proxy lab: what it counts, and that nothing that goes wrong is counted as an answer."""

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.harness import PATIENCE

from headstart_lab.router.proxy_cost import QUICK, fake_replica
from headstart_lab.runners.stream_load import Client, Plan, run

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = b'data: {"text":" 1.000000 1.500000"}\n\n'
LATER = b'data: {"text":" 2.000000"}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
PLAN = Plan(("",), "fake", streams=2, tokens=2, stream_seconds=0.01, warm_up=0.0, seconds=0.3, limit=PATIENCE)


async def measured(plan: Plan) -> dict[str, Any]:
    """Return a client's findings in the time of the plan, or in longer and longer ones until there are any."""
    found = await run(plan)
    while not (found["errors"] or (found["requests"] and found["first_p50_ms"])) and plan.seconds < PATIENCE:
        plan = replace(plan, seconds=2 * plan.seconds)
        found = await run(plan)
    return found


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def found_of(*pieces: bytes, closes: bool = False) -> dict[str, Any]:
    """Return the client's findings at a server that answers every request by these pieces, one write each."""

    async def go() -> dict[str, Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while not closes or not writer.is_closing():
                    head = await reader.readuntil(b"\r\n\r\n")
                    size = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                    await reader.readexactly(int(size.split(b":")[1]))
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                    if closes:
                        writer.close()
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await measured(replace(PLAN, urls=(f"http://127.0.0.1:{port}",)))
        finally:
            server.close()

    return asyncio.run(go())


@pytest.mark.parametrize("cut", [1, 20, 40, len(FIRST) + 3])
def test_tokens_are_counted_however_they_are_cut(cut: int) -> None:
    stream = FIRST + LATER + DONE
    found = found_of(HEAD + chunk(stream[:cut]), chunk(stream[cut:]), END)
    assert found["errors"] == {} and found["requests"] > 0
    assert 2 * found["requests"] <= found["tokens"] <= 2 * found["requests"] + 2 * PLAN.streams


@pytest.mark.parametrize(
    ("pieces", "closes", "why"),
    [
        ((HEAD, chunk(FIRST)), True, "the connection was closed after 1 tokens"),
        ((HEAD, chunk(FIRST + LATER), END), False, "2 tokens of 2, no [DONE]"),
        ((HEAD, chunk(FIRST + DONE), END), False, "1 tokens of 2"),
        ((b"HTTP/1.1 503 -\r\ncontent-length: 0\r\n\r\n",), False, "HTTP 503"),
        ((b"something else\r\n\r\n",), True, "no HTTP"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(pieces: tuple[bytes, ...], closes: bool, why: str) -> None:
    found = found_of(*pieces, closes=closes)
    assert found["requests"] == 0 and found["errors"]
    assert all(text.startswith(why) for text in found["errors"]), found["errors"]


def test_times_are_those_without_the_replica(tmp_path: Path) -> None:
    with fake_replica(replace(QUICK, ttft_ms=200.0, token_ms=5.0), tmp_path) as replica:
        plan = replace(PLAN, urls=(replica.url,), tokens=3, warm_up=0.1, seconds=1.0)
        found = asyncio.run(measured(plan))
        wrong = asyncio.run(measured(replace(plan, tokens=-1, seconds=0.2)))
    with socket.socket() as taken:  # not a listening socket, and no other process on the machine can begin to
        taken.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
        gone = asyncio.run(measured(replace(plan, urls=(nowhere,), seconds=0.2)))
    assert found["errors"] == {} and json.dumps(found)
    assert found["ttft_p50_ms"] >= 199 and 0 < found["first_p50_ms"] < found["ttft_p50_ms"] - 190
    assert set(wrong["errors"]) == {"HTTP 400"} and wrong["first_p50_ms"] is None
    assert gone["requests"] == 0 and all(why.startswith("no connection") for why in gone["errors"])


def test_prompts_share_one_of_a_few_beginnings_and_are_new_behind_it() -> None:
    client = Client(replace(PLAN, prompt_bytes=200, prefixes=2))
    bodies = [json.loads(client.request("host").partition(b"\r\n\r\n")[2]) for _ in range(4)]
    prefixes = [body["messages"][0]["content"] for body in bodies]
    questions = [body["messages"][1]["content"] for body in bodies]
    assert len(set(prefixes)) == 2 and len(set(questions)) == 4
    assert {len(a) + len(b) for a, b in zip(prefixes, questions, strict=True)} == {200}


def test_too_many_errors_end_the_run() -> None:
    client = Client(PLAN)
    for _ in range(1001):
        client.fail("why")
    assert not client.is_open
