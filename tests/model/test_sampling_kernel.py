"""The sampling kernel against its twin in torch and against float64: tokens, filters, log-probabilities, bounds."""

import math
from array import array
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model.guarded import Guards

from headstart.core.batch import Chunk
from headstart.core.request import SamplingParams
from headstart.model.kernels.library import KernelLibrary, load_kernels, runnable_variants
from headstart.model.kernels.sampling import RowSampler, RowSamplingParams
from headstart.model.sampling.draw import draw_tokens
from headstart.model.sampling.logit_edits import LogitEdits
from headstart.model.sampling.sampler import Sampler

RUNNABLE = runnable_variants()
DTYPES = [torch.bfloat16, torch.float32]
NEAR = 1e-6  # where a draw or a filter is decided by less, the twins may differ
INT31_MAX = 2**31 - 1


@pytest.fixture(params=RUNNABLE, scope="module")
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    found = load_kernels(request.param)
    if found.kernels is None:
        pytest.skip(found.note)
    return found.kernels


class Oracle(NamedTuple):
    """Probabilities of one row after its filters, in float64, and whether less than NEAR decided a filter."""

    kept: "np.ndarray[tuple[int], np.dtype[np.float64]]"  # [V], sum 1
    is_near: bool

    def is_near_a_boundary(self, uniform: float) -> bool:
        ends = np.concatenate([[0.0], self.kept.cumsum()])
        return self.is_near or bool(np.abs(ends - uniform).min() <= NEAR)


def oracle(logits: torch.Tensor, s: SamplingParams) -> Oracle:
    """Of one row [V], by sorting."""
    x = logits.float()
    exponents = (x - x.max()) / s.temperature  # in float32, as both twins
    probs = torch.exp(exponents.double()).numpy()
    probs = np.where(exponents.numpy() < -87, 0.0, probs)
    probs /= probs.sum()
    is_near = False
    if s.min_p > 0:
        floor = s.min_p * probs.max()
        is_near |= bool((np.abs(probs - floor) <= NEAR * floor).any()) and s.min_p < 1
        probs = np.where(probs < floor * (1 - 1e-9), 0.0, probs)
    if 0 < s.top_k < len(probs):
        floor = np.sort(probs)[-s.top_k]
        is_near |= bool(((probs != floor) & (np.abs(probs - floor) <= NEAR * floor)).any())
        probs = np.where(probs < floor, 0.0, probs)
    if s.top_p < 1:
        values = np.sort(probs)[::-1]
        reached = values.cumsum() / probs.sum()
        at = min(int((reached < s.top_p).sum()), len(values) - 1)
        # between equal values the sum decides nothing
        ends = np.append(values[1:] != values[:-1], True)
        is_near |= bool((ends & (np.abs(reached - s.top_p) <= NEAR)).any())
        is_near |= bool(((probs != values[at]) & (np.abs(probs - values[at]) <= NEAR * values[at])).any())
        probs = np.where(probs < values[at], 0.0, probs)
    return Oracle(probs / probs.sum(), is_near)


def task_of(s: SamplingParams, uniform: float) -> RowSamplingParams:
    return RowSamplingParams(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, uniform=uniform)


def assert_like_the_twin(
    kernels: KernelLibrary, logits: torch.Tensor, params: list[SamplingParams], uniform: list[float]
) -> int:
    """Tokens are the twin's, or a boundary is near. Returns how many were the twin's."""
    found = RowSampler(kernels, logits.shape[1])(logits, list(map(task_of, params, uniform))).tokens
    expected = draw_tokens(logits.float().clone(), params, uniform).tolist()
    for row, s, number, token, twin in zip(logits, params, uniform, found, expected, strict=True):
        if token != twin:
            assert oracle(row, s).is_near_a_boundary(number), (token, twin, s, number)
        assert row[token] > -math.inf
    return sum(token == twin for token, twin in zip(found, expected, strict=True))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-5, 1e-3, 0.3, 0.7, 1.0, 1.5, 2.0, 1e30]),
    top_k=st.sampled_from([0, 0, 2, 3, 20, 39, 40, 300, INT31_MAX]),
    top_p=st.sampled_from([5e-324, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, math.nextafter(1, 0), 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
)
UNIFORM = st.one_of(st.sampled_from([0.0, 2**-53, 0.5, 1 - 2**-53]), st.floats(0, 1, exclude_max=True))
SIZES = st.sampled_from([1, 2, 15, 16, 17, 40, 255, 256, 257, 300, 1000, 9000])


@st.composite
def rows_of_any_kind(draw: st.DrawFn) -> torch.Tensor:
    """Logits [R, V] with ties, -inf, and values from 0.01 to 1e38."""
    count, size = draw(st.integers(1, 4)), draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rows = torch.randn((count, size), generator=generator) * draw(st.sampled_from([0.0, 0.01, 1.0, 6.0, 1e4, 1e38]))
    if draw(st.booleans()):
        rows = (rows * 4).round() / 4  # many ties
    rows = rows.clamp(-3e38, 3e38)
    rows[torch.rand((count, size), generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.99]))] = -math.inf
    rows[:, draw(st.integers(0, size - 1))] = draw(st.sampled_from([0.0, 3.0, 40.0]))
    return rows.to(draw(st.sampled_from(DTYPES)))


@settings(max_examples=400, deadline=None)
@given(
    logits=rows_of_any_kind(),
    params=st.lists(PARAMS, min_size=4, max_size=4),
    uniform=st.lists(UNIFORM, min_size=4, max_size=4),
)
@example(
    logits=torch.zeros(4, 300),
    params=[SamplingParams(top_p=0.5), SamplingParams(top_k=2), SamplingParams(min_p=1.0), SamplingParams()],
    uniform=[0.9999, 0.25, 0.3, 1 - 2**-53],
)
def test_tokens_are_the_twins(
    kernels: KernelLibrary, logits: torch.Tensor, params: list[SamplingParams], uniform: list[float]
) -> None:
    count = len(logits)
    assert_like_the_twin(kernels, logits, params[:count], uniform[:count])


KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=0.3, temperature=1.7),
    SamplingParams(top_k=20, top_p=0.8),
    SamplingParams(top_k=3000, top_p=0.99),
    SamplingParams(min_p=0.05, top_p=0.9),
    SamplingParams(top_k=50),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32_000, 152_064])
@pytest.mark.parametrize("scale", [0.02, 1.0, 6.0])
def test_large_vocabularies_flat_and_peaked(
    kernels: KernelLibrary, dtype: torch.dtype, size: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn((len(KINDS), size), generator=generator) * scale).to(dtype)
    uniform = torch.rand(len(KINDS), generator=generator, dtype=torch.float64).tolist()
    assert assert_like_the_twin(kernels, logits, KINDS, uniform) >= len(KINDS) - 2


@pytest.mark.parametrize("s", KINDS, ids=str)
def test_filters_leave_what_sorting_leaves(kernels: KernelLibrary, s: SamplingParams) -> None:
    """Draws at the middle of every kept token's share, and nothing but kept tokens at random."""
    logits = torch.randn((1, 400), generator=torch.Generator().manual_seed(3)) * 2
    kept = oracle(logits[0], s).kept
    ends = kept.cumsum()
    wide = np.flatnonzero(kept > 1e-5)
    uniform = [float(ends[token] - kept[token] / 2) for token in wide]
    tasks = [task_of(s, number) for number in uniform]
    assert RowSampler(kernels, 400)(logits.repeat(len(tasks), 1), tasks).tokens == wide.tolist()


@pytest.mark.parametrize("s", [*KINDS[:5], SamplingParams(min_p=0.2)], ids=str)
def test_draws_follow_the_distribution(kernels: KernelLibrary, s: SamplingParams) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -math.inf, 2.0]])
    count = 20_000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    tokens = RowSampler(kernels, 7)(logits.repeat(count, 1), [task_of(s, number) for number in uniform]).tokens
    expected = oracle(logits[0], s).kept * count
    seen = np.bincount(tokens, minlength=7)
    assert (seen[expected == 0] == 0).all()
    some = expected > 0
    assert ((seen[some] - expected[some]) ** 2 / expected[some]).sum() < 27.9  # chi-square, <= 6 degrees, p >= 1e-4


@settings(max_examples=60, deadline=None)
@given(logits=rows_of_any_kind(), params=st.lists(PARAMS, min_size=4, max_size=4), seed=st.integers(0, 99))
def test_a_row_is_the_same_alone_in_any_batch_and_with_any_threads(
    kernels: KernelLibrary, logits: torch.Tensor, params: list[SamplingParams], seed: int
) -> None:
    logits = logits.repeat(8, 1)
    uniform = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    tasks = [task_of(params[index % 4], number) for index, number in enumerate(uniform)]
    for task in tasks:
        task.num_top = 2
    sampler = RowSampler(kernels, logits.shape[1])
    together = sampler(logits, tasks)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        backwards = sampler(logits.flip(0), tasks[::-1])
    finally:
        torch.set_num_threads(before)
    alone = [sampler(logits[index : index + 1], [task]) for index, task in enumerate(tasks)]
    assert together.tokens == backwards.tokens[::-1] == [one.tokens[0] for one in alone]
    assert together.logprobs == backwards.logprobs[::-1] == [one.logprobs[0] for one in alone]


# ---- edits and log-probabilities ------------------------------------------------------------------------------------


def chunk_of(sampling: SamplingParams, outputs: list[int], request_id: str) -> Chunk:
    history = array("i", [1, 2, 3, *outputs])
    start = len(history) - 1
    return Chunk(request_id, history[start:], start, (1,), start, 1, sampling, 3, history)


EDITED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 1e-38, 3e38]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    presence_penalty=st.sampled_from([0.0, 0.25, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, 19), st.floats(-100, 100), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([(), (0, 5), tuple(range(20)), tuple(range(25))]),
    logprobs=st.sampled_from([None, 0, 3, 30]),
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            EDITED,
            st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=20, max_size=20),
            st.lists(st.integers(0, 19), max_size=6),
        ),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_edited_rows_and_logprobs_are_the_twins(
    kernels: KernelLibrary, rows: list[tuple[SamplingParams, list[float], list[int]]], dtype: torch.dtype
) -> None:
    logits = torch.tensor([values for _, values, _ in rows]).to(dtype)
    chunks = [chunk_of(sampling, outputs, f"r{at}") for at, (sampling, _, outputs) in enumerate(rows)]
    found = Sampler(20, kernels=kernels).sample(logits, chunks)
    expected = Sampler(20).sample(logits, chunks)
    for row, chunk, fused, twin in zip(logits, chunks, found, expected, strict=True):
        if fused.token_ids != twin.token_ids:
            assert chunk.sampling.temperature > 0
            edited = row[None].float().clone()
            LogitEdits(20).apply(edited, {0: chunk})
            assert oracle(edited[0], chunk.sampling).is_near  # no draw of these keys is near a boundary itself
            continue
        assert len(fused.logprobs) == len(twin.logprobs) == (chunk.sampling.logprobs is not None)
        for one, other in zip(fused.logprobs, twin.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
            order = sorted(range(20), key=lambda token: (-row[token].item(), token))
            assert [token for token, _ in one.top] == order[: chunk.sampling.logprobs or 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 256, 5000])
def test_logprobs_of_given_tokens(kernels: KernelLibrary, size: int, dtype: torch.dtype) -> None:
    logits = (torch.randn((3, size), generator=torch.Generator().manual_seed(size)) * 4).to(dtype)
    logits[1, : size // 2] = -math.inf
    tokens = [0, size // 2, size - 1]
    found = RowSampler(kernels, size)(logits, [RowSamplingParams(token=token, num_top=9) for token in tokens]).logprobs
    reference = logits.double().log_softmax(-1).clamp(min=-9999)
    for row, token, entry in zip(reference, tokens, found, strict=True):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
        best = row.sort(descending=True, stable=True)
        width = min(9, size)
        assert [token for token, _ in entry.top] == best.indices[:width].tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values[:width].tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_logprobs_are_of_the_raw_logits_at_any_temperature(kernels: KernelLibrary, temperature: float) -> None:
    logits = torch.randn((2, 300), generator=torch.Generator().manual_seed(5)) * 3
    tasks = [RowSamplingParams(temperature=temperature, top_p=0.9, uniform=0.4, num_top=2)] * 2
    found = RowSampler(kernels, 300)(logits, tasks)
    reference = logits.double().log_softmax(-1)
    for row, token, entry in zip(reference, found.tokens, found.logprobs, strict=True):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-5)


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so(kernels: KernelLibrary, bad: float, dtype: torch.dtype) -> None:
    logits = torch.zeros((3, 300), dtype=dtype)
    logits[1] = -math.inf
    logits[1, 299] = bad
    found = RowSampler(kernels, 300)(
        logits, [RowSamplingParams(temperature=1.0, top_p=0.5, uniform=0.5, num_top=3)] * 3
    )
    assert [math.isfinite(best) for best in found.best] == [True, False, True]
    assert found.tokens[0] == found.tokens[2] and found.logprobs[0] == found.logprobs[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 255, 257, 1000])
def test_nothing_but_the_row_is_read(kernels: KernelLibrary, size: int, dtype: torch.dtype) -> None:
    """Memory beside the rows is NaN: read, it would poison sums and maxima."""
    guards = Guards()
    logits = guards.put((torch.randn((len(KINDS), size), generator=torch.Generator().manual_seed(1))).to(dtype))
    tasks = [task_of(s, 0.4) for s in KINDS]
    for task in tasks:
        task.num_top = 4
    found = RowSampler(kernels, size)(logits, tasks)
    again = RowSampler(kernels, size)(logits.clone(), tasks)
    assert found == again and guards.intact()
    assert all(entry is not None and math.isfinite(entry.logprob) for entry in found.logprobs)


def test_what_does_not_fit_is_refused(kernels: KernelLibrary) -> None:
    sampler = RowSampler(kernels, 10)
    with pytest.raises(ValueError, match="2 x 10"):
        sampler(torch.zeros(2, 9), [RowSamplingParams(), RowSamplingParams()])
    with pytest.raises(ValueError, match="float64"):
        sampler(torch.zeros((1, 10), dtype=torch.float64), [RowSamplingParams()])
    with pytest.raises(ValueError, match="token 10 lies outside"):
        sampler(torch.zeros(1, 10), [RowSamplingParams(token=10, num_top=0)])
    assert sampler(torch.zeros(0, 10), []).tokens == []
