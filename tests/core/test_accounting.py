"""Whatever happens, the books of an engine add up, and whatever it remembers can be explained."""

from checking import generate, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine import Engine
from headstart.core.request import CacheMode
from headstart.reuse.reuse_explainer import ReuseEndReason, Viewer, explain_prompt_reuse, explain_request_reuse

Job = tuple[list[int], CacheMode, int, int]
STEMS = st.sampled_from([list(range(12)), [*range(8), 90], [7] * 5, []])
TAILS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
JOBS = st.lists(
    st.tuples(st.builds(list.__add__, STEMS, TAILS), st.sampled_from(CacheMode), st.integers(1, 8), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)
ADMIN = Viewer(is_admin=True)


def serve(engine: Engine, jobs: list[Job]) -> None:
    """Adds a job per step; those with a 0 are aborted two jobs later. Checks the books after every step."""
    breakdowns: dict[str, PromptTokenBreakdown] = {}
    for index in range(400):
        if index < len(jobs):
            prompt, mode, max_tokens, _ = jobs[index]
            engine.add_request(make_request(f"r{index}", prompt, max_tokens, cache=mode))
        if 2 <= index < len(jobs) + 2 and jobs[index - 2][3] == 0:
            engine.abort(f"r{index - 2}")
        for output in engine.step(float(index)):
            if output.breakdown is not None:
                breakdowns[output.request_id] = output.breakdown
        check(engine, breakdowns)
        if index >= len(jobs) + 2 and not engine.has_work:
            return
    raise AssertionError("still busy")


def check(engine: Engine, breakdowns: dict[str, PromptTokenBreakdown]) -> None:
    stats = engine.stats()
    sources = (
        stats.counters.pinned_tokens,
        stats.counters.shared_tokens,
        stats.counters.store_tokens,
        stats.counters.followed_tokens,
    )
    totals = [sum(column) for column in zip(PromptTokenBreakdown(), *breakdowns.values(), strict=True)]
    assert [*sources, stats.counters.prompt_computed_tokens] == totals
    assert (stats.counters.cached_tokens, stats.counters.prompt_tokens) == (sum(sources), sum(totals))
    assert stats.counters.replayed_tokens <= stats.counters.prefill_tokens <= stats.counters.computed_tokens
    assert stats.pool.num_scratch + stats.pool.num_idle == stats.pool.num_free
    assert 0 <= stats.pool.num_free + stats.pool.num_pinned_idle <= stats.pool.num_blocks
    causes = (
        stats.pool.evictions_by_cause["capacity"],
        stats.pool.evictions_by_cause["failed"],
        stats.pool.evictions_by_cause["reset"],
    )
    assert sum(causes) == stats.pool.total_evictions


@settings(max_examples=60, deadline=None)
@given(jobs=JOBS, num_blocks=st.integers(9, 24), policy=st.sampled_from(["fcfs", "lpm"]))
def test_the_books_add_up_and_everything_can_be_explained(jobs: list[Job], num_blocks: int, policy: str) -> None:
    engine = make_engine(num_blocks, policy=policy, max_batched_tokens=8, max_seqs=3, expects_short_outputs=True)
    serve(engine, jobs)
    for index, (prompt, mode, _, _) in enumerate(jobs):
        found = explain_request_reuse(engine.scheduler, engine.recent, f"r{index}", ADMIN, 1000.0)
        if found is not None:
            assert found.position <= (len(prompt) - 1 if found.then is None else found.then.num_cached)
            assert (found.reason is ReuseEndReason.BYPASS) is (mode is CacheMode.BYPASS)
            assert (found.reason is ReuseEndReason.EVICTED) is (found.eviction is not None)
        asked = explain_prompt_reuse(engine.scheduler, engine.recent, make_request("", prompt), ADMIN, 1000.0)
        assert sum(asked.now) == len(prompt) and asked.now.num_cached == asked.position
        assert asked.reason not in (ReuseEndReason.COMPUTING, ReuseEndReason.BYPASS)
        assert asked.as_dict()["near"] is None or asked.near is not None


@settings(max_examples=30, deadline=None)
@given(jobs=JOBS)
def test_with_room_for_everything_nothing_is_computed_that_a_perfect_cache_had_not(jobs: list[Job]) -> None:
    engine = make_engine(200, policy="lpm", max_batched_tokens=8, max_seqs=3)
    serve(engine, [(prompt, CacheMode.READ_WRITE, num, 1) for prompt, _, num, _ in jobs])
    stats = engine.stats()
    assert stats.counters.prefill_tokens <= stats.counters.ideal_tokens and stats.counters.replayed_tokens == 0


def test_computed_tokens_of_evicted_blocks_are_counted_apart() -> None:
    """8 usable blocks of 4 tokens: a flood evicts a prompt of 5 blocks, whose last tokens fill none."""
    engine = make_engine()
    prompt = list(range(22))
    generate(engine, make_request("a", prompt))
    generate(engine, make_request("flood", range(40, 70)))
    engine.add_request(make_request("again", prompt))
    (output,) = run(engine)["again"]
    assert output.breakdown is not None and output.breakdown.computed == 22
    assert output.num_evicted_tokens == engine.stats().counters.evicted_tokens == 20
    generate(engine, make_request("new", range(70, 92)))
    assert engine.stats().counters.evicted_tokens == 20
