"""Edits of single logits against an oracle in plain Python."""

import math
from array import array
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.batch import UNKNOWN_TOKEN, Chunk
from headstart.core.request import SamplingParams
from headstart.model.sampling.logit_edits import LogitEdits, num_output_tokens

VOCAB = 8


def chunk_of(sampling: SamplingParams, prompt: list[int], outputs: list[int], request_id: str = "r") -> Chunk:
    history = array("i", [*prompt, *outputs])
    start = len(history) - 1
    return Chunk(request_id, history[start:], start, (1,), start, 1, sampling, len(prompt), history)


def edited_by_oracle(logits: list[float], s: SamplingParams, prompt: list[int], outputs: list[int]) -> list[float]:
    x = list(logits)
    for i in {*prompt, *outputs}:
        x[i] = x[i] / s.repetition_penalty if x[i] > 0 else x[i] * s.repetition_penalty
    for i, count in Counter(outputs).items():
        x[i] -= s.frequency_penalty * count + s.presence_penalty
    for i, bias in s.logit_bias:
        x[i] += bias
    if len(outputs) < s.min_tokens:
        for i in s.stop_token_ids:
            if i < VOCAB:
                x[i] = -math.inf
    return x


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    presence_penalty=st.sampled_from([0.0, 0.25, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, VOCAB + 2), max_size=2, unique=True).map(tuple),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PARAMS, TOKENS.filter(bool), TOKENS), min_size=1, max_size=4), st.integers(0, 1000))
def test_edits_are_the_oracles(rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    edits = LogitEdits(VOCAB)
    chunks = {i: chunk_of(*row, request_id=str(i)) for i, row in enumerate(rows)}
    got = logits.clone()
    assert edits.apply(got, {i: c for i, c in chunks.items() if edits.row_needs_edits(c)}) == {}
    for i, (s, prompt, outputs) in enumerate(rows):
        assert got[i].tolist() == pytest.approx(edited_by_oracle(logits[i].tolist(), s, prompt, outputs), rel=1e-4)


def test_presence_and_frequency_ignore_the_prompt_but_repetition_does_not() -> None:
    edits = LogitEdits(VOCAB)
    x = torch.full((1, VOCAB), 4.0)
    sampling = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0)
    edits.apply(x, {0: chunk_of(sampling, [1, 1, 2], [2, 3, 3])})
    assert x[0].tolist() == [4, 2, 0.5, 0, 4, 4, 4, 4]


def test_grown_history_is_counted_though_the_prompt_is_remembered() -> None:
    edits = LogitEdits(VOCAB)
    sampling = SamplingParams(repetition_penalty=2.0)
    for outputs in ([], [5], [5, 6]):
        x = torch.full((1, VOCAB), 4.0)
        edits.apply(x, {0: chunk_of(sampling, [1], outputs)})
        assert [i for i, v in enumerate(x[0].tolist()) if v == 2] == [1, *outputs]


def test_dropped_request_is_forgotten_so_that_its_id_can_come_again() -> None:
    edits = LogitEdits(VOCAB)
    sampling = SamplingParams(repetition_penalty=2.0)
    edits.apply(torch.ones(1, VOCAB), {0: chunk_of(sampling, [1], [])})
    edits.drop(["r", "never seen"])
    x = torch.full((1, VOCAB), 4.0)
    edits.apply(x, {0: chunk_of(sampling, [7], [])})
    assert x[0].tolist() == [4, 4, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31])
def test_bias_out_of_the_vocabulary_fails_its_row_and_touches_no_other(bad: int) -> None:
    edits = LogitEdits(VOCAB)
    x = torch.zeros(3, VOCAB)
    good = chunk_of(SamplingParams(logit_bias=((2, 5.0),)), [1], [])
    errors = edits.apply(x, {0: good, 1: chunk_of(SamplingParams(logit_bias=((bad, 5.0),)), [1], []), 2: good})
    assert list(errors) == [1]
    assert f"id {bad}" in errors[1]
    assert x[1].tolist() == [0] * VOCAB
    assert x[0].tolist() == x[2].tolist() == [0, 0, 5, 0, 0, 0, 0, 0]


def test_plain_row_wants_no_edit() -> None:
    edits = LogitEdits(VOCAB)
    assert not edits.row_needs_edits(chunk_of(SamplingParams(min_tokens=2, stop_token_ids=(1,)), [1], [1, 2]))
    assert edits.row_needs_edits(chunk_of(SamplingParams(min_tokens=3, stop_token_ids=(1,)), [1], [1, 2]))


def test_the_unknown_token_of_a_chunk_planned_ahead_counts_as_an_output() -> None:
    """With min_tokens 2 the second token may not end the output, also if the first is not known yet."""
    sampling = SamplingParams(min_tokens=2, stop_token_ids=(1,))
    known = chunk_of(sampling, [3, 4], [5, 6])
    ahead = known._replace(token_ids=array("i", [UNKNOWN_TOKEN]), history=known.history[:-1], from_previous=0)
    assert num_output_tokens(ahead) == num_output_tokens(known) == 2
    assert not LogitEdits(VOCAB).row_needs_edits(ahead)
    assert LogitEdits(VOCAB).row_needs_edits(ahead._replace(history=known.history[:-2]))
