"""Small requests with large answers: echo built once per prompt, the event loop free between pieces, little memory."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from server.fake_engine import Gate
from server.harness import Inside, Server, fake_server, inside, parse_events

from headstart.http.long_work import HUGE_BODY_BYTES, InlineOrThreadRunner
from headstart.openai.json_pieces import PIECE_BYTES
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.server import inference
from headstart.server.apis import choice_apis
from headstart.server.app import build_app

SHAPES: list[dict[str, Any]] = [
    {"echo": True, "logprobs": 3},
    {"echo": True},
    {"prompt_logprobs": 2},
    {"logprobs": 2, "prompt_logprobs": 2},
    {"echo": True, "logprobs": 0, "max_tokens": 0},
    {"return_token_ids": True, "echo": True, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_pieces_an_answer_is_the_same(folder: str, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    async def run() -> None:
        async with inside(folder) as server:
            body = {"prompt": [[7, 8, 9] * 60, [10] * 3], "n": 3, "max_tokens": 4, **shape}
            answers: list[Any] = []
            for limit in (10**9, 0):
                monkeypatch.setattr(inference, "LARGE_ANSWER_ENTRIES", limit)
                answer = await server.client.post("/v1/completions", json=body)
                assert answer.status_code == 200 and ("content-length" in answer.headers) == (limit > 0)
                answers.append({**answer.json(), "id": "", "created": 0, "usage": None})
            assert answers[0] == answers[1]
            first, second, third, other = answers[0]["choices"][:4]
            assert {**first, "index": 0} == {**second, "index": 0} == {**third, "index": 0} != {**other, "index": 0}

    asyncio.run(run())


@pytest.mark.parametrize("shape", [{}, {"logprobs": 2}])
def test_a_stream_shows_the_echo_of_every_choice_first(folder: str, shape: dict[str, Any]) -> None:
    async def run() -> None:
        async with inside(folder) as server:
            body = {"prompt": [[7, 8, 9] * 60, [10] * 3], "n": 2, "max_tokens": 3, "echo": True, **shape}
            whole = (await server.client.post("/v1/completions", json=body)).json()
            streamed = parse_events((await server.client.post("/v1/completions", json={**body, "stream": True})).text)
            assert streamed.pop() == "[DONE]"
            for choice in whole["choices"]:
                chunks = [e["choices"][0] for e in streamed if e["choices"][0]["index"] == choice["index"]]
                assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
                if shape:
                    for name, values in choice["logprobs"].items():
                        assert [item for chunk in chunks for item in chunk["logprobs"][name]] == values

    asyncio.run(run())


def test_a_choice_ahead_of_the_one_with_the_logprobs_waits_for_them(folder: str, gate: Gate) -> None:
    """News of the first choice, which has the logprobs, come when the others have ended."""

    async def run() -> None:
        async with inside(folder) as server:
            engine = server.engine
            take = engine._take_news
            late: list[Any] = []

            def first_comes_last(outputs: list[Any], stats: Any) -> None:
                late.extend(output for output in outputs if output.request_id.endswith("-0"))
                take([output for output in outputs if not output.request_id.endswith("-0")], stats)
                if not outputs:  # a heartbeat, once the others have ended
                    take(late, stats)

            engine._take_news = first_comes_last
            body = {"prompt": [7] * 20, "n": 3, "max_tokens": 2, "echo": True, "logprobs": 1, "stream": True}
            events = parse_events((await server.client.post("/v1/completions", json=body)).text)
            chunks = [event["choices"][0] for event in events[:-1]]
            for index in range(3):
                first = next(chunk for chunk in chunks if chunk["index"] == index)
                assert first["logprobs"]["token_logprobs"][1:20] == [-0.25] * 19
                assert sum(len(chunk["logprobs"]["tokens"]) for chunk in chunks if chunk["index"] == index) == 22

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_built_once_per_prompt(folder: str, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    read = EchoedPrompt._read
    built: list[int] = []

    def counted(self: EchoedPrompt, *args: Any) -> str:
        built.append(len(self.token_ids))
        return read(self, *args)

    monkeypatch.setattr(EchoedPrompt, "_read", counted)

    async def run() -> None:
        async with inside(folder) as server:
            body = {"prompt": [[7] * 30, [8] * 40], "n": 16, "max_tokens": 1, "echo": True, "logprobs": 1}
            assert (await server.client.post("/v1/completions", json={**body, "stream": stream})).status_code == 200

    asyncio.run(run())
    assert built == [30, 40]


@pytest.mark.parametrize("stream", [False, True])
def test_other_requests_are_answered_while_a_large_answer_is_sent(folder: str, stream: bool) -> None:
    async def run() -> None:
        async with inside(f"{folder}?length=4096") as server:
            body = {"prompt": [[7] * 2000] * 2, "n": 4, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
            assert await answered_meanwhile(server, body) > 5

    asyncio.run(run())


def test_prompts_that_a_stream_shows_later_are_written_a_slice_at_a_time(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first choice opens the stream, then the echoes of 15 prompts come at once: 4,500 x 21 log-probabilities."""
    turn, made, name = 0, list[int](), choice_apis.token_text_or_bytes

    def counted(*args: Any) -> str:
        made.append(turn)
        return name(*args)

    monkeypatch.setattr(choice_apis, "token_text_or_bytes", counted)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def run() -> None:
        async with inside(folder) as server:
            engine = server.engine
            take = engine._take_news
            late: list[Any] = []

            def first_comes_first(outputs: list[Any], stats: Any) -> None:
                late.extend(output for output in outputs if not output.request_id.endswith("-0"))
                take([output for output in outputs if output.request_id.endswith("-0")], stats)
                if not outputs:  # a heartbeat, once all have ended
                    take(late, stats)
                    late.clear()

            engine._take_news = first_comes_first
            body = {"prompt": [[7] * 300] * 16, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True}
            counting = asyncio.create_task(count())
            events = parse_events((await server.client.post("/v1/completions", json=body)).text)
            counting.cancel()
            assert len({event["choices"][0]["index"] for event in events[:-1]}) == 16

    asyncio.run(run())
    most = PIECE_BYTES // 8  # a name and its log-probability take 8 bytes at least
    assert len(made) > 16 * 300 * 20 and max(made.count(turn) for turn in set(made)) <= most


async def answered_meanwhile(server: Inside, body: dict[str, Any]) -> int:
    """Return how many /livez are answered between the first and the last byte of the body."""
    app = build_app(server.state)
    num_answered = 0
    marks: list[int] = []

    async def probe() -> None:
        nonlocal num_answered
        while True:
            assert (await server.client.get("/livez")).status_code == 200
            num_answered += 1
            await asyncio.sleep(0)  # an answer in this process may come without a turn of the loop

    async def receive() -> dict[str, Any]:
        if asked:
            return {"type": "http.request", "body": asked.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            marks.append(num_answered)

    asked = [json.dumps(body).encode()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
    scope |= {"query_string": b"", "headers": [], "client": ("127.0.0.1", 1), "server": ("x", 80), "root_path": ""}
    probing = asyncio.create_task(probe())
    await app({**scope, "http_version": "1.1", "scheme": "http"}, receive, send)
    probing.cancel()
    return marks[-1] - marks[0]


class PeakMemory:
    """The most memory that a process holds more than at the beginning, looked at all the time."""

    def __init__(self, server: Server) -> None:
        self._process = psutil.Process(server.process.pid)
        self._base = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.megabytes = 0.0

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.megabytes = max(self.megabytes, (self._process.memory_info().rss - self._base) / 1e6)


@pytest.mark.parametrize("stream", [False, True])
def test_the_audited_request_is_answered_in_little_memory(folder: str, tmp_path: Path, stream: bool) -> None:
    """8 prompts of 2,300 tokens, n=16, echo, logprobs=20: an answer of 100 MB. It took 1.2 GB."""
    with fake_server(f"{folder}?length=4096", tmp_path / "log") as server, server.client() as client:
        prompts = [[(7 * i + j) % 400 + 20 for j in range(2300)] for i in range(8)]
        body = {"prompt": prompts, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
        assert client.post("/v1/completions", json={"prompt": [7]}).status_code == 200
        with PeakMemory(server) as peak, client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            assert sum(map(len, answer.iter_raw())) > 50_000_000
        assert peak.megabytes < 150


def test_tokens_and_their_texts_come_off_the_loop_and_in_pieces(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with inside(folder) as server:
            server.state.long_work = InlineOrThreadRunner(100, 200)
            encode, threads = server.state.loaded_model.tokenizer.encode, []

            def watched(*args: Any, **options: Any) -> Any:
                threads.append(threading.current_thread())
                return encode(*args, **options)

            monkeypatch.setattr(server.state.loaded_model.tokenizer, "encode", watched)
            for count in (1, 20, 60, 100):
                text = "fox brown " * count
                body = {"prompt": text, "return_token_strs": True}
                answer = (await server.client.post("/tokenize", json=body)).json()
                assert "".join(answer["token_strs"]) == text and len(answer["tokens"]) == answer["count"]
                back = await server.client.post("/detokenize", json={"tokens": answer["tokens"]})
                assert back.json() == {"prompt": text}
            assert [thread is threading.main_thread() for thread in threads] == [True, False, False, False]

    asyncio.run(run())


def test_the_largest_bodies_are_worked_on_one_at_a_time() -> None:
    async def run() -> None:
        work, now, most = InlineOrThreadRunner(), 0, 0
        lock = threading.Lock()

        def one() -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.02)
            with lock:
                now -= 1

        await asyncio.gather(*(work.run(HUGE_BODY_BYTES + 1, one) for _ in range(4)))
        assert most == 1

    asyncio.run(run())
