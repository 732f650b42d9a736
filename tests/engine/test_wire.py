"""wire: a request that crosses the process border is the request that was sent."""

import dataclasses
from array import array

import pytest

from headstart.core.cache.block_store import StoreStats
from headstart.core.engine_info import EngineStats
from headstart.core.request import CacheMode, Request, RetentionHint, SamplingParams
from headstart.engine.wire import (
    CallResult,
    EngineUpdate,
    FrameSplitter,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
    stats_from_values,
    stats_to_builtins,
)

STORE = StoreStats(num_blocks=3, misses={"gone": 2, "corrupt": 1}, degraded="the disk is full", load_bytes_per_s=0.5)


def test_every_field_of_a_request_crosses_the_border() -> None:
    request = Request(
        request_id="r",
        prompt=array("i", [0, 1, 2**31 - 1]),
        sampling=SamplingParams(max_tokens=3, seed=-5, logit_bias=((3, -1.5),), stop_token_ids=(7,), logprobs=2),
        arrival=1.5,
        domain=b"\x00\xff",
        adapter="a",
        priority=-2,
        cache=CacheMode.READ_ONLY,
        tenant="acme",
        retention=RetentionHint(80, 60.5),
        is_traced=True,
        boundary=2,
    )
    plain = Request("r", request.prompt)
    same = [
        field.name
        for field in dataclasses.fields(Request)
        if getattr(request, field.name) == getattr(plain, field.name)
    ]
    assert same == ["request_id", "prompt"], "give every other field a value that is not its default"
    (submit,) = Submit.messages_from_requests([request])
    (payload,) = FrameSplitter().feed(encode_frame(submit))
    message = decode_to_engine(payload)
    assert isinstance(message, Submit)
    (received,) = message.requests()
    assert received == request and isinstance(received.retention, RetentionHint)


def test_choices_travel_together_with_prompts_and_parameters_once() -> None:
    prompts = [array("i", range(start, start + 5000)) for start in (0, 1)]
    sampling = SamplingParams(logit_bias=tuple((token, 1.0) for token in range(1000)))
    requests = [
        Request(
            f"r-{number}",
            prompts[number // 16],
            dataclasses.replace(sampling, seed=number, max_tokens=number + 1, prompt_logprobs=number % 16 or None),
        )
        for number in range(32)
    ]
    (submit,) = Submit.messages_from_requests(requests)
    frame = encode_frame(submit)
    assert len(frame) < 2 * 5000 * 4 + 1000 * 16 + 32 * 40
    (payload,) = FrameSplitter().feed(frame)
    message = decode_to_engine(payload)
    assert isinstance(message, Submit)
    received = message.requests()
    assert received == requests
    assert len({id(request.prompt) for request in received}) == 2
    assert len({id(request.sampling.logit_bias) for request in received}) == 1
    others = [dataclasses.replace(request, tenant="other") for request in requests]
    assert [
        request for part in Submit.messages_from_requests(requests + others) for request in part.requests()
    ] == requests + others


@pytest.mark.parametrize("store", [None, STORE, StoreStats()])
def test_what_is_known_of_a_store_crosses_the_border_with_every_step_and_as_an_answer(store: StoreStats | None) -> None:
    stats = EngineStats(num_steps=5, store=store, compute_tokens_per_s=1.5)
    news, answer = (
        decode_from_engine(payload)
        for payload in FrameSplitter().feed(
            encode_frame(EngineUpdate([], stats)) + encode_frame(CallResult(1, stats_to_builtins(stats)))
        )
    )
    assert isinstance(news, EngineUpdate) and news.stats == stats
    assert isinstance(answer, CallResult) and stats_from_values(answer.value) == stats
