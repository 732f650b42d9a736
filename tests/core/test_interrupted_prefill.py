"""A prefill that was interrupted is continued: the same prompt, sent again, computes only what was not computed before.

Blocks of 4 tokens. An interrupted prefill keeps all full blocks that were computed, so at most 3 tokens of those are
computed twice.
"""

import random

import pytest
from checking import expected_tokens, generate, make_engine, make_request, run
from memory_store import MemoryStore

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine import Engine
from headstart.core.request import Request
from headstart.core.sequence import Sequence

BLOCK = 4
PROMPT = [token % 97 for token in range(3, 43)]  # 40 tokens


def steps(engine: Engine, num: int) -> None:
    for _ in range(num):
        assert engine.step() == []
        engine.scheduler.pool.check_invariants()


def breakdown(engine: Engine, request: Request) -> PromptTokenBreakdown:
    engine.add_request(request)
    found = [output.breakdown for output in run(engine)[request.request_id] if output.breakdown is not None]
    assert len(found) == 1
    return found[0]


def num_prefilled(engine: Engine) -> int:
    return engine.stats().counters.prefill_tokens


@pytest.mark.parametrize("chunk", [8, 9, 6])
def test_a_prefill_aborted_at_nine_tenths_computes_the_last_tenth(chunk: int) -> None:
    engine = make_engine(20, max_batched_tokens=chunk, max_seqs=2)
    engine.add_request(make_request("a", PROMPT))
    steps(engine, 36 // chunk)
    assert engine.abort("a")
    kept = 36 // chunk * chunk // BLOCK * BLOCK
    assert breakdown(engine, make_request("again", PROMPT)) == PromptTokenBreakdown(shared=kept, computed=40 - kept)
    assert num_prefilled(engine) <= 40 + BLOCK - 1


def test_control_without_a_cache_everything_is_computed_again() -> None:
    engine = make_engine(20, max_batched_tokens=9, max_seqs=2, enable_prefix_caching=False)
    engine.add_request(make_request("a", PROMPT))
    steps(engine, 4)
    engine.abort("a")
    assert breakdown(engine, make_request("again", PROMPT)).computed == 40


def test_the_answer_after_an_interruption_is_the_same() -> None:
    engine = make_engine(20, max_batched_tokens=8, max_seqs=2)
    engine.add_request(make_request("a", PROMPT, 5))
    steps(engine, 3)
    engine.abort("a")
    assert generate(engine, make_request("again", PROMPT, 5))["again"] == expected_tokens(PROMPT, 5)


def test_a_prefill_aborted_while_it_waits_between_two_chunks_keeps_them() -> None:
    """It waits in the queue: it was preempted in the middle of its prompt, and its blocks are idle."""
    engine = make_engine(18, max_batched_tokens=6, max_seqs=4, expects_short_outputs=True)
    others = [f"decode-{index}" for index in range(3)]
    for index, request_id in enumerate(others):
        engine.add_request(make_request(request_id, [90 + index, 91, 92], 24))
    engine.add_request(make_request("long", PROMPT))
    waiting: list[Sequence] = []
    while not waiting:
        engine.step()
        waiting = [seq for seq in engine.scheduler.waiting if seq.num_preemptions and seq.request_id == "long"]
    assert waiting[0].num_covered_tokens == 36 and waiting[0].num_output_tokens == 0
    for request_id in ("long", *others):
        assert engine.abort(request_id)
    assert breakdown(engine, make_request("again", PROMPT)) == PromptTokenBreakdown(shared=36, computed=4)


def test_a_retry_that_arrives_before_the_abort_continues_where_it_ended() -> None:
    engine = make_engine(40, max_batched_tokens=8, max_seqs=4)
    engine.add_request(make_request("a", PROMPT))
    steps(engine, 3)
    engine.add_request(make_request("again", PROMPT))
    steps(engine, 1)  # it takes over what is there and waits for the other
    assert engine.abort("a")
    (output,) = run(engine)["again"]
    assert output.breakdown is not None and output.breakdown.computed <= 40 - 32
    assert num_prefilled(engine) == 40


@pytest.mark.parametrize("ceil", [False, True])
def test_page_aligned_chunks_lose_nothing(ceil: bool) -> None:
    engine = make_engine(20, align=BLOCK, charge_ceil=ceil, max_batched_tokens=9, max_seqs=2)
    engine.add_request(make_request("a", PROMPT))
    steps(engine, 4)
    (seq,) = engine.scheduler.running
    assert seq.num_computed_tokens % BLOCK == 0
    kept = seq.num_computed_tokens
    assert kept >= 32 and engine.abort("a")
    assert breakdown(engine, make_request("again", PROMPT)) == PromptTokenBreakdown(shared=kept, computed=40 - kept)
    assert num_prefilled(engine) == 40


def test_an_interrupted_prefill_survives_its_eviction_in_the_store() -> None:
    store = MemoryStore()
    engine = make_engine(13, max_batched_tokens=9, max_seqs=2, store=store)
    engine.add_request(make_request("a", PROMPT))
    steps(engine, 4)
    engine.abort("a")
    store.flush()
    generate(engine, make_request("flood", [80 + token % 10 for token in range(46)]))
    fresh = engine.scheduler.cache.new_sequence(make_request("now", PROMPT), 0)
    assert engine.scheduler.cache.match_prefix(fresh).num_tokens == 0  # all of it was evicted
    assert breakdown(engine, make_request("again", PROMPT)) == PromptTokenBreakdown(store=36, computed=4)


def test_an_interrupted_prefill_survives_a_restart_in_the_store() -> None:
    store = MemoryStore()
    engine = make_engine(20, max_batched_tokens=9, max_seqs=2, store=store)
    engine.add_request(make_request("a", PROMPT))
    steps(engine, 4)
    engine.abort("a")
    store.flush()
    later = make_engine(20, store=store)
    assert breakdown(later, make_request("again", PROMPT)) == PromptTokenBreakdown(store=36, computed=4)
    assert num_prefilled(later) == 4


def test_a_load_from_the_store_that_is_interrupted_is_not_lost() -> None:
    store = MemoryStore()
    generate(make_engine(20, store=store), make_request("stock", PROMPT))
    store.flush()
    store.habits.piece, store.habits.load_delay = lambda: 2, lambda: 1
    engine = make_engine(20, store=store)
    engine.add_request(make_request("a", PROMPT))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    assert breakdown(engine, make_request("again", PROMPT)).computed == 1


@pytest.mark.parametrize("seed", range(8))
def test_any_interruptions_at_random_cost_less_than_a_block_each(seed: int) -> None:
    """One prompt, aborted again and again at random steps: no interruption costs more than a partly filled block."""
    rng = random.Random(seed)
    engine = make_engine(40, max_seqs=3, max_batched_tokens=rng.randint(3, 11))
    aborts = 0
    for number in range(12):
        engine.add_request(make_request(f"try-{number}", PROMPT))
        for _ in range(rng.randint(1, 4)):
            engine.step()
        aborts += engine.abort(f"try-{number}")
    run(engine)
    generate(engine, make_request("last", PROMPT))
    # A prompt that is cached to its end still computes its last token, for its logits.
    assert num_prefilled(engine) <= len(PROMPT) + aborts * (BLOCK - 1) + 13
