"""Checkpoints that come back from a store, with the blocks before them: 4 tokens a block, 2 pages a state."""

import pytest
from checking import expected_tokens, make_request
from memory_store import Habits, MemoryStore, Shelf
from states import PAGES, random_run, serve, state_engine, text

from headstart.core.cache.hashing import checkpoint_page_hash, is_checkpoint_page_hash
from headstart.core.engine import Engine


def stocked(prompt: list[int], num: int = 1) -> MemoryStore:
    """A store with the blocks and checkpoints of a prompt and its answer."""
    store = MemoryStore()
    serve(state_engine(65, store=store), prompt, num)
    store.flush()
    return MemoryStore(store.shelf)


def stored(engine: Engine, prompt: list[int], name: str = "a") -> int:
    """The tokens of a prompt that came from the store."""
    found = serve(engine, prompt, name=name).breakdown
    assert found is not None
    return found.store


def hashes(engine: Engine, prompt: list[int]) -> list:
    return engine.scheduler.cache.new_sequence(make_request("x", prompt), 0).block_hashes


def test_after_a_restart_the_same_prompt_begins_at_its_checkpoint() -> None:
    store = stocked(text(22))
    engine = state_engine(65, store=store)
    assert stored(engine, text(22)) == 20
    (load,) = store.loads
    assert [is_checkpoint_page_hash(key.block_hash) for key in load] == [True] * PAGES + [False] * 5
    assert engine.executor.num_reads == 1


def test_after_a_restart_the_next_turn_begins_where_the_last_one_ended() -> None:
    prompt = text(22)
    engine = state_engine(65, store=stocked(prompt, 8))
    assert stored(engine, [*prompt, *expected_tokens(prompt, 8), *text(7, 50)]) == 28


def test_the_end_of_an_answer_is_stored_once() -> None:
    store = MemoryStore()
    serve(state_engine(129, store=store), text(22), 40)
    store.flush()
    assert sum(map(is_checkpoint_page_hash, store.shelf)) == 2 * PAGES  # of the prompt and of the whole answer


def test_blocks_without_a_whole_state_are_not_loaded() -> None:
    store = stocked(text(22))
    engine = state_engine(65, store=store)
    del store.shelf[checkpoint_page_hash(hashes(engine, text(22))[4], 1)]
    assert stored(engine, text(22)) == 0
    assert store.loads == []


def test_a_state_whose_blocks_are_in_the_pool_is_loaded_alone() -> None:
    store = MemoryStore()
    engine = state_engine(65, store=store)
    serve(engine, text(22), name="0")
    store.flush()
    engine.scheduler.pool.discard_replaced(
        engine.scheduler.cache.checkpoints.find_deepest(hashes(engine, text(22)), 5)[1]
    )
    found = serve(engine, text(22), name="1").breakdown
    assert found is not None and found.num_cached == 20
    assert [[is_checkpoint_page_hash(key.block_hash) for key in load] for load in store.loads] == [[True] * PAGES]


def test_blocks_whose_state_is_in_the_pool_are_loaded_alone() -> None:
    store = MemoryStore()
    engine = state_engine(65, store=store)
    serve(engine, text(22), name="0")
    store.flush()
    pool = engine.scheduler.pool
    entry = pool.published_entry(hashes(engine, text(22))[2])
    assert entry is not None
    pool.discard_replaced([entry[0]])
    assert stored(engine, text(22), name="1") == 4
    assert [len(load) for load in store.loads] == [1]


def test_a_page_that_is_not_what_it_was_is_a_miss_and_the_checkpoint_before_it_is_used() -> None:
    store = stocked(text(22))
    first = state_engine(65, store=store)
    serve(first, [*text(22), *text(8, 60)])
    store.flush()
    later = MemoryStore(store.shelf)
    engine = state_engine(65, store=later)
    name = checkpoint_page_hash(hashes(engine, [*text(22), *text(8, 60)])[6], 0)
    key, data = later.shelf[name]
    later.shelf[name] = key._replace(tokens=bytes(16)), data  # what verification finds: another block's
    assert stored(engine, [*text(22), *text(8, 60)]) == 0  # it is asked for until it is given up
    del later.shelf[name]
    assert stored(state_engine(65, store=later), [*text(22), *text(8, 60)]) == 20


def test_twins_wait_for_one_state() -> None:
    store = MemoryStore(habits=Habits(load_delay=lambda: 2))
    engine = state_engine(129, store=store)
    serve(engine, text(22), name="0")
    store.flush()
    engine.scheduler.pool.discard_replaced(
        engine.scheduler.cache.checkpoints.find_deepest(hashes(engine, text(22)), 5)[1]
    )
    for index in range(3):
        engine.add_request(make_request(f"twin-{index}", [*text(22), 90 + index]))
    outputs = [output for _ in range(40) if engine.has_work for output in engine.step()]
    assert len(store.loads) == 1 and engine.scheduler.transfers.num_outstanding == 0
    assert [output.num_cached_tokens for output in outputs] == [20, 20, 20]


def test_a_running_sequence_behind_a_state_does_not_wait_for_it() -> None:
    store = stocked(text(22))
    store.habits = Habits(load_delay=lambda: 6)
    engine = state_engine(129, store=store, max_batched_tokens=8)
    engine.add_request(make_request("first", [*text(22), *text(60, 30)]))
    for _ in range(30):
        engine.step()
    assert not engine.has_work or engine.scheduler.transfers.num_outstanding == 0


def test_a_state_that_is_not_finite_is_discarded_from_the_store_too() -> None:
    store = stocked(text(22))
    engine = state_engine(65, store=store)
    names = [checkpoint_page_hash(hashes(engine, text(22))[4], index) for index in range(PAGES)]
    for name in names:
        key, data = store.shelf[name]
        store.shelf[name] = key, data[:8] + b"\xff" * 8 + data[16:]  # not a number
    assert stored(engine, [*text(22), 1]) == 0
    assert engine.scheduler.counters.num_recomputes == 1
    store.flush()
    assert all(store.shelf.get(name, (None, b""))[1][8:16] != b"\xff" * 8 for name in names)


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_never_get_a_wrong_state_from_a_store(seed: int) -> None:
    shelf: Shelf = {}
    random_run(seed, 60, shelf)
    assert sum(random_run(seed, 60, shelf)[1] for _ in range(2)) > 0  # the same requests after each of two restarts
