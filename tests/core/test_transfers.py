"""Blocks that move between pool and store, by hand: 8 usable blocks of 4 tokens, and a store in memory."""

import pytest
from checking import executor_of, expected_tokens, generate, make_engine, make_request, run
from memory_store import NEVER, Habits, MemoryStore

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.transfers import MAX_LOADS, ComputeRate
from headstart.core.engine import Engine
from headstart.core.request import CacheMode, FinishReason, SamplingParams

A, B, C = list(range(8)), list(range(20, 28)), list(range(40, 48))


def stocked(*prompts: list[int], **kwargs: object) -> MemoryStore:
    """A store with the blocks of these prompts."""
    store = MemoryStore(**kwargs)  # type: ignore[arg-type]
    engine = make_engine(store=store)
    for index, prompt in enumerate(prompts):
        generate(engine, make_request(f"stock-{index}", prompt))
    store.flush()
    store.loads.clear()
    return store


def breakdowns(engine: Engine, *requests: object) -> dict[str, PromptTokenBreakdown]:
    for request in requests:
        engine.add_request(request)  # type: ignore[arg-type]
    outputs = run(engine)
    return {rid: next(out.breakdown for out in outs if out.breakdown is not None) for rid, outs in outputs.items()}


def computed(engine: Engine) -> int:
    return engine.stats().counters.prefill_tokens


def test_what_was_published_is_in_the_store_after_a_restart() -> None:
    store = stocked([*A, *B])
    engine = make_engine(store=store)
    found = breakdowns(engine, make_request("a", [*A, *B, 1]))
    assert found["a"] == PromptTokenBreakdown(store=16, computed=1)
    assert computed(engine) == 1 and [len(load) for load in store.loads] == [4]
    assert engine.stats().counters.store_tokens == 16


def test_a_whole_prompt_in_the_store_computes_its_last_token_only() -> None:
    engine = make_engine(store=stocked(A))
    assert generate(engine, make_request("a", A, max_tokens=3)) == {"a": expected_tokens(A, 3)}
    assert computed(engine) == 1


def test_what_the_store_has_not_is_computed() -> None:
    engine = make_engine(store=stocked(A))
    assert breakdowns(engine, make_request("a", [*A, *B]))["a"] == PromptTokenBreakdown(store=8, computed=8)


def test_a_block_in_the_middle_is_no_prefix() -> None:
    store = stocked([*A, *B])
    names = list(store.shelf)
    del store.shelf[names[1]]
    engine = make_engine(store=store)
    assert breakdowns(engine, make_request("a", [*A, *B]))["a"] == PromptTokenBreakdown(store=4, computed=12)


def test_twins_wait_for_one_load() -> None:
    store = stocked(A, habits=Habits(load_delay=lambda: 2))
    engine = make_engine(store=store)
    found = breakdowns(engine, *(make_request(str(index), [*A, 90 + index]) for index in range(3)))
    assert len(store.loads) == 1
    assert set(found.values()) == {PromptTokenBreakdown(store=8, computed=1)}


def test_those_who_come_after_the_load_share_memory() -> None:
    engine = make_engine(store=stocked(A))
    breakdowns(engine, make_request("a", [*A, 1]))
    assert breakdowns(engine, make_request("b", [*A, 2]))["b"] == PromptTokenBreakdown(shared=8, computed=1)


def test_a_load_follows_what_is_in_the_pool() -> None:
    store = stocked([*A, *B])
    engine = make_engine(store=MemoryStore())
    generate(engine, make_request("warm", A))
    engine = engine_on(engine, store)
    assert breakdowns(engine, make_request("a", [*A, *B]))["a"] == PromptTokenBreakdown(
        shared=8, store=8 - 1, computed=1
    )


def engine_on(engine: Engine, store: MemoryStore) -> Engine:
    """The same pool before another store."""
    own = engine.scheduler.transfers._store
    assert isinstance(own, MemoryStore)
    own.flush()
    own.shelf |= store.shelf
    return engine


def test_blocks_arrive_in_pieces_and_nothing_is_computed_meanwhile() -> None:
    store = stocked([*A, *B], habits=Habits(piece=lambda: 1, load_delay=lambda: 1))
    engine = make_engine(store=store)
    engine.add_request(make_request("a", [*A, *B, 1]))
    for steps in range(1, 9):
        assert engine.step() == [] and not executor_of(engine).batches
        engine.scheduler.pool.check_invariants()
        assert store.num_waits == steps and engine.stats().pool.num_loading == 4 - (steps - 1) // 2
    assert len(engine.step()) == 1 and computed(engine) == 1 and len(store.loads) == 1


def test_others_run_while_one_waits_for_the_store() -> None:
    engine = make_engine(store=stocked(A, habits=Habits(load_delay=lambda: 3)))
    for request in (make_request("a", [*A, 1]), make_request("b", B)):
        engine.add_request(request)
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["b"]
    run(engine)


def test_a_load_that_fails_is_computed() -> None:
    store = stocked(A, habits=Habits(fails=lambda: True))
    engine = make_engine(store=store)
    assert breakdowns(engine, make_request("a", A))["a"] == PromptTokenBreakdown(computed=8)
    assert len(store.loads) == MAX_LOADS and engine.scheduler.transfers.num_outstanding == 0


def test_what_came_before_the_failure_is_used() -> None:
    pieces = iter([False, True])
    store = stocked([*A, *B], habits=Habits(piece=lambda: 1, fails=lambda: next(pieces, True)))
    engine = make_engine(store=store)
    assert breakdowns(engine, make_request("a", [*A, *B]))["a"] == PromptTokenBreakdown(store=4, computed=12)


def test_an_overdue_load_is_cancelled_and_computed() -> None:
    store = stocked(A, habits=Habits(load_delay=lambda: 1_000_000))
    engine = make_engine(store=store)
    engine.add_request(make_request("a", A))
    for now in range(100):
        engine.step(now=now * 0.1)
        if executor_of(engine).batches:
            break
    assert store.cancelled == [(1, True)] and 1.0 < now * 0.1 < 1.3  # the time to compute is not known yet
    assert engine.scheduler.transfers.num_outstanding == 0 and not engine.scheduler.transfers._promised
    engine.add_request(make_request("b", [*A, 1]))
    assert run(engine)["b"][0].breakdown == PromptTokenBreakdown(shared=8, computed=1)


def test_patience_is_renewed_by_every_piece() -> None:
    store = stocked([*A, *B], habits=Habits(piece=lambda: 1, load_delay=lambda: 8))
    engine = make_engine(store=store)
    engine.add_request(make_request("a", [*A, *B]))
    now = 0.0
    while engine.has_work:
        engine.step(now=(now := now + 0.1))
    assert store.cancelled == [] and now > 2.0


def test_loading_has_to_beat_computing() -> None:
    store = stocked(A, habits=Habits(expected=lambda num: num * 1.0))
    engine = make_engine(store=store)
    engine.scheduler.transfers.rate.learn(1000, 1000, 240.0)  # 0.24 s a token, 0.96 s a block
    assert breakdowns(engine, make_request("a", A))["a"] == PromptTokenBreakdown(computed=8)
    assert store.loads == []
    store.habits = Habits(expected=lambda num: num * 0.9)
    engine.reset_prefix_cache()
    assert breakdowns(engine, make_request("b", A))["b"] == PromptTokenBreakdown(store=7, computed=1)


def test_a_store_that_is_out_of_order_is_not_asked() -> None:
    store = stocked(A, habits=NEVER)
    assert breakdowns(make_engine(store=store), make_request("a", A))["a"] == PromptTokenBreakdown(computed=8)
    assert store.loads == []


def test_nothing_is_loaded_that_does_not_fit() -> None:
    store = stocked(A, B, C)
    engine = make_engine(num_blocks=6, max_seqs=2, store=store)
    found = breakdowns(engine, *(make_request(str(index), [*p, 1]) for index, p in enumerate((A, B, C))))
    assert all(breakdown == PromptTokenBreakdown(store=8, computed=1) for breakdown in found.values())
    assert engine.scheduler.transfers.num_outstanding == 0


def test_what_does_not_fit_is_not_looked_up_in_every_step() -> None:
    store = stocked([*A, *B])
    engine = make_engine(store=store)
    engine.add_request(make_request("long", C, max_tokens=20))
    engine.step()
    asked = list[BlockHash]()
    store.contains = lambda name: asked.append(name) or name in store.shelf  # type: ignore[method-assign,func-returns-value]
    engine.add_request(make_request("b", [*A, *B, 1]))
    for _ in range(10):
        engine.step()
    assert not store.loads and len(asked) <= 10
    run(engine)
    assert len(store.loads) == 1


def test_blocks_that_find_no_room_are_dropped() -> None:
    """While its blocks are on their way a running one grows into the room that was there."""
    store = stocked([*A, *B], habits=Habits(load_delay=lambda: 8))
    engine = make_engine(num_blocks=7, store=store)
    engine.scheduler.admission._mean = 0.0
    engine.add_request(make_request("grows", [90], max_tokens=16))
    engine.step()
    engine.add_request(make_request("a", [*A, *B]))
    outputs = run(engine)
    assert [t for out in outputs["a"] for t in out.token_ids] == expected_tokens([*A, *B], 1)
    breakdown = outputs["a"][0].breakdown
    assert breakdown is not None and breakdown.computed >= 4 and len(store.loads) == 1


def test_a_suspect_block_is_cleared_before_it_is_filled_and_not_after() -> None:
    store = stocked(A)
    engine = make_engine(store=store, poison=lambda chunk: chunk.request_id == "bad")
    engine.add_request(make_request("bad", list(range(60, 92))))
    assert run(engine)["bad"][0].finish_reason is FinishReason.ERROR
    assert generate(engine, make_request("a", [*A, 1], max_tokens=4)) == {"a": expected_tokens([*A, 1], 4)}
    assert engine.stats().counters.store_tokens == 8


def test_what_a_failed_row_wrote_is_not_loaded_again() -> None:
    store = stocked(A)
    engine = make_engine(store=store, poison=lambda chunk: 60 in chunk.token_ids, max_batched_tokens=4, max_seqs=4)
    engine.add_request(make_request("bad", [*A, *B, 60]))
    names, most = set(store.shelf), 0
    while engine.has_work:
        engine.step()
        store.flush()
        most = max(most, len(store.shelf))
    assert most == 4 and set(store.shelf) == names  # what it has loaded is as good as before: see test_trust.py


def test_a_block_that_was_given_to_another_is_not_written() -> None:
    store = MemoryStore(habits=Habits(write_delay=lambda: 1_000_000))
    engine = make_engine(num_blocks=3, store=store)
    generate(engine, make_request("a", A))
    generate(engine, make_request("b", B))
    store.flush()
    assert store.num_overwritten == 2 and len(store.shelf) == 2
    assert breakdowns(make_engine(store=store), make_request("b", B))["b"] == PromptTokenBreakdown(store=7, computed=1)


def test_what_the_store_has_is_not_offered_again() -> None:
    store = stocked(A)
    engine = make_engine(store=store)
    breakdowns(engine, make_request("a", A))
    assert store.stats().num_pending == 0


@pytest.mark.parametrize("cache", [CacheMode.READ_ONLY, CacheMode.BYPASS])
def test_cache_modes_hold_for_the_store_too(cache: CacheMode) -> None:
    store = stocked(A)
    engine = make_engine(store=store)
    found = breakdowns(engine, make_request("a", [*A, *B], cache=cache))
    assert found["a"] == (
        PromptTokenBreakdown(computed=16) if cache is CacheMode.BYPASS else PromptTokenBreakdown(store=8, computed=8)
    )
    store.flush()
    assert len(store.shelf) == 2


def test_log_probabilities_of_the_prompt_are_computed() -> None:
    engine = make_engine(store=stocked(A))
    request = make_request("a", A)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    assert breakdowns(engine, type(request)("a", request.prompt, sampling))["a"] == PromptTokenBreakdown(computed=8)


def test_domains_never_load_each_others_blocks() -> None:
    store = MemoryStore()
    engine = make_engine(store=store)
    generate(engine, make_request("a", A, domain=b"x", tenant="x"))
    store.flush()
    found = breakdowns(make_engine(store=store), make_request("b", A, domain=b"y", tenant="y"))
    assert found["b"] == PromptTokenBreakdown(computed=8) and store.loads == []
    found = breakdowns(make_engine(store=store), make_request("c", A, domain=b"x", tenant="x"))
    assert found["c"] == PromptTokenBreakdown(store=7, computed=1)


def test_pinned_prefixes_come_back_from_the_store() -> None:
    store = MemoryStore()
    engine = make_engine(store=store)
    engine.add_prefix("p", A)
    run(engine)
    store.flush()
    assert len(store.kept) == 2
    engine = make_engine(store=store)
    engine.add_prefix("p", A)
    run(engine)
    assert computed(engine) == 1 and engine.list_prefixes()[0].state.value == "ready"
    assert breakdowns(engine, make_request("a", [*A, 1]))["a"] == PromptTokenBreakdown(pinned=8, computed=1)
    engine.remove_prefix("p")
    assert store.kept == set()


def test_what_is_pinned_later_is_offered_again() -> None:
    store = MemoryStore()
    engine = make_engine(store=store)
    generate(engine, make_request("a", A))
    store._offers.clear()  # it was lost
    engine.add_prefix("p", A)
    store.flush()
    assert set(store.shelf) == store.kept and len(store.kept) == 2


def test_a_reset_keeps_the_store_unless_told() -> None:
    store = stocked(A)
    engine = make_engine(store=store)
    generate(engine, make_request("a", A))
    engine.reset_prefix_cache()
    assert breakdowns(engine, make_request("b", A))["b"].store == 7
    engine.reset_prefix_cache(external=True)
    assert breakdowns(engine, make_request("c", A))["c"] == PromptTokenBreakdown(computed=8)


def test_a_running_sequence_adopts_what_the_store_gets_meanwhile() -> None:
    """A sibling writes the end of a long prompt while this one computes its beginning."""
    prompt = [*A, *B, *C]
    full = stocked(prompt)
    store = MemoryStore()
    engine = make_engine(store=store, max_batched_tokens=10, max_seqs=2)
    engine.add_request(make_request("a", [*prompt, 1]))
    engine.step()
    store.shelf.update(full.shelf)
    outputs = run(engine)
    assert (
        outputs["a"][0].breakdown == PromptTokenBreakdown(store=14, computed=11)
        and outputs["a"][0].num_cached_tokens == 14
    )


def test_what_is_taken_over_counts_as_used() -> None:
    store = stocked(A)
    engine = make_engine(store=store)
    generate(engine, make_request("a", [*A, 1]))
    assert store.used == [list(store.shelf)[:2]]


def test_an_aborted_load_affects_no_other_request() -> None:
    store = stocked(A, habits=Habits(load_delay=lambda: 2))
    engine = make_engine(store=store)
    engine.add_request(make_request("a", [*A, 1]))
    engine.add_request(make_request("b", [*A, 2]))
    engine.step()
    engine.abort("a")
    assert run(engine)["b"][0].breakdown == PromptTokenBreakdown(store=8, computed=1)
    assert engine.scheduler.pool.num_free == 8


def test_a_load_without_anybody_left_ends_with_the_next_request() -> None:
    store = stocked(A, habits=Habits(load_delay=lambda: 2))
    engine = make_engine(store=store)
    engine.add_request(make_request("a", [*A, 1]))
    engine.step()
    engine.abort("a")
    assert not engine.has_work
    for index in range(4):
        generate(engine, make_request(str(index), [70 + index]))
    assert engine.scheduler.transfers.num_outstanding == 0


def test_speed_is_learnt_from_steps_that_prefill() -> None:
    rate = ComputeRate()
    rate.learn(100, 40, 50.0)
    assert rate.tokens_per_second == 0.0
    rate.learn(100, 100, 1.0)
    assert rate.tokens_per_second == pytest.approx(100)
    for _ in range(100):
        rate.learn(2048, 2048, 2048 / 300)
    assert rate.tokens_per_second == pytest.approx(300, rel=0.01)


def test_names_in_flight_are_those_of_the_loads() -> None:
    store = stocked(A, B, habits=Habits(load_delay=lambda: 3))
    engine = make_engine(store=store)
    engine.add_request(make_request("a", [*A, 1]))
    engine.add_request(make_request("b", [*B, 1]))
    engine.step()
    names: set[BlockHash] = {key.block_hash for load in store.loads for key in load}
    assert set(engine.scheduler.transfers._promised) == names and engine.stats().pool.num_loading == 4
    run(engine)
    assert not engine.scheduler.transfers._promised


def test_what_finds_no_room_though_more_is_coming_is_called_off_and_not_called_late() -> None:
    store = stocked([*A, *B], habits=Habits(load_delay=lambda: 3, piece=lambda: 1))
    engine = make_engine(num_blocks=7, store=store)
    engine.scheduler.admission._mean = 0.0
    engine.add_request(make_request("grows", [90], max_tokens=20))
    engine.step()
    engine.add_request(make_request("a", [*A, *B]))
    assert [t for out in run(engine)["a"] for t in out.token_ids] == expected_tokens([*A, *B], 1)
    assert store.cancelled == [(1, False)]


def test_a_cleared_store_gets_pinned_prefixes_again() -> None:
    store = MemoryStore()
    engine = make_engine(store=store)
    engine.add_prefix("p", A)
    run(engine)
    store.flush()
    engine.reset_prefix_cache(external=True)
    store.flush()
    assert set(store.shelf) == store.kept and len(store.kept) == 2


@pytest.mark.parametrize("num_blocks", [44, 50, 60])
def test_what_was_loaded_for_one_makes_no_place_for_another_load(num_blocks: int) -> None:
    """Two prompts of 30 blocks in a pool that holds one: the second is loaded when the first has been taken over."""
    prompts = [list(range(start, start + 120)) for start in (0, 200, 400)]
    store = MemoryStore()
    engine = make_engine(200, store=store, max_model_len=200)
    for number, prompt in enumerate(prompts):
        generate(engine, make_request(f"stock-{number}", prompt))
    store.flush()
    store.loads.clear()
    store.habits = Habits(piece=lambda: 3, load_delay=lambda: 2)
    engine = make_engine(num_blocks, store=store, max_model_len=200)
    for number, prompt in enumerate(prompts):
        engine.add_request(make_request(f"{number}", [*prompt, 1], max_tokens=9))
    run(engine)
    assert [len(load) for load in store.loads] == [30, 30, 30] and computed(engine) == 3
