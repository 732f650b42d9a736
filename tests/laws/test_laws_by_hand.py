"""Each law once by hand, with the smallest numbers that show it: blocks of 4 tokens, 8 usable blocks."""

import pytest
from checking import executor_of, expected_tokens, generate, make_engine, make_request, run

from headstart.core.batch import Chunk
from headstart.core.errors import ConfigError, RequestTooLargeError
from headstart.core.request import CacheMode, FinishReason
from headstart.core.sched.limits import Limits, budget_cost, chunk_len


def chunks(engine: object) -> list[list[tuple[str, int, int]]]:
    """(request, start, n) of every chunk of every step."""
    batches = executor_of(engine).batches  # type: ignore[arg-type]
    return [[(c.request_id, c.start, len(c.token_ids)) for c in batch.chunks] for batch in batches]


def test_law_1_kv_of_computed_tokens_is_in_the_table() -> None:
    engine = make_engine(max_batched_tokens=8, max_seqs=2)
    engine.add_request(make_request("a", range(11), 2))
    engine.step()
    seq = engine.scheduler.running[0]
    assert seq.num_computed_tokens == 8 and len(seq.block_ids) == 2
    held = [executor_of(engine).slots[seq.block_ids[p // 4] * 4 + p % 4] for p in range(8)]
    assert held == [(p, p) for p in range(8)]


def test_law_2_a_block_is_published_only_after_it_was_computed() -> None:
    engine = make_engine(max_batched_tokens=6, max_seqs=2)
    engine.add_request(make_request("a", range(11)))
    assert engine.scheduler.pool.num_published == 0
    engine.step()  # 6 tokens: one full block and half of another
    assert engine.scheduler.pool.num_published == 1


def test_law_2_blocks_of_a_row_that_failed_are_never_found() -> None:
    engine = make_engine(poison=lambda chunk: chunk.request_id == "bad")
    engine.add_request(make_request("bad", range(9)))
    (output,) = run(engine)["bad"]
    assert output.finish_reason is FinishReason.ERROR and output.error == "not finite"
    assert engine.scheduler.pool.num_published == 0
    assert generate(engine, make_request("good", range(9)))["good"] == expected_tokens(range(9), 1)


def test_law_2_a_poisoned_row_harms_no_other_row_of_its_batch() -> None:
    engine = make_engine(poison=lambda chunk: chunk.request_id == "bad" and len(chunk.history) > 8)
    shared = list(range(8))
    generate(engine, make_request("first", [*shared, 50]))
    tokens = generate(engine, *(make_request(rid, [*shared, i], 3) for i, rid in enumerate(["x", "bad", "y"])))
    assert tokens["x"] == expected_tokens([*shared, 0], 3) and tokens["y"] == expected_tokens([*shared, 2], 3)
    assert tokens["bad"] == []


@pytest.mark.parametrize(
    ("length", "computed"), [(16, 1), (17, 1), (18, 2), (19, 3), (20, 1)], ids=lambda value: str(value)
)
def test_law_3_a_repeated_prompt_computes_its_tail_and_at_least_one_token(length: int, computed: int) -> None:
    engine = make_engine(num_blocks=20)
    generate(engine, make_request("cold", range(length)))
    executor_of(engine).batches.clear()
    assert generate(engine, make_request("warm", range(length)))["warm"] == expected_tokens(range(length), 1)
    assert chunks(engine) == [[("warm", length - computed, computed)]]


def test_law_3_last_token_of_a_fully_cached_prompt_is_computed_but_not_written() -> None:
    engine = make_engine()
    generate(engine, make_request("cold", range(8)))
    engine.add_request(make_request("warm", range(8)))
    engine.step()
    (chunk,) = executor_of(engine).batches[-1].chunks
    assert (chunk.start, len(chunk.token_ids), chunk.write_from) == (7, 1, 8)


def test_law_3_a_hit_stops_at_the_first_missing_block() -> None:
    engine = make_engine(num_blocks=5)  # 4 usable
    generate(engine, make_request("a", range(16)))  # fills the pool: a chain of 4 blocks
    generate(engine, make_request("b", [90, 91, 92, 93, 94]))  # evicts the last two of the chain
    engine.add_request(make_request("c", range(16)))
    outputs = run(engine)["c"]
    assert outputs[0].num_cached_tokens == 8


def test_law_4_extend_takes_all_or_nothing() -> None:
    engine = make_engine(num_blocks=5)
    generate(engine, make_request("a", range(8)))
    engine.add_request(make_request("held", [60] * 5))
    engine.step()
    scheduler = engine.scheduler
    scheduler.add_request(make_request("b", [*range(8), 50]))
    (seq,) = scheduler.waiting
    hit = scheduler.cache.match_prefix(seq)
    free = scheduler.pool.num_free
    assert len(hit.block_ids) == 2
    assert not scheduler.cache.adopt_hit_and_extend_table(seq, hit, 100)
    assert (scheduler.pool.num_free, len(seq.block_ids), scheduler.pool.num_idle_among(hit.block_ids)) == (free, 0, 2)


def test_law_5_the_budget_counts_only_what_is_not_cached() -> None:
    """vLLM #7883: two prompts of 16 with 8 cached each fill 16 of the budget, not 32."""
    engine = make_engine(num_blocks=20, max_batched_tokens=16)
    generate(engine, make_request("seed", range(8)))
    executor_of(engine).batches.clear()
    generate(engine, *(make_request(rid, [*range(8), *[40 + i] * 8]) for i, rid in enumerate("ab")))
    assert chunks(engine) == [[("a", 8, 8), ("b", 8, 8)]]


def test_law_5_admission_counts_only_blocks_that_are_not_cached() -> None:
    """vLLM #7883: a prompt of 8 blocks with 6 cached needs 2 free blocks, not 8."""
    engine = make_engine(num_blocks=10)  # 9 usable
    engine.add_request(make_request("long", range(24), 5))
    engine.step()
    engine.add_request(make_request("twin", [*range(24), *[50] * 7]))
    engine.step()
    assert [seq.request_id for seq in engine.scheduler.running] == ["long"]  # twin has had its one token
    assert len(executor_of(engine).batches[-1].chunks) == 2


def test_law_5_idle_hits_are_not_counted_as_free_too() -> None:
    """vLLM #3402, the double count: 4 blocks are free, 3 of them the hit itself, so only 1 can be allocated."""
    engine = make_engine(num_blocks=5)
    generate(engine, make_request("cold", range(12)))
    assert engine.scheduler.pool.num_free == 4
    scheduler = engine.scheduler
    scheduler.add_request(make_request("warm", [*range(12), 50, 51]))
    (seq,) = scheduler.waiting
    assert scheduler.cache.num_available_after_hit(seq, scheduler.cache.match_prefix(seq)) == 1
    assert generate(engine)["warm"] == expected_tokens([*range(12), 50, 51], 1)


def test_law_5_many_sharers_of_a_long_prefix_all_complete_on_a_small_pool() -> None:
    shared = list(range(60)) * 2
    engine = make_engine(num_blocks=50, max_model_len=200, max_seqs=32, max_batched_tokens=256)
    requests = [make_request(f"r{i}", [*shared, i, i], 8) for i in range(32)]
    tokens = generate(engine, *requests)
    assert all(tokens[r.request_id] == expected_tokens(r.prompt, 8) for r in requests)


def test_law_6_aligned_chunks_end_on_block_boundaries_but_the_last() -> None:
    engine = make_engine(num_blocks=20, align=4, max_batched_tokens=11, max_seqs=2)
    generate(engine, make_request("a", range(23)))
    assert chunks(engine) == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 7)]]


def test_law_7_a_victim_is_never_in_the_batch_and_ends_with_the_same_text() -> None:
    engine = make_engine(
        num_blocks=7, max_model_len=24, expects_short_outputs=True
    )  # 6 usable blocks, two sequences grow to 4 each
    requests = [make_request(rid, [i] * 5, 11) for i, rid in enumerate("ab")]
    tokens = generate(engine, *requests)
    assert engine.stats().counters.num_preemptions > 0
    for request in requests:
        assert tokens[request.request_id] == expected_tokens(request.prompt, 11)


def test_law_8_nothing_is_referenced_when_idle_whatever_ended_the_requests() -> None:
    engine = make_engine(num_blocks=20, poison=lambda chunk: chunk.request_id == "bad")
    for rid in ("done", "bad", "gone", "waiting"):
        engine.add_request(make_request(rid, range(9), 3))
    engine.step()
    assert engine.abort("gone") and engine.abort("waiting") and not engine.abort("gone")
    run(engine)
    pool = engine.scheduler.pool
    assert pool.num_free == pool.usable_capacity and not engine.has_work


def test_law_9_a_missing_row_is_noticed() -> None:
    engine = make_engine()
    engine.add_request(make_request("a", range(3)))
    batch = engine.scheduler.schedule()
    result = engine.executor.execute(batch)
    with pytest.raises(AssertionError, match="1 chunks but 0 rows"):
        engine.scheduler.update(result._replace(rows=()))


def test_decodes_are_not_stalled_by_a_long_prefill_that_came_earlier() -> None:
    def poison(chunk: Chunk) -> bool:
        return False

    engine = make_engine(num_blocks=40, poison=poison, max_batched_tokens=8, max_seqs=3, policy="priority")
    engine.add_request(make_request("decode", range(3), 8, priority=1))
    engine.step()
    engine.add_request(make_request("urgent", range(30, 60), 1, priority=0))
    for _ in range(4):
        engine.step()
        assert ("decode", 1) in [(c.request_id, len(c.token_ids)) for c in executor_of(engine).batches[-1].chunks]


def test_long_prefill_cap_holds_while_others_wait_and_not_when_alone() -> None:
    engine = make_engine(num_blocks=40, long_prefill_threshold=4, max_batched_tokens=16)
    engine.add_request(make_request("a", range(20)))
    engine.step()
    engine.add_request(make_request("b", range(40, 60)))
    engine.step()
    assert chunks(engine) == [[("a", 0, 16)], [("a", 16, 4), ("b", 0, 4)]]


def test_what_can_never_fit_is_refused_at_once() -> None:
    engine = make_engine(num_blocks=5, max_model_len=64)  # 16 tokens
    engine.add_request(make_request("fits", range(12), 5))
    with pytest.raises(RequestTooLargeError, match="need 5 KV blocks but the pool has 4"):
        engine.add_request(make_request("pool", range(12), 6))
    with pytest.raises(RequestTooLargeError, match="length is 64 tokens"):
        engine.add_request(make_request("context", range(64)))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(make_request("fits", range(3)))
    assert run(engine)["fits"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("mode", [CacheMode.READ_ONLY, CacheMode.BYPASS])
def test_cache_modes_leave_nothing_behind(mode: CacheMode) -> None:
    engine = make_engine(num_blocks=20)
    generate(engine, make_request("a", range(9), cache=mode))
    assert engine.scheduler.pool.num_published == 0
    generate(engine, make_request("b", range(9)))
    engine.add_request(make_request("c", range(9), cache=mode))
    cached = run(engine)["c"][0].num_cached_tokens
    assert cached == (8 if mode is CacheMode.READ_ONLY else 0)


def test_domains_and_adapters_share_nothing() -> None:
    engine = make_engine(num_blocks=20)
    generate(engine, make_request("a", range(9), domain=b"A"))
    for rid, fields in {"b": {"domain": b"B"}, "c": {}, "d": {"domain": b"A", "adapter": "x"}}.items():
        engine.add_request(make_request(rid, range(9), **fields))
        assert run(engine)[rid][0].num_cached_tokens == 0
    engine.add_request(make_request("again", range(9), domain=b"A"))
    assert run(engine)["again"][0].num_cached_tokens == 8


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    engine = make_engine(num_blocks=20)
    (answer,) = generate(engine, make_request("turn1", range(6), 7)).values()
    engine.add_request(make_request("turn2", [*range(6), *answer, 50]))
    assert run(engine)["turn2"][0].num_cached_tokens == 12


def test_source_001_unaware_accounting_admits_few_and_aware_accounting_all() -> None:
    admitted = []
    for charge_cached in (True, False):
        engine = make_engine(
            num_blocks=60, charge_cached=charge_cached, max_batched_tokens=32, max_seqs=8, max_model_len=32
        )
        requests = [make_request(f"cold{i}", [*range(i, 8), *range(i), 50]) for i in range(6)]
        generate(engine, *requests)
        executor_of(engine).batches.clear()
        generate(engine, *(make_request(f"warm{i}", r.prompt) for i, r in enumerate(requests)))
        admitted.append([len(batch.chunks) for batch in executor_of(engine).batches])
        assert sum(len(c.token_ids) for batch in executor_of(engine).batches for c in batch.chunks) == 6
    assert admitted == [[3, 3], [6]]


@pytest.mark.parametrize(
    ("want", "start", "budget", "align", "ceil", "expected"),
    [
        (10, 0, 7, 1, False, 7),
        (10, 0, 7, 4, False, 4),
        (10, 2, 7, 4, False, 6),
        (10, 2, 3, 4, False, 2),
        (10, 0, 12, 4, False, 10),
        (3, 2, 3, 4, True, 0),  # touches two blocks, which cost 8
        (3, 2, 8, 4, True, 3),
        (1, 7, 1, 4, True, 1),  # a decode costs 1
    ],
)
def test_chunk_len_by_hand(want: int, start: int, budget: int, align: int, ceil: bool, expected: int) -> None:
    limits = Limits(max_batched_tokens=64, max_seqs=8, align=align, charge_ceil=ceil)
    n = chunk_len(want, start, budget, limits, alone=True)
    assert n == expected
    assert not n or budget_cost(start, n, limits, decode=want == 1) <= budget


@pytest.mark.parametrize(
    "values",
    [
        {"max_seqs": 0},
        {"max_batched_tokens": 4, "max_seqs": 5},
        {"long_prefill_threshold": 3, "align": 4},
        {"long_prefill_threshold": -1},
        {"max_batched_tokens": 10, "max_seqs": 8, "align": 4},
    ],
)
def test_limits_that_could_wait_for_ever_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Limits(**values)  # type: ignore[arg-type]
