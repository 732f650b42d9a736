"""The sampler as the runner uses it: rows beside rows, streams, log-probabilities, and rows that fail alone."""

import math
from array import array
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.batch import Chunk, RowError, RowErrorKind, RowResult
from headstart.core.request import SamplingParams
from headstart.model.kernels.library import load_kernels, runnable_variants
from headstart.model.sampling.sampler import Sampler

VOCAB = 50
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, seed=7, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.3, seed=7, top_k=5),
    SamplingParams(temperature=0.9, min_p=0.05, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias=((3, 4.0), (4, -100.0))),
    SamplingParams(temperature=1.0, min_tokens=9, stop_token_ids=(0, 1, 2)),
)


def chunk_of(
    sampling: SamplingParams, prompt: list[int] | None = None, outputs: list[int] | None = None, request_id: str = "r"
) -> Chunk:
    prompt = prompt or [1, 2, 3]
    history = array("i", [*prompt, *(outputs or [])])
    start = len(history) - 1
    return Chunk(request_id, history[start:], start, (1,), start, 1, sampling, len(prompt), history)


MakeSampler = Callable[..., Sampler]
RUNNABLE = runnable_variants()


@pytest.fixture(params=["none", *RUNNABLE], scope="module")
def make_sampler(request: pytest.FixtureRequest) -> MakeSampler:
    """Sampler with one variant of the kernels, or with torch alone."""
    found = load_kernels(request.param)
    if found.kernels is None and request.param != "none":
        pytest.skip(found.note)
    return partial(Sampler, kernels=found.kernels)


def random_logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_best(make_sampler: MakeSampler, dtype: torch.dtype) -> None:
    logits = random_logits(4, dtype=dtype)
    logits[1, 20] = logits[1, 30] = 40.0
    rows = make_sampler(VOCAB).sample(logits, [chunk_of(SamplingParams(temperature=0.0))] * 4)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert rows == [RowResult((token,)) for token in expected]
    assert expected[1] == 20


def test_logits_are_not_modified(make_sampler: MakeSampler) -> None:
    logits = random_logits(len(KINDS))
    before = logits.clone()
    make_sampler(VOCAB).sample(logits, [chunk_of(s, outputs=[5, 5]) for s in KINDS])
    assert torch.equal(logits, before)


def test_top_k_of_one_and_vanishing_temperature_are_greedy_even_among_ties(make_sampler: MakeSampler) -> None:
    logits = torch.zeros(2, VOCAB)
    chunks = [chunk_of(SamplingParams(temperature=1.0, top_k=1)), chunk_of(SamplingParams(temperature=1e-9))]
    assert [row.token_ids for row in make_sampler(VOCAB).sample(logits, chunks)] == [(0,), (0,)]


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_row_is_the_same_alone_and_in_any_batch(make_sampler: MakeSampler, kinds: list[int], seed: int) -> None:
    logits = random_logits(len(kinds), seed)
    chunks = [chunk_of(KINDS[kind], outputs=[9] * (i % 3), request_id=f"r{i}") for i, kind in enumerate(kinds)]
    together = make_sampler(VOCAB).sample(logits, chunks)
    backwards = make_sampler(VOCAB).sample(logits.flip(0), chunks[::-1])[::-1]
    alone = [make_sampler(VOCAB).sample(logits[i : i + 1], [chunks[i]])[0] for i in range(len(kinds))]
    assert together == backwards == alone


def test_alternatives_among_ties_do_not_depend_on_other_rows(make_sampler: MakeSampler) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 30:] = 1.0  # twenty are the best
    few, many = (chunk_of(SamplingParams(temperature=0.0, logprobs=num)) for num in (3, 25))
    entries = [row.logprobs[0] for row in make_sampler(VOCAB).sample(logits, [few, many])]
    assert [token for token, _ in entries[1].top] == [*range(30, 50), *range(5)]
    assert entries[0].top == entries[1].top[:3]
    assert make_sampler(VOCAB).sample(logits[:1], [few])[0].logprobs == (entries[0],)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@settings(max_examples=25, deadline=None)
@given(kinds=st.lists(st.sampled_from(range(len(KINDS))), min_size=2, max_size=8), where=st.integers(0, 7))
def test_poisoned_row_fails_alone(make_sampler: MakeSampler, poison: float, kinds: list[int], where: int) -> None:
    where %= len(kinds)
    logits = random_logits(len(kinds))
    chunks = [chunk_of(KINDS[kind], outputs=[9], request_id=f"r{i}") for i, kind in enumerate(kinds)]
    healthy = make_sampler(VOCAB).sample(logits, chunks)
    if poison == -math.inf:
        logits[where] = poison  # one of them is an ordinary mask; a whole row is not
    else:
        logits[where, 11] = poison
    rows = make_sampler(VOCAB).sample(logits, chunks)
    assert rows[where] == RowResult(error=RowError(RowErrorKind.NON_FINITE, "the model computed no finite logits"))
    assert [r for i, r in enumerate(rows) if i != where] == [r for i, r in enumerate(healthy) if i != where]


def test_bad_bias_fails_its_row_alone(make_sampler: MakeSampler) -> None:
    logits = random_logits(3)
    good = chunk_of(SamplingParams(temperature=0.0, logit_bias=((5, 1.0),)))
    bad = chunk_of(SamplingParams(temperature=1.0, logit_bias=((VOCAB, 100.0),)))
    rows = make_sampler(VOCAB).sample(logits, [good, bad, good])
    assert rows[1].error is not None and rows[1].error.kind is RowErrorKind.REQUEST
    assert rows[1].token_ids == ()
    assert [rows[0], rows[2]] == make_sampler(VOCAB).sample(logits[[0, 2]], [good, good])


def test_min_tokens_is_ignored_where_it_forbids_all_that_the_model_allows(make_sampler: MakeSampler) -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, 4] = 1.0
    chunks = [chunk_of(SamplingParams(min_tokens=1, stop_token_ids=(4,))), chunk_of(SamplingParams())]
    rows = make_sampler(VOCAB).sample(logits, chunks)
    assert rows == [RowResult((4,)), RowResult((4,))]


def test_seeded_stream_depends_on_seed_and_position_only(make_sampler: MakeSampler) -> None:
    logits = torch.zeros(1, VOCAB)

    def stream(sampler: Sampler, seed: int | None, request_id: str) -> list[int]:
        outputs: list[int] = []
        for _ in range(12):
            chunk = chunk_of(SamplingParams(seed=seed), outputs=outputs, request_id=request_id)
            outputs += sampler.sample(logits, [chunk])[0].token_ids
        return outputs

    first = stream(make_sampler(VOCAB, seed=1), 7, "a")
    assert stream(make_sampler(VOCAB, seed=2), 7, "b") == first  # neither the engine's seed nor the request's id matter
    assert stream(make_sampler(VOCAB, seed=1), 8, "a") != first
    assert len(set(first)) > 3  # positions differ
    unseeded = stream(make_sampler(VOCAB, seed=1), None, "a")
    assert stream(make_sampler(VOCAB, seed=1), None, "a") == unseeded
    assert stream(make_sampler(VOCAB, seed=1), None, "b") != unseeded
    assert stream(make_sampler(VOCAB, seed=2), None, "a") != unseeded


def test_streams_of_neighbouring_seeds_are_uniform_together(make_sampler: MakeSampler) -> None:
    count = 5000
    chunks = [chunk_of(SamplingParams(seed=i)) for i in range(count)]
    rows = make_sampler(10).sample(torch.zeros(count, 10), chunks)
    seen = torch.bincount(torch.tensor([row.token_ids[0] for row in rows]), minlength=10).double()
    assert ((seen - count / 10) ** 2 / (count / 10)).sum().item() < 33.7  # chi-square, 9 degrees, p = 1e-4


def test_logprobs_are_of_the_raw_logits_and_sorted(make_sampler: MakeSampler) -> None:
    logits = random_logits(2)
    sampling = SamplingParams(temperature=0.3, top_k=2, logit_bias=((6, 50.0),), logprobs=4)
    row = make_sampler(VOCAB).sample(logits, [chunk_of(sampling), chunk_of(SamplingParams(temperature=0.0))])[0]
    reference = logits[0].double().log_softmax(-1)
    entry = row.logprobs[0]
    assert row.token_ids == (6,) == (entry.token_id,)
    assert entry.logprob == pytest.approx(reference[6].item(), abs=1e-5)
    best = reference.topk(4)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_zero_gives_the_token_only_and_none_gives_nothing(make_sampler: MakeSampler) -> None:
    chunks = [chunk_of(SamplingParams(temperature=0.0, logprobs=n)) for n in (0, None, 60)]
    rows = make_sampler(VOCAB).sample(random_logits(3), chunks)
    assert rows[0].logprobs[0].top == ()
    assert rows[1].logprobs == ()
    assert len(rows[2].logprobs[0].top) == VOCAB


def test_masked_alternatives_have_a_finite_logprob(make_sampler: MakeSampler) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = 0.0
    entry = make_sampler(VOCAB).sample(logits, [chunk_of(SamplingParams(temperature=0.0, logprobs=2))])[0].logprobs[0]
    assert entry.logprob == 0.0
    assert entry.top == ((3, 0.0), (0, -9999.0)) or entry.top[1][1] == -9999.0


def test_prompt_logprobs_are_of_the_next_prompt_tokens_only(make_sampler: MakeSampler) -> None:
    prompt, outputs = [4, 5, 6, 7], [8]
    history = array("i", [*prompt, *outputs])
    sampling = SamplingParams(prompt_logprobs=2)
    chunk = Chunk("r", history[1:], 1, (1,), 1, 1, sampling, len(prompt), history)
    logits = random_logits(4)
    whole = make_sampler(VOCAB).prompt_logprobs(logits, chunk)
    assert [entry.token_id for entry in whole] == [6, 7]
    assert [len(entry.top) for entry in whole] == [2, 2]
    assert whole[1].logprob == pytest.approx(logits[1].double().log_softmax(-1)[7].item(), abs=1e-5)
    pieces = [make_sampler(VOCAB).prompt_logprobs(logits[i : i + 1], chunk, offset=i) for i in range(4)]
    assert sum(pieces, ()) == whole


def test_prompt_logprobs_of_poisoned_logits_raise(make_sampler: MakeSampler) -> None:
    logits = random_logits(2)
    logits[0, 3] = math.nan
    with pytest.raises(FloatingPointError):
        make_sampler(VOCAB).prompt_logprobs(logits, chunk_of(SamplingParams(prompt_logprobs=0))._replace(start=0))


def test_history_can_grow_after_sampling(make_sampler: MakeSampler) -> None:
    chunk = chunk_of(SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0), outputs=[4])
    make_sampler(VOCAB).sample(random_logits(1), [chunk])
    chunk.history.append(5)  # raises BufferError while anything still views the array


def test_wrong_shape_is_our_own_mistake(make_sampler: MakeSampler) -> None:
    with pytest.raises(ValueError, match="2 rows x 50"):
        make_sampler(VOCAB).sample(random_logits(3), [chunk_of(SamplingParams())] * 2)
    assert make_sampler(VOCAB).sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.gpu
def test_gpu_chooses_what_the_cpu_chooses() -> None:
    logits = random_logits(len(KINDS))
    chunks = [chunk_of(s, outputs=[9], request_id=f"r{i}") for i, s in enumerate(KINDS)]
    on_cpu, on_gpu = (Sampler(VOCAB).sample(logits.to(device), chunks) for device in ("cpu", "cuda"))
    assert [row.token_ids for row in on_gpu] == [row.token_ids for row in on_cpu]
