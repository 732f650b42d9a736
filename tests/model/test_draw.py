"""The filters against an oracle in plain Python, and the distribution of what is drawn."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.request import SamplingParams
from headstart.model.sampling.draw import draw_tokens, unnormalised_filtered_probabilities

NEAR = 1e-5  # a set that is decided by less than this in probability is left out of the comparison


def softmax(logits: list[float], temperature: float) -> list[float]:
    best = max(logits)
    weights = [math.exp((x - best) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def kept_by_oracle(logits: list[float], s: SamplingParams) -> set[int] | None:
    """Ids that remain, ties of the last one included; None if rounding could decide."""
    probs = softmax(logits, s.temperature)
    if any(abs(p - s.min_p * max(probs)) < NEAR for p in probs if s.min_p):
        return None
    kept = {i for i, p in enumerate(probs) if p >= s.min_p * max(probs)}
    if 0 < s.top_k < len(probs):
        floor = sorted((probs[i] if i in kept else 0.0 for i in range(len(probs))), reverse=True)[s.top_k - 1]
        kept = {i for i in kept if probs[i] >= floor}
    if s.top_p < 1:
        total, reached = sum(probs[i] for i in kept), 0.0
        for p in sorted((probs[i] for i in kept), reverse=True):
            reached += p
            if abs(reached - s.top_p * total) < NEAR:
                return None
            if reached >= s.top_p * total:
                kept = {i for i in kept if probs[i] >= p}
                break
    return kept


def params_of_any_kind() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.floats(0.05, 2.0),
        top_k=st.integers(0, 12),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
        min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
    )


@settings(max_examples=200, deadline=None)
@given(
    # Quarters: exact in every type, and with many ties.
    rows=st.lists(st.lists(st.integers(-16, 16), min_size=9, max_size=9), min_size=1, max_size=4),
    params=st.lists(params_of_any_kind(), min_size=4, max_size=4),
)
def test_filters_keep_what_the_oracle_keeps(rows: list[list[int]], params: list[SamplingParams]) -> None:
    logits = [[x / 4 for x in row] for row in rows]
    probs = unnormalised_filtered_probabilities(torch.tensor(logits), params[: len(rows)])
    for row, s, got in zip(logits, params, probs, strict=False):
        expected = kept_by_oracle(row, s)
        if expected is None:
            continue
        oracle = softmax(row, s.temperature)
        kept = set(got.nonzero()[:, 0].tolist())
        assert {i for i in kept if oracle[i] > 1e-30} == {i for i in expected if oracle[i] > 1e-30}
        for i in expected:
            assert got[i].item() == pytest.approx(oracle[i], rel=1e-4, abs=1e-30)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_flat_nucleus_wider_than_every_guess_is_exact(top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9000) * 0.01
    logits[1, 7] = 30.0  # a peaked row beside it is settled by the first guess
    kept = unnormalised_filtered_probabilities(logits.clone(), [SamplingParams(top_p=top_p)] * 2)
    order = logits[0].double().softmax(-1).sort(descending=True)
    needed = int((order.values.cumsum(-1) < top_p).sum()) + 1
    assert abs(int((kept[0] > 0).sum()) - needed) <= 2
    assert set(order.indices[: needed - 2].tolist()) <= set(kept[0].nonzero()[:, 0].tolist())
    assert kept[1].nonzero().tolist() == [[7]]


def test_ties_of_the_last_kept_value_are_kept_whatever_their_order() -> None:
    probs = unnormalised_filtered_probabilities(torch.tensor([[1.0, 0.0, 1.0, 1.0]]), [SamplingParams(top_k=2)])
    assert probs[0].nonzero()[:, 0].tolist() == [0, 2, 3]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e30])
def test_extreme_temperatures_give_finite_probabilities(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-math.inf, 2.0, 1.0]])
    probs = unnormalised_filtered_probabilities(logits, [SamplingParams(temperature=temperature)] * 2)
    assert probs.isfinite().all()
    assert probs[1, 0] == 0
    assert probs.sum(-1).tolist() == pytest.approx([1, 1], rel=1e-5)


def test_draws_the_token_whose_share_of_the_unit_interval_holds_the_number() -> None:
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3]).log()
    numbers = [0.0, 0.1999, 0.2001, 0.6999, 0.7001, 1 - 2**-53]
    drawn = draw_tokens(logits.repeat(6, 1), [SamplingParams()] * 6, numbers)
    assert drawn.tolist() == [0, 0, 2, 2, 3, 3]


def test_largest_number_never_draws_an_excluded_token_behind_the_last() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000:] = -math.inf
    assert draw_tokens(logits, [SamplingParams()], [1 - 2**-53]).item() == 3999


def test_smallest_number_never_draws_an_excluded_token_before_the_first() -> None:
    logits = torch.tensor([[-math.inf, -math.inf, 1.0, 0.0]])
    assert draw_tokens(logits, [SamplingParams()], [0.0]).item() == 2


def test_draws_follow_the_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    count = 20_000
    numbers = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    drawn = draw_tokens(logits.repeat(count, 1), [SamplingParams(temperature=0.7)] * count, numbers)
    seen = torch.bincount(drawn, minlength=5).double()
    expected = torch.tensor(softmax(logits.tolist(), 0.7)).double() * count
    assert ((seen - expected) ** 2 / expected).sum().item() < 23.5  # chi-square, 4 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("vocab_size", [7, 3001, 50_000])
def test_probabilities_are_bit_equal_alone_and_in_a_batch(vocab_size: int) -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, vocab_size) * 2
    kinds = [
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(top_k=5),
        SamplingParams(min_p=0.1),
        SamplingParams(),
    ]
    params = [kinds[i % 4] for i in range(9)]
    together = unnormalised_filtered_probabilities(logits.clone(), params)
    for i in range(9):
        assert torch.equal(
            unnormalised_filtered_probabilities(logits[i : i + 1].clone(), params[i : i + 1])[0], together[i]
        )
