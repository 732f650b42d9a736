"""The costs of a row that is not finite: its own blocks, and shared ones only if computing them anew mends it."""

from array import array

import pytest
from checking import executor_of, expected_tokens, generate, make_engine, make_request, run
from memory_store import MemoryStore

from headstart.core.batch import Chunk, RequestStepOutput
from headstart.core.cache.pinned_prefix import PrefixState
from headstart.core.engine import Engine
from headstart.core.request import CacheMode, FinishReason, Request, SamplingParams

FIXED = array("i", range(1, 17))  # four blocks
BAD = 99  # a prompt with this token makes the model overflow
ROOMY = {"num_blocks": 65}


def poison(chunk: Chunk) -> bool:
    """Overflows at the token BAD, however the prompt is cut into chunks."""
    return BAD in chunk.token_ids


def pinned_engine(**options: object) -> Engine:
    """64 usable blocks of 4 tokens; the public prefix "fixed" takes four of them and is warm."""
    engine = make_engine(**{"poison": poison, **ROOMY, **options})  # type: ignore[arg-type]
    engine.add_prefix("fixed", FIXED)
    run(engine)
    return engine


def blocks_of(engine: Engine, tokens: "array[int]" = FIXED) -> list[int]:
    """The published blocks of a prompt."""
    pool = engine.scheduler.pool
    names = engine.scheduler.cache.new_sequence(make_request("names", tokens), 0).block_hashes
    entries = [pool.published_entry(name) for name in names]
    return [entry[0] for entry in entries if entry is not None]


def state_of(engine: Engine) -> PrefixState:
    (info,) = engine.list_prefixes()
    return info.state


def cached(engine: Engine, prompt: list[int]) -> int:
    engine.add_request(make_request("asks", prompt))
    (output,) = run(engine)["asks"]
    assert list(output.token_ids) == expected_tokens(prompt, 1)
    return output.num_cached_tokens


def last(outputs: dict[str, list[RequestStepOutput]]) -> dict[str, FinishReason | None]:
    return {request_id: news[-1].finish_reason for request_id, news in outputs.items()}


@pytest.mark.parametrize("num", [1, 95])
def test_requests_that_overflow_cost_a_pinned_prefix_no_block(num: int) -> None:
    engine = pinned_engine()
    before = blocks_of(engine)
    for number in range(num):
        engine.add_request(make_request(f"bad{number}", [*FIXED, number, BAD]))
    outputs = run(engine)
    assert set(last(outputs).values()) == {FinishReason.ERROR} and len(outputs) == num
    stats = engine.stats()
    assert (stats.pool.evictions_by_cause["failed"], stats.counters.num_row_errors, stats.counters.num_recomputes) == (
        0,
        num,
        num,
    )
    assert state_of(engine) is PrefixState.READY and blocks_of(engine) == before
    assert cached(engine, [*FIXED, 5]) == 16


def test_a_row_that_fails_by_the_fault_of_its_request_costs_nothing() -> None:
    engine = pinned_engine()
    executor_of(engine).refuse = lambda chunk: chunk.request_id == "bad"
    engine.add_request(make_request("bad", [*FIXED, *range(30, 40)], max_tokens=9))
    assert last(run(engine)) == {"bad": FinishReason.ERROR}
    stats = engine.stats()
    assert (stats.pool.total_evictions, stats.counters.num_row_errors, stats.counters.num_recomputes) == (0, 1, 0)
    assert engine.scheduler.pool._suspect == set() and cached(engine, [*FIXED, 5]) == 16


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("mode", [CacheMode.READ_WRITE, CacheMode.READ_ONLY])
def test_a_corrupt_shared_block_is_gone_after_the_first_request_that_reads_it(index: int, mode: CacheMode) -> None:
    engine = pinned_engine()
    executor_of(engine).corrupt(blocks_of(engine)[index])
    prompt = [*FIXED, 20, 21]
    assert generate(engine, make_request("finds", prompt, 3, cache=mode)) == {"finds": expected_tokens(prompt, 3)}
    stats = engine.stats()
    assert (stats.counters.num_row_errors, stats.counters.num_recomputes, stats.pool.evictions_by_cause["failed"]) == (
        0,
        1,
        4,
    )
    assert state_of(engine) is PrefixState.READY and cached(engine, [*FIXED, 5]) == 16
    assert engine.stats().counters.num_recomputes == 1


def test_a_request_that_was_computed_again_says_that_it_reused_nothing() -> None:
    engine = pinned_engine()
    executor_of(engine).corrupt(blocks_of(engine)[2])
    engine.add_request(make_request("finds", [*FIXED, 20]))
    (output,) = run(engine)["finds"]
    assert output.breakdown is not None and output.num_cached_tokens == 0 and output.breakdown.computed == 17


def test_all_that_read_a_corrupt_block_at_once_are_answered_and_one_is_computed_alone() -> None:
    engine = pinned_engine(max_seqs=8)
    executor_of(engine).corrupt(blocks_of(engine)[2])
    prompts = {f"r{number}": [*FIXED, 20 + number] for number in range(8)}
    tokens = generate(engine, *(make_request(request_id, prompt, 3) for request_id, prompt in prompts.items()))
    assert tokens == {request_id: expected_tokens(prompt, 3) for request_id, prompt in prompts.items()}
    assert engine.stats().counters.num_row_errors == 0
    again = [chunk for batch in executor_of(engine).batches[2:] for chunk in batch.chunks if chunk.start == 0]
    assert [len(chunk.token_ids) for chunk in again] == [17]  # the others take over what it has published


def test_only_one_request_at_a_time_is_computed_again() -> None:
    engine = pinned_engine(max_batched_tokens=8)
    for number in range(6):
        engine.add_request(make_request(f"bad{number}", [*FIXED, number, BAD]))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, sum(seq.recompute is not None for seq in engine.scheduler.running))
    assert most == 1


def test_a_second_run_publishes_nothing_before_its_verdict() -> None:
    engine = pinned_engine(max_batched_tokens=8)
    engine.add_request(make_request("bad", [*FIXED, *range(40, 60), BAD]))
    published: set[int] = set()
    while engine.has_work:
        engine.step()
        if any(seq.recompute is not None for seq in engine.scheduler.running):
            published.add(engine.stats().pool.num_published)
    assert published == {len(FIXED) // 4}


def test_honest_requests_go_on_while_others_are_computed_again() -> None:
    engine = pinned_engine(max_batched_tokens=16)
    prompts = {f"good{number}": [*FIXED, 40 + number] for number in range(4)}
    for number in range(12):
        engine.add_request(make_request(f"bad{number}", [*FIXED, number, BAD]))
    tokens = generate(engine, *(make_request(request_id, prompt, 6) for request_id, prompt in prompts.items()))
    assert {name: tokens[name] for name in prompts} == {n: expected_tokens(p, 6) for n, p in prompts.items()}
    assert engine.stats().pool.evictions_by_cause["failed"] == 0


@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_a_block_that_goes_bad_under_a_running_sequence_changes_no_token_of_it(step: int) -> None:
    engine = pinned_engine(max_batched_tokens=8)
    prompt = [*FIXED, *range(40, 57)]
    engine.add_request(make_request("runs", prompt, 7))
    outputs: list[RequestStepOutput] = []
    for _ in range(step):
        outputs += engine.step()
    executor_of(engine).corrupt(blocks_of(engine)[1])
    outputs += run(engine)["runs"]
    assert [token for output in outputs for token in output.token_ids] == expected_tokens(prompt, 7)
    assert engine.stats().counters.num_recomputes == 1 and cached(engine, [*FIXED, 5]) == 16


def test_the_second_failure_is_the_last() -> None:
    engine = pinned_engine()
    executor_of(engine).corrupt(blocks_of(engine)[0])
    engine.add_request(make_request("bad", [*FIXED, BAD]))
    assert last(run(engine)) == {"bad": FinishReason.ERROR}
    assert engine.stats().counters.num_recomputes == 1 and engine.stats().pool.evictions_by_cause["failed"] == 0
    assert cached(engine, [*FIXED, 5]) == 0  # the next one finds the block that is corrupt
    assert cached(engine, [*FIXED, 6]) == 16


def test_blocks_that_a_failed_request_wrote_are_not_found() -> None:
    engine = pinned_engine(max_batched_tokens=8)
    own = [*range(40, 48), BAD]
    engine.add_request(make_request("bad", [*FIXED, *own]))
    run(engine)
    assert cached(engine, [*FIXED, *own[:8], 5]) == 16
    assert engine.stats().pool.evictions_by_cause["failed"] == 2


def test_an_overflowing_request_that_computes_a_pinned_prefix_first_does_not_cost_it() -> None:
    engine = make_engine(poison=poison, max_batched_tokens=8, **ROOMY)
    for number in range(12):
        engine.add_request(make_request(f"bad{number}", [*FIXED, number, BAD]))
    engine.add_prefix("fixed", FIXED)
    run(engine)
    assert state_of(engine) is PrefixState.READY and engine.stats().counters.num_row_errors == 12
    assert cached(engine, [*FIXED, 5]) == 16


def test_without_room_for_a_copy_the_request_fails_and_the_prefix_stays() -> None:
    engine = make_engine(num_blocks=10, poison=poison)  # 9 usable, 4 pinned, so 5 for a copy
    engine.add_prefix("fixed", FIXED)
    run(engine)
    engine.add_request(make_request("bad", [*FIXED, *range(40, 48), BAD]))
    assert last(run(engine)) == {"bad": FinishReason.ERROR}
    assert engine.stats().counters.num_recomputes == 0 and cached(engine, [*FIXED, 5]) == 16


def test_without_shared_blocks_nothing_is_computed_again() -> None:
    engine = make_engine(poison=poison, **ROOMY)
    engine.add_request(make_request("bad", [*range(20, 30), BAD]))
    run(engine)
    assert engine.stats().counters.num_recomputes == 0 and engine.stats().counters.num_row_errors == 1


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_may_be_aborted_while_it_is_computed_again(steps: int) -> None:
    engine = pinned_engine(max_batched_tokens=8)
    executor_of(engine).corrupt(blocks_of(engine)[0])
    engine.add_request(make_request("gone", [*FIXED, 20], 5))
    for _ in range(steps):
        engine.step()
    assert engine.abort("gone") and not engine.has_work
    engine.scheduler.pool.check_invariants()
    assert cached(engine, [*FIXED, 5]) == 0 and cached(engine, [*FIXED, 6]) == 16


def test_a_cleared_cache_leaves_a_waiting_request_nothing_to_convict() -> None:
    engine = pinned_engine()
    executor_of(engine).corrupt(blocks_of(engine)[0])
    engine.add_request(make_request("waits", [*FIXED, 20], 2))
    engine.step()
    assert engine.reset_prefix_cache(pinned=True)
    outputs = run(engine)
    assert [token for output in outputs["waits"] for token in output.token_ids] == expected_tokens([*FIXED, 20], 2)
    assert engine.stats().pool.evictions_by_cause["failed"] == 0 and state_of(engine) is PrefixState.READY


# -------------------------------------------------------------------------------------------------------------- store


def stocked(**options: object) -> tuple[MemoryStore, Engine]:
    """A store that has the prefix, and an engine that has not."""
    store = MemoryStore()
    generate(make_engine(store=store, **ROOMY), make_request("a", FIXED))
    store.flush()
    fresh = MemoryStore(store.shelf)
    return fresh, make_engine(store=fresh, **{"poison": poison, **ROOMY, **options})  # type: ignore[arg-type]


def test_a_request_that_overflows_costs_the_store_no_block() -> None:
    store, engine = stocked()
    names = set(store.shelf)
    for number in range(5):
        engine.add_request(make_request(f"bad{number}", [*FIXED, number, BAD]))
        run(engine)
    assert len(store.loads) == 1 and names <= set(store.shelf)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)])
def test_one_that_computes_all_by_itself_costs_the_store_no_block(sampling: SamplingParams) -> None:
    store, engine = stocked(max_batched_tokens=8)
    names = set(store.shelf)
    engine.add_request(Request("bad", array("i", [*FIXED, BAD]), sampling))
    run(engine)
    assert engine.stats().counters.num_row_errors == 1 and names <= set(store.shelf)


def test_what_an_overflowing_request_wrote_does_not_stay_in_the_store() -> None:
    store, engine = stocked(max_batched_tokens=8)
    names = set(store.shelf)
    engine.add_request(make_request("bad", [*FIXED, *range(40, 60), BAD]))
    while engine.has_work:
        engine.step()
        store.flush()
    assert set(store.shelf) == names


def test_a_corrupt_block_of_the_store_is_replaced_by_what_was_computed() -> None:
    store, engine = stocked()
    name, (key, data) = next(iter(store.shelf.items()))
    store.shelf[name] = key, b"\xfe\xff\xff\xff" * (len(data) // 4)  # garbage of the checking executor
    prompt = [*FIXED, 20]
    assert generate(engine, make_request("finds", prompt, 3)) == {"finds": expected_tokens(prompt, 3)}
    store.flush()
    assert store.shelf[name] == (key, data)
    assert generate(make_engine(store=MemoryStore(store.shelf), **ROOMY), make_request("b", prompt))
