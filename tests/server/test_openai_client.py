"""The openai package, unmodified, against `headstart serve` with the real engine."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from server.fake_engine import Gate
from server.harness import Server, fake_server, wait_for

PROMPT = "The quick brown fox jumps over the lazy dog, and the lazy dog does not mind it at all. " * 2
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_second_identical_request_takes_its_prefix_over(client: OpenAI) -> None:
    first, second = (
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0) for _ in range(2)
    )
    assert first.usage is not None and second.usage is not None
    assert first.usage.prompt_tokens_details is not None and second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (first.usage.prompt_tokens - 1) // 16 * 16 and cached > 0
    assert first.choices[0].text == second.choices[0].text
    assert first.usage.completion_tokens == second.usage.completion_tokens == 8


def test_the_clients_own_cache_fields_mean_what_it_says_they_mean(client: OpenAI) -> None:
    def cached(**fields: Any) -> int:
        content = [{"type": "text", "text": f"{PROMPT} A tale of caches.", **fields.pop("part", {})}]
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=1, **fields
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    hints: Any = {"prompt_cache_key": "tale", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}
    first, again = cached(**hints), cached(**hints)
    assert first < again
    assert cached(prompt_cache_options={"mode": "explicit"}) == 0
    marked = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    assert cached(prompt_cache_options={"mode": "explicit"}, part=marked) == again
    with pytest.raises(openai.BadRequestError, match="ttl"):
        cached(prompt_cache_options={"ttl": "a while"})


def test_a_chat_streamed_is_the_chat_whole(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    text, reasons, usage = "", [], None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content and reasons[-1] == whole.choices[0].finish_reason
    assert whole.usage is not None and usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_two_choices_with_a_seed_are_repeatable_and_differ(client: OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(model="tiny", prompt="Once", max_tokens=12, n=2, seed=7, temperature=1.5)
        return [choice.text for choice in answer.choices]

    first, second = texts(), texts()
    assert first == second and first[0] != first[1]


def test_logprobs_of_both_apis(client: OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="Once", max_tokens=4, logprobs=3, temperature=0)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 4 and all(p is not None and p <= 0 for p in logprobs.token_logprobs)
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None and len(content.content) == 4
    for token in content.content:
        assert len(token.top_logprobs) == 3 and token.logprob == max(top.logprob for top in token.top_logprobs)
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = client.completions.create(**options, stop=stop).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(stop)]
    streamed = client.completions.create(**options, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.text


def test_echo_with_logprobs_covers_the_prompt(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=2, echo=True, logprobs=1, temperature=0
    )
    assert answer.choices[0].text.startswith("Once upon a time") and answer.usage is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == answer.usage.prompt_tokens + 2
    assert logprobs.token_logprobs[0] is None and all(p is not None for p in logprobs.token_logprobs[1:])


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"temperature": 5}, openai.BadRequestError, "invalid_value"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found"),
        ({"suffix": "x"}, openai.BadRequestError, "unsupported_parameter"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_become_the_clients_own_exceptions(
    client: OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    options: Any = {"model": "tiny", "prompt": "a", **fields, "stream": stream}
    with pytest.raises(kind) as caught:
        client.completions.create(**options)
    assert caught.value.code == code and caught.value.request_id


def test_raw_responses_carry_the_request_id(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine" and raw.parse().choices


def test_many_async_clients_get_what_each_alone_would_get(real_server: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:

            async def streamed(i: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=f"{i} {PROMPT}", max_tokens=10, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            alone = [await streamed(i) for i in range(6)]
            assert await asyncio.gather(*(streamed(i) for i in range(6))) == alone

    asyncio.run(run())


def test_leaving_a_stream_frees_its_blocks(client: OpenAI, real_server: Server) -> None:
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=900, stream=True, temperature=0)
    next(iter(stream))
    stream.close()
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        wait_for(lambda name=name: real_server.metric(name) == 0)


def test_keys_and_failures_in_mid_stream_are_told_apart(folder: str, tmp_path: Path, gate: Gate) -> None:
    model = gate.holds(folder, 20, "poison=66&after=20")
    with fake_server(model, tmp_path / "log", api_key=("right",)) as server:
        url = f"{server.url}/v1"
        with (
            OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
        with OpenAI(base_url=url, api_key="right", max_retries=0) as client:
            stream = client.completions.create(model="fake", prompt=[66, 1], max_tokens=30, stream=True)
            gate.open()
            with pytest.raises(openai.APIError, match="failed in the engine"):
                list(stream)
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model="fake", prompt=[66, 1], max_tokens=30)
            with pytest.raises(openai.PermissionDeniedError):
                client.post("../reset_prefix_cache", cast_to=object)


def test_overload_is_a_rate_limit_and_the_clients_retries_get_over_it(folder: str, tmp_path: Path, gate: Gate) -> None:
    def ask(client: AsyncOpenAI, number: int) -> "list[asyncio.Task[Any]]":
        return [
            asyncio.create_task(client.completions.create(model="fake", prompt=[i], max_tokens=1))
            for i in range(number)
        ]

    async def flood(url: str) -> None:
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            calls = ask(client, 8)
            while sum(call.done() for call in calls) < 7:  # one of them waits at the gate
                await asyncio.wait([call for call in calls if not call.done()], return_when=asyncio.FIRST_COMPLETED)
            gate.open()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(answer, openai.RateLimitError) for answer in answers) == 7
            assert not any(isinstance(answer, openai.InternalServerError) for answer in answers)
        gate.close()
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=10) as patient:
            calls = ask(patient, 3)
            await asyncio.to_thread(wait_for, lambda: server.metric("vllm:admission_rejections_total") >= 7 + 2)
            gate.open()
            assert len(await asyncio.gather(*calls)) == 3  # Retry-After does its work

    with fake_server(gate.holds(folder, 0), tmp_path / "log", max_num_queued_reqs=1) as server:
        asyncio.run(flood(f"{server.url}/v1"))
