"""Speculation changes nothing but the number of steps: tokens, KV and books are those without drafts."""

from array import array
from collections.abc import Iterable

import pytest
from checking import (
    CheckingExecutor,
    Grammars,
    executor_of,
    expected_tokens,
    generate,
    make_engine,
    make_request,
    repeating_token,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.batch import Batch, Chunk, RowResult, StepResult
from headstart.core.engine import Engine
from headstart.core.request import CacheMode, FinishReason
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sequence import Sequence
from headstart.core.speculation.speculation_config import SpeculationConfig

DRAFTS = SpeculationConfig(num_speculative_tokens=7, prompt_lookup_max=4, prompt_lookup_min=2)
CYCLE = [11, 12, 13, 14, 15, 16]


def cycling(tokens: "array[int]") -> int:
    """A model that repeats CYCLE."""
    return CYCLE[(CYCLE.index(tokens[-1]) + 1) % len(CYCLE)] if tokens[-1] in CYCLE else CYCLE[0]


def num_steps(engine: Engine) -> int:
    return len(executor_of(engine).batches)


def chunks_of(engine: Engine) -> Iterable[Chunk]:
    return (chunk for batch in executor_of(engine).batches for chunk in batch.chunks)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 12),
            st.integers(1, 40),
            st.sampled_from(CacheMode),
            st.sampled_from(["", "a", "b"]),
            st.integers(-2, 4),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(16, 40),
    st.integers(4, 40),
    st.sampled_from([2, 4, 16]),
    st.booleans(),
    st.integers(1, 9),
)
def test_tokens_are_those_without_drafts(
    shapes: list[tuple[int, int, CacheMode, str, int]],
    num_blocks: int,
    budget: int,
    block_size: int,
    short: bool,
    num_drafts: int,
) -> None:
    config = SpeculationConfig(num_drafts, 4, 2)
    engine = make_engine(
        num_blocks,
        block_size,
        model=repeating_token,
        speculation=config,
        expects_short_outputs=short,
        max_batched_tokens=budget,
        max_seqs=4,
        max_model_len=min(48, (num_blocks - 1) * block_size),
        grammars=Grammars(),
    )
    requests = {
        str(number): make_request(
            str(number),
            [number % 3] * length,
            num_tokens,
            cache=mode,
            domain=tenant.encode(),
            tenant=tenant,
            stop=(4,) if forced == -2 else (),
            grammar=str(forced) if forced > 0 else None,
        )
        for number, (length, num_tokens, mode, tenant, forced) in enumerate(shapes)
        if length + num_tokens <= (num_blocks - 1) * block_size
    }
    found = generate(engine, *requests.values())
    for name, request in requests.items():
        most = min(request.sampling.max_tokens, engine.scheduler.limits.max_model_len - len(request.prompt))
        assert found[name] == expected_tokens(request.prompt, most, request.sampling.stop_token_ids, repeating_token)
    counters = engine.stats().counters
    assert counters.num_accepted_tokens <= counters.num_draft_tokens
    assert counters.generation_tokens == sum(map(len, found.values()))
    for batch in executor_of(engine).batches:
        assert sum(len(chunk.token_ids) for chunk in batch.chunks) <= budget
    pool = engine.scheduler.pool
    assert pool.num_free == pool.usable_capacity


def test_a_repetition_takes_fewer_steps() -> None:
    plain, drafted = (make_engine(40, model=cycling, speculation=config) for config in (None, DRAFTS))
    assert generate(plain, make_request("a", CYCLE * 2, 40)) == generate(drafted, make_request("a", CYCLE * 2, 40))
    assert num_steps(plain) == 40
    assert num_steps(drafted) <= 8
    counters = drafted.stats().counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens == 40 - num_steps(drafted)
    assert counters.num_drafts == num_steps(drafted) - 1


def test_blocks_of_rejected_drafts_are_free_after_the_step() -> None:
    engine = make_engine(40, 2, model=lambda tokens: len(tokens), speculation=DRAFTS)
    engine.add_request(make_request("a", [1, 2, 3, 4, 5, 6, 1, 2, 3], 8))
    seen = 0
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            assert len(seq.block_ids) <= -(-len(seq.token_ids) // 2)
            seen += 1
    assert seen


def test_rejected_drafts_are_never_published() -> None:
    """The draft after the first output is rejected; another prompt that contains it finds what is computed only."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    model = {10: 3, 11: 4, 12: 90}
    engine = make_engine(
        40, 2, model=lambda tokens: model.get(len(tokens), 50 + len(tokens) % 7), speculation=SpeculationConfig(7, 4, 1)
    )
    generate(engine, make_request("a", prompt, 8))
    assert engine.stats().counters.num_draft_tokens > engine.stats().counters.num_accepted_tokens
    generate(engine, make_request("b", [*prompt, 3, 4, 5, 6, 7, 8, 9], 1))
    engine.scheduler.pool.check_invariants()


def test_a_stop_token_inside_an_accepted_draft_ends_the_sequence() -> None:
    engine = make_engine(40, model=cycling, speculation=DRAFTS)
    engine.add_request(make_request("a", [*CYCLE, 77, *CYCLE[:4]], 40, stop=(77, 16)))
    outputs = run(engine)["a"]
    assert [token for output in outputs for token in output.token_ids] == [15, 16]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert all(
        16 not in chunk.token_ids[-chunk.num_logits + 1 :] for chunk in chunks_of(engine) if chunk.num_logits > 1
    )


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_a_draft_never_exceeds_max_tokens(max_tokens: int) -> None:
    engine = make_engine(40, model=cycling, speculation=DRAFTS)
    found = generate(engine, make_request("a", CYCLE * 2, max_tokens))
    assert found["a"] == expected_tokens(CYCLE * 2, max_tokens, model=cycling)
    assert max(chunk.start + len(chunk.token_ids) for chunk in chunks_of(engine)) <= 12 + max_tokens - 1 + (
        max_tokens == 1
    )


def test_earlier_outputs_are_drafts_of_their_own_domain_only() -> None:
    """The model says a long text without repetition; the second request repeats the text of the first."""
    prompt = [5, 6, 7, 8, 9]
    engine = make_engine(60, model=lambda tokens: (7 * len(tokens)) % 97, speculation=DRAFTS, max_model_len=60)
    for name, domain, mode in (
        ("first", b"a", CacheMode.READ_WRITE),
        ("other", b"b", CacheMode.READ_ONLY),
        ("bypass", b"a", CacheMode.BYPASS),
    ):
        generate(engine, make_request(name, prompt, 30, domain=domain, cache=mode))
        assert engine.stats().counters.num_drafts == 0, name
    generate(engine, make_request("second", prompt, 30, domain=b"a"))
    assert engine.stats().counters.num_accepted_tokens > 15
    assert engine.reset_prefix_cache()
    seen = engine.stats().counters.num_drafts
    generate(engine, make_request("third", prompt, 30, domain=b"a"))
    assert engine.stats().counters.num_drafts == seen


def test_a_row_that_is_not_finite_with_a_draft_is_computed_again_without() -> None:
    """Only the rejected draft overflows: the request does not fail because of a guess."""
    engine = make_engine(40, model=cycling, speculation=DRAFTS, poison=lambda chunk: chunk.num_logits > 1)
    found = generate(engine, make_request("a", CYCLE * 2, 12))
    assert found["a"] == expected_tokens(CYCLE * 2, 12, model=cycling)
    assert engine.stats().counters.num_row_errors == 0
    assert sum(chunk.num_logits > 1 for chunk in chunks_of(engine)) == 1


def test_a_row_that_is_never_finite_fails_alone() -> None:
    engine = make_engine(40, model=cycling, speculation=DRAFTS, poison=lambda chunk: chunk.start > 12)
    engine.add_request(make_request("a", CYCLE * 2, 12))
    assert run(engine)["a"][-1].finish_reason is FinishReason.ERROR


def test_no_sequence_is_preempted_for_a_draft() -> None:
    engine = make_engine(8, 4, model=cycling, speculation=DRAFTS, max_seqs=2)
    for name in "ab":
        engine.add_request(make_request(name, CYCLE, 7))
    run(engine)
    assert engine.stats().counters.num_preemptions == 0


def mixed_requests(engine: Engine) -> None:
    """Runs requests whose drafts are partly accepted, the second behind the KV of the first."""
    for name, prompt in (("a", [1, 2] * 4), ("b", [1, 2] * 4), ("c", [3, 4, 1, 2] * 3)):
        assert generate(engine, make_request(name, prompt, 40))[name] == expected_tokens(
            prompt, 40, model=repeating_token
        )


def test_the_engine_of_the_planted_bugs_works_without_them() -> None:
    engine = make_engine(60, model=repeating_token, speculation=DRAFTS)
    mixed_requests(engine)
    counters = engine.stats().counters
    assert 10 < counters.num_accepted_tokens < counters.num_draft_tokens - 10


@pytest.mark.parametrize("bug", ["publishes rejected drafts", "one position too far", "accepts what differs"])
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_accepted = Scheduler._num_accepted

    def planted(self: Scheduler, seq: Sequence, chunk: Chunk, token_ids: tuple[int, ...]) -> int:
        num = num_accepted(self, seq, chunk, token_ids)
        return chunk.num_logits - 1 if bug == "publishes rejected drafts" else num + 1

    def gullible(self: CheckingExecutor, chunk: Chunk, drafts: "array[int]") -> tuple[int, ...]:
        return (*drafts, repeating_token(chunk.history + drafts))

    if bug == "accepts what differs":
        monkeypatch.setattr(CheckingExecutor, "_sampled", gullible)
    else:
        monkeypatch.setattr(Scheduler, "_num_accepted", planted)
    with pytest.raises((AssertionError, IndexError)):
        mixed_requests(make_engine(60, model=repeating_token, speculation=DRAFTS))


class ShortRows(CheckingExecutor):
    """Returns the accepted drafts only, as a row does whose next position has failed."""

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        return result._replace(
            rows=tuple(
                RowResult(row.token_ids[: max(1, len(row.token_ids) - 1)]) if row.token_ids else row
                for row in result.rows
            )
        )


def test_a_row_without_a_token_behind_its_accepted_drafts_goes_on() -> None:
    engine = make_engine(40, model=cycling, speculation=DRAFTS)
    engine.executor = ShortRows(40, 4, model=cycling)
    assert generate(engine, make_request("a", CYCLE * 2, 20))["a"] == expected_tokens(CYCLE * 2, 20, model=cycling)


def misleading(tokens: "array[int]") -> int:
    """A model that repeats two tokens, always before a third that is new."""
    return (11, 12, 1000 * tokens[0] + len(tokens))[len(tokens) % 3]


def test_rejections_are_remembered_for_later_requests_of_their_own_domain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.core.speculation.draft_length.DecodeCostModel.learn", lambda *_: None)
    engine = make_engine(60, model=misleading, speculation=DRAFTS)
    firsts = iter(range(101, 160))

    def num_drafts(domain: bytes, mode: CacheMode = CacheMode.READ_WRITE) -> int:
        before, first = engine.stats().counters.num_draft_tokens, next(firsts)
        prompt = [first, 200 + first, 300 + first, 11, 12, 500 + first, 11, 12]
        generate(engine, make_request(str(first), prompt, 12, domain=domain, cache=mode))
        return engine.stats().counters.num_draft_tokens - before

    fresh = num_drafts(b"b", CacheMode.BYPASS)
    assert fresh
    for _ in range(20):
        assert num_drafts(b"b", CacheMode.BYPASS) == fresh
        num_drafts(b"a")
    assert num_drafts(b"a") == 0
    assert num_drafts(b"a", CacheMode.BYPASS) == num_drafts(b"b", CacheMode.READ_ONLY) == num_drafts(b"b") == fresh
    assert engine.stats().counters.num_accepted_tokens == 0
    assert engine.reset_prefix_cache()
    assert num_drafts(b"a") == fresh


def test_the_least_recently_used_domain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.core.speculation.speculation.MAX_DOMAINS", 2)
    engine = make_engine(60, model=cycling, speculation=DRAFTS)
    for number, domain in enumerate((b"a", b"b", b"a", b"c")):
        generate(engine, make_request(str(number), CYCLE * 2, 12, domain=domain))
    assert engine.scheduler.speculation is not None
    assert [domain for domain, _ in engine.scheduler.speculation._domains] == [b"a", b"c"]
