"""Speculation of a model with states: rejected drafts leave no trace, neither in a state nor in a checkpoint."""

from array import array

import pytest
from checking import expected_tokens, make_request, repeating_token
from states import StateExecutor, random_run, serve, state_engine, text

from headstart.core.batch import Chunk
from headstart.core.cache.hashing import is_checkpoint_page_hash
from headstart.core.engine import Engine
from headstart.core.speculation.speculation_config import SpeculationConfig

DRAFTS = SpeculationConfig(num_speculative_tokens=7, prompt_lookup_max=4, prompt_lookup_min=2)
CYCLE = [11, 12, 13, 14, 15, 16, 17]


def cycling(tokens: "array[int]") -> int:
    """A model that repeats CYCLE."""
    return CYCLE[(CYCLE.index(tokens[-1]) + 1) % len(CYCLE)] if tokens[-1] in CYCLE else CYCLE[0]


def leaving(tokens: "array[int]") -> int:
    """A model that repeats CYCLE, and leaves it at each eleventh token."""
    return 60 + len(tokens) % 20 if len(tokens) % 11 == 0 else cycling(tokens)


def chunks_of(engine: Engine) -> list[Chunk]:
    assert isinstance(engine.executor, StateExecutor)
    return [chunk for batch in engine.executor.batches for chunk in batch.chunks]


def test_a_place_within_accepted_drafts_has_its_checkpoint() -> None:
    engine = state_engine(129, speculation=DRAFTS, model=cycling)
    prompt = [*CYCLE, *CYCLE]
    serve(engine, prompt, 26, model=cycling)
    assert any(chunk.num_drafts > 4 for chunk in chunks_of(engine))
    answer = expected_tokens(prompt, 26, model=cycling)
    found = serve(engine, [*prompt, *answer, 50, 51], name="b", model=cycling).breakdown
    assert found is not None and found.num_cached == 36  # 39 tokens have a state, of 9 whole blocks


@pytest.mark.parametrize("num", range(8, 40, 3))
def test_a_place_within_rejected_drafts_has_none(num: int) -> None:
    engine = state_engine(129, speculation=DRAFTS, model=leaving)
    prompt = [*CYCLE, *CYCLE, *CYCLE]
    serve(engine, prompt, num, model=leaving)
    chunks, executor = chunks_of(engine), engine.executor
    assert isinstance(executor, StateExecutor)
    assert num < 14 or engine.stats().counters.num_draft_tokens > engine.stats().counters.num_accepted_tokens > 0
    saved = ((chunk, position) for chunk in chunks for position, _ in chunk.saves)
    assert num < 14 or any(position > chunk.start + chunk.num_non_draft_tokens for chunk, position in saved)
    known = array("i", [*prompt, *expected_tokens(prompt, num, model=leaving)])
    published = engine.scheduler.pool.published_hashes
    assert isinstance(published, dict)
    for name, (block, parent, _) in published.items():
        if is_checkpoint_page_hash(name):
            hashes = engine.scheduler.cache.new_sequence(make_request("x", known), 0).block_hashes
            assert executor.pages[block][0] == 4 * (hashes.index(parent) + 1)
    again = serve(engine, [*known, *text(5, 40)], 3, name="b", model=leaving).breakdown
    assert again is not None and again.num_cached == (len(known) - 1) // 4 * 4


def test_all_drafts_of_a_step_keep_to_their_limit() -> None:
    engine = state_engine(257, speculation=DRAFTS, model=cycling, max_draft_tokens=9)
    for index in range(6):
        engine.add_request(make_request(f"r{index}", [30 + index, *CYCLE, *CYCLE], 20))
    while engine.has_work:
        engine.step()
    assert isinstance(engine.executor, StateExecutor)
    most = max(sum(chunk.num_drafts for chunk in batch.chunks) for batch in engine.executor.batches)
    assert 0 < most <= 9


@pytest.mark.parametrize("seed", range(10))
def test_random_requests_with_drafts_never_get_a_wrong_state(seed: int) -> None:
    executor, _ = random_run(seed, 90, speculation=DRAFTS, model=repeating_token)
    chunks = [chunk for batch in executor.batches for chunk in batch.chunks]
    assert any(chunk.num_drafts for chunk in chunks)


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_with_drafts_and_a_store_never_get_a_wrong_state(seed: int) -> None:
    shelf: dict = {}
    random_run(seed, 60, shelf, DRAFTS, repeating_token)
    _, loaded = random_run(seed, 60, shelf, DRAFTS, repeating_token)
    assert loaded > 0


def test_a_hit_that_does_not_fit_beside_its_own_state_is_computed_again() -> None:
    """Of 16 blocks it would leave 7 for the 8 that are missing, and what waits behind it would wait for ever."""
    random_run(60_442, 400, speculation=DRAFTS, model=repeating_token)
