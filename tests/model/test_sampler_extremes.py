"""Every combination of legal sampling parameters on any finite logits gives a token and finite log-probabilities."""

import json
import math
from array import array

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headstart.apis.openapi import request_body_schema
from headstart.core.batch import Chunk
from headstart.core.request import SamplingParams
from headstart.model.kernels.library import kernel_library_in_use
from headstart.model.sampling.sampler import Sampler
from headstart.openai.bounds import INT31_MAX
from headstart.openai.generation_fields import MAX_BIAS, ChatGenerationFields

VOCAB = 40
HUGE, TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
DENORMAL = 1e-45  # the smallest float32 above 0
ROW_VALUES = (HUGE, -HUGE, 1e38, -1e38, 3e38, TINY, -TINY, DENORMAL, 0.0, -0.0, 1.0, -1.0, 60.0, -60.0)


PROPERTIES = request_body_schema(ChatGenerationFields)["requestBody"]["content"]["application/json"]["schema"][
    "properties"
]


def extremes(name: str) -> st.SearchStrategy[float]:
    """The ends of a parameter's range, what is next to them, and its default."""
    schema = PROPERTIES[name]
    above_low = "exclusiveMinimum" in schema
    low, high = schema["exclusiveMinimum" if above_low else "minimum"], schema["maximum"]
    default = getattr(SamplingParams(), name)
    values = [math.nextafter(low, high), 1e-38, 1e-9, default, 1.0, math.nextafter(high, low), high]
    return st.sampled_from([value for value in [*([] if above_low else [low]), *values] if low <= value <= high])


PARAMS = st.builds(
    SamplingParams,
    temperature=extremes("temperature").filter(lambda value: value == 0 or value >= 1e-5),
    top_k=st.sampled_from([0, 1, 2, VOCAB - 1, VOCAB, INT31_MAX]),
    top_p=extremes("top_p"),
    min_p=extremes("min_p"),
    presence_penalty=extremes("presence_penalty"),
    frequency_penalty=extremes("frequency_penalty"),
    repetition_penalty=extremes("repetition_penalty"),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-MAX_BIAS, 0.0, DENORMAL, MAX_BIAS]), max_size=VOCAB
    ).map(lambda bias: tuple(sorted(bias.items()))),
    min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.sampled_from([(), (0, 1), tuple(range(VOCAB)), tuple(range(1, VOCAB + 5))]),
    seed=st.sampled_from([None, 0, -(2**63), 2**63 - 1]),
    logprobs=st.sampled_from([None, 0, 20]),
)
LOGITS = st.one_of(
    st.sampled_from(ROW_VALUES).map(lambda value: [value] * VOCAB),
    st.lists(st.sampled_from(ROW_VALUES), min_size=VOCAB, max_size=VOCAB),
    st.lists(st.floats(-HUGE, HUGE, width=32), min_size=VOCAB, max_size=VOCAB),
)
ROWS = st.lists(st.tuples(PARAMS, LOGITS, st.lists(st.integers(0, VOCAB - 1), max_size=6)), min_size=1, max_size=4)
WRECKING = SamplingParams(temperature=1.0, repetition_penalty=1e-38, logprobs=2)


def chunk_of(sampling: SamplingParams, outputs: list[int], request_id: str) -> Chunk:
    history = array("i", [*range(VOCAB), *outputs])
    start = len(history) - 1
    return Chunk(request_id, history[start:], start, (1,), start, 1, sampling, VOCAB, history)


@pytest.mark.parametrize("native", [False, True])
@settings(max_examples=300, deadline=None)
@given(rows=ROWS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@example(rows=[(WRECKING, [60.0, *[-60.0] * (VOCAB - 1)], [])], dtype=torch.float32)
def test_a_token_comes_out_whatever_is_legal(
    native: bool, rows: list[tuple[SamplingParams, list[float], list[int]]], dtype: torch.dtype
) -> None:
    logits = torch.tensor([values for _, values, _ in rows], dtype=torch.float32).to(dtype)
    logits.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)  # rounding to bfloat16 may give an infinity
    sampler = Sampler(VOCAB, kernels=kernel_library_in_use() if native else None)
    chunks = [chunk_of(sampling, outputs, f"r{at}") for at, (sampling, _, outputs) in enumerate(rows)]
    for (sampling, _, _), row in zip(rows, sampler.sample(logits, chunks), strict=True):
        assert row.error is None and len(row.token_ids) == 1
        assert 0 <= row.token_ids[0] < VOCAB
        if sampling.logprobs is not None:
            (entry,) = row.logprobs
            assert entry.token_id == row.token_ids[0]
            json.dumps([entry.logprob, *(value for _, value in entry.top)], allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(values=LOGITS, top=st.sampled_from([0, 20]))
def test_prompt_logprobs_of_finite_logits_are_finite(values: list[float], top: int) -> None:
    chunk = chunk_of(SamplingParams(prompt_logprobs=top), [], "r")._replace(start=0)
    (entry,) = Sampler(VOCAB).prompt_logprobs(torch.tensor([values]), chunk)
    json.dumps([entry.logprob, *(value for _, value in entry.top)], allow_nan=False)


def test_what_min_tokens_forbids_is_not_drawn_while_anything_else_is_left() -> None:
    sampling = SamplingParams(temperature=1e38, min_tokens=9, stop_token_ids=(0, 1))
    logits = torch.full((1, VOCAB), -HUGE)
    logits[:, 0] = HUGE
    sampler = Sampler(VOCAB)
    drawn = {sampler.sample(logits, [chunk_of(sampling, [], f"r{at}")])[0].token_ids[0] for at in range(200)}
    assert not drawn & {0, 1} and len(drawn) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_min_tokens_forbids_every_token_it_is_ignored(temperature: float) -> None:
    sampling = SamplingParams(
        temperature=temperature, min_tokens=9, stop_token_ids=tuple(range(VOCAB)), logit_bias=((7, 100.0),)
    )
    logits = torch.zeros(2, VOCAB)
    rows = Sampler(VOCAB).sample(
        logits, [chunk_of(sampling, [], "r"), chunk_of(SamplingParams(temperature=0.0), [], "s")]
    )
    assert [row.token_ids for row in rows] == [(7,), (0,)]


@pytest.mark.parametrize("penalty", [1e-38, 1e-45, 5e-324, 1e-3])
def test_a_tiny_repetition_penalty_saturates_and_keeps_the_order_of_signs(penalty: float) -> None:
    logits = torch.tensor([[50.0, -50.0, *[3.0] * (VOCAB - 2)]])
    sampling = SamplingParams(
        temperature=1.0, repetition_penalty=penalty, logit_bias=tuple((i, -100.0) for i in range(2, VOCAB))
    )
    assert Sampler(VOCAB).sample(logits, [chunk_of(sampling, [], "r")])[0].error is None
