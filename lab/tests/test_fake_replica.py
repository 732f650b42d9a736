"""The fake replica as its users meet it: a process, HTTP on a socket, and a prefix cache that evicts."""

import asyncio
import json
import re
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from server.harness import PATIENCE, wait_for

from headstart_lab.runners.fake_replica import Cache, Replica, Settings


@contextmanager
def fake(*flags: str) -> Iterator[str]:
    """A replica whose tokens take a millisecond, unless the flags say otherwise; gives its URL."""
    command = [
        sys.executable,
        "-m",
        "headstart_lab.runners.fake_replica",
        "--ttft-ms",
        "1",
        "--token-ms",
        "1",
        *flags,
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


def events(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def post(url: str, path: str = "/v1/completions", **body: object) -> httpx.Response:
    return httpx.post(url + path, json={"model": "fake", **body}, timeout=PATIENCE)


def running(url: str) -> int:
    found = re.search(r"^vllm:num_requests_running\{.*\} (\d+)$", httpx.get(url + "/metrics").text, re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake() as found:
        yield found


def test_a_stream_has_all_its_tokens_and_its_usage_only_if_that_is_asked_for(url: str) -> None:
    prompt = list(range(40))
    found = events(post(url, prompt=prompt, max_tokens=3, stream=True).text)
    assert [event["choices"][0]["text"] for event in found] == [" token"] * 3
    assert [event["choices"][0]["finish_reason"] for event in found] == [None, None, "length"]
    told = {"include_usage": True}
    *_, last = events(post(url, prompt=prompt, max_tokens=3, stream=True, stream_options=told).text)
    assert last["choices"] == [] and last["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (40, 3)


def test_a_chat_is_answered_in_its_own_form(url: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    whole = post(url, "/v1/chat/completions", messages=messages, max_tokens=2).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": " token token"}
    assert whole["usage"]["prompt_tokens"] == len("user\nhello\n")
    parts = events(post(url, "/v1/chat/completions", messages=messages, max_tokens=2, stream=True).text)
    assert [part["choices"][0]["delta"]["content"] for part in parts] == [" token"] * 2


def test_bodies_may_come_in_chunks(url: str) -> None:
    body = json.dumps({"prompt": [5] * 20, "max_tokens": 1}).encode()
    reply = httpx.post(url + "/v1/completions", content=iter([body[:7], body[7:]]), timeout=PATIENCE)
    assert reply.request.headers["transfer-encoding"] == "chunked" and reply.json()["usage"]["prompt_tokens"] == 20


def test_one_connection_serves_many_requests_in_turn(url: str) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=1)) as client:
        for size in range(1, 4):
            reply = client.post("/v1/completions", json={"prompt": [1] * size, "max_tokens": 1})
            assert reply.json()["usage"]["prompt_tokens"] == size


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": ["a"]}', b'{"prompt": [1], "max_tokens": -1}']
)
def test_what_is_no_request_is_refused(url: str, body: bytes) -> None:
    assert httpx.post(url + "/v1/completions", content=body).status_code == 400


def test_routers_find_what_they_ask_for(url: str) -> None:
    assert httpx.get(url + "/health").status_code == 200
    assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "fake"
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0' in httpx.get(url + "/metrics").text
    assert post(url, "/tokenize", prompt="ab").json() == {"count": 2, "tokens": [97, 98]}
    assert httpx.get(url + "/nothing").status_code == post(url, "/v1/nothing").status_code == 404


def test_who_hangs_up_leaves_nothing_behind() -> None:
    with fake("--token-ms", "5") as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        body = {"prompt": [1] * 64, "max_tokens": 1_000_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            pieces = reply.iter_raw()
            next(pieces)
            assert running(url) == 1
        wait_for(lambda: running(url) == 0)
        assert "kv_cache_usage_perc" in httpx.get(url + "/metrics").text


def test_stamps_say_when_request_and_tokens_were_there() -> None:
    with fake("--stamps", "--ttft-ms", "30") as url:
        first, *rest = events(post(url, prompt="a", max_tokens=4, stream=True).text)
    received, written = map(float, first["choices"][0]["text"].split())
    times = [written, *(float(event["choices"][0]["text"]) for event in rest)]
    assert len(times) == 4 and times == sorted(times) and received < written


def test_in_steps_answers_advance_at_the_same_moments() -> None:
    async def moments(settings: Settings) -> list[float]:
        replica = Replica(settings)
        now = replica.loop.time()
        answer = SimpleNamespace(advance=lambda: None)
        handles = [replica.schedule(answer, now + later) for later in (10.0, 20.0, 110.0)]
        return [handle.when() - now for handle in handles]

    one, other, last = asyncio.run(moments(Settings(token_ms=60_000, steps=True)))
    assert 10 < one == other <= 60 + 1 and last == pytest.approx(one + 60)
    assert asyncio.run(moments(Settings(token_ms=60_000))) == pytest.approx([10, 20, 110])


def test_the_cache_evicts_what_was_used_longest_ago() -> None:
    cache = Cache(Settings(num_blocks=4, block_size=2))
    first, second = array("i", [1, 2, 3, 4, 5]), array("i", [6, 7, 8, 9, 10])
    for prompt in (first, second):
        cached, blocks = cache.take(prompt)
        assert (cached, len(blocks)) == (0, 2)
        cache.release(blocks)
    cached, blocks = cache.take(first)
    assert cached == 4
    cache.release(blocks)
    cache.release(cache.take(array("i", range(20, 24)))[1])
    assert cache.take(first)[0] == 4 and cache.take(second)[0] == 0


def test_a_prompt_that_finds_no_room_is_not_kept() -> None:
    cache = Cache(Settings(num_blocks=2, block_size=2))
    _, blocks = cache.take(array("i", [1, 2, 3, 4]))
    assert cache.take(array("i", [5, 6, 7, 8])) == (0, []) and cache.usage == 1.0
    cache.release(blocks)
    assert cache.take(array("i", [1, 2, 3, 4]))[0] == 3  # one token is always computed
