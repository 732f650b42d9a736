"""wire: a request that crosses the process border is the request that was sent."""

import dataclasses
from array import array

import pytest

from headstart.core.engine import EngineStats
from headstart.core.request import CacheMode, Request, Retention, SamplingParams
from headstart.core.store import StoreStats
from headstart.server.wire import (
    Answer,
    FrameSplitter,
    News,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
    plain_stats,
    stats_of,
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
        retention=Retention(80, 60.5),
    )
    plain = Request("r", request.prompt)
    same = [
        field.name
        for field in dataclasses.fields(Request)
        if getattr(request, field.name) == getattr(plain, field.name)
    ]
    assert same == ["request_id", "prompt"], "give every other field a value that is not its default"
    (submit,) = Submit.of([request])
    (payload,) = FrameSplitter().feed(encode_frame(submit))
    message = decode_to_engine(payload)
    assert isinstance(message, Submit)
    (received,) = message.requests()
    assert received == request and isinstance(received.retention, Retention)


@pytest.mark.parametrize("store", [None, STORE, StoreStats()])
def test_what_is_known_of_a_store_crosses_the_border_with_every_step_and_as_an_answer(store: StoreStats | None) -> None:
    stats = EngineStats(num_steps=5, store=store, compute_tokens_per_s=1.5)
    news, answer = (
        decode_from_engine(payload)
        for payload in FrameSplitter().feed(encode_frame(News([], stats)) + encode_frame(Answer(1, plain_stats(stats))))
    )
    assert isinstance(news, News) and news.stats == stats
    assert isinstance(answer, Answer) and stats_of(answer.value) == stats
