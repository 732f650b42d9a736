"""Pinned prefixes of a model with states: the checkpoint at a prefix's end is kept like its blocks."""

from random import Random

import pytest
from checking import make_request
from memory_store import MemoryStore
from states import PAGES, StateExecutor, serve, state_engine, text

from headstart.core.cache.hashing import is_checkpoint_page_hash
from headstart.core.cache.pinned_prefix import PrefixState
from headstart.core.engine import Engine
from headstart.core.errors import InvalidRequestError

PREFIX = text(20)


def warm(engine: Engine) -> None:
    """Run until the prefix is computed."""
    for _ in range(20):
        if engine.has_work:
            assert engine.step() == []
    assert engine.list_prefixes()[0].state is PrefixState.READY


def pinned(store: MemoryStore | None = None, *, tenant: str = "", num_blocks: int = 33) -> Engine:
    engine = state_engine(num_blocks, store=store)
    engine.add_prefix("p", PREFIX, tenant=tenant, domain=tenant.encode())
    warm(engine)
    return engine


def traffic(engine: Engine, seed: int, num: int = 30) -> None:
    """Requests of several tenants that fill the pool many times."""
    rng = Random(seed)
    for index in range(num):
        prompt = [rng.randrange(90) for _ in range(rng.randint(5, 60))]
        engine.add_request(make_request(f"t{index}", prompt, 6, tenant=rng.choice(["", "a", "b"])))
    while engine.has_work:
        engine.step()
        engine.scheduler.pool.check_invariants()


def cached(engine: Engine, prompt: list[int], **fields: object) -> tuple[int, int]:
    """The tokens that are cached and pinned of a prompt, whose answer is checked."""
    engine.add_request(make_request("x", prompt, 3, **fields))
    outputs = [output for _ in range(30) if engine.has_work for output in engine.step()]
    found = next(output.breakdown for output in outputs if output.breakdown is not None)
    return found.num_cached, found.pinned


@pytest.mark.parametrize("seed", range(5))
def test_a_pinned_prefix_is_a_hit_after_any_traffic(seed: int) -> None:
    engine = pinned()
    for _ in range(3):
        traffic(engine, seed)
        assert cached(engine, [*PREFIX, 91, 92]) == (20, 20)
    assert engine.scheduler.pool.evictions["capacity"] > 50


def test_blocks_and_pages_count_as_pinned_and_are_free_again_when_it_is_removed() -> None:
    engine = pinned()
    assert engine.list_prefixes()[0].num_blocks == engine.stats().pool.num_pinned == 5 + PAGES
    assert engine.remove_prefix("p")
    assert engine.stats().pool.num_pinned == engine.stats().pool.num_pinned_idle == 0
    engine.scheduler.pool.check_invariants()


def test_a_public_prefix_is_a_hit_for_every_domain_and_a_private_one_for_its_own() -> None:
    assert cached(pinned(), [*PREFIX, 91], tenant="a", domain=b"a") == (20, 20)
    private = pinned(tenant="a")
    traffic(private, 1)
    assert cached(private, [*PREFIX, 91], tenant="a", domain=b"a") == (20, 20)
    assert cached(private, [*PREFIX, 91], tenant="b", domain=b"b") == (0, 0)


def test_pages_count_against_the_share_that_may_be_pinned() -> None:
    engine = state_engine(13)  # 12 blocks, of which 6 may be pinned
    with pytest.raises(InvalidRequestError, match="makes 7 pinned blocks"):
        engine.add_prefix("p", PREFIX)


def test_a_pinned_state_that_is_not_finite_is_computed_again() -> None:
    engine = pinned(num_blocks=65)
    executor, states = engine.executor, engine.scheduler.cache.checkpoints
    assert isinstance(executor, StateExecutor)
    hashes = engine.scheduler.cache.new_sequence(make_request("x", PREFIX), 0).block_hashes
    for block in states.find_deepest(hashes, 5)[1]:
        executor.spoil(block)
    serve(engine, [*PREFIX, 91], 2)
    warm(engine)
    assert cached(engine, [*PREFIX, 92]) == (20, 20) and engine.scheduler.counters.num_recomputes == 1


def test_a_reset_that_includes_pins_computes_them_again() -> None:
    engine = pinned()
    engine.reset_prefix_cache(pinned=True)
    warm(engine)
    assert cached(engine, [*PREFIX, 91]) == (20, 20)


def test_after_a_restart_a_pinned_prefix_is_loaded_and_one_token_is_computed() -> None:
    store = MemoryStore()
    pinned(store)
    store.flush()
    assert sum(map(is_checkpoint_page_hash, store.kept)) == PAGES
    engine = pinned(MemoryStore(store.shelf))
    executor = engine.executor
    assert isinstance(executor, StateExecutor)
    assert sum(len(chunk.token_ids) for batch in executor.batches for chunk in batch.chunks) == 1


def test_an_answer_that_is_a_pinned_prefix_does_not_lose_it() -> None:
    """Its end so far is replaced by a later one, but for the pinned one."""
    engine = state_engine(65)
    prompt = [5, 6, 7]
    engine.add_request(make_request("a", prompt, 17))
    answer = [token for _ in range(30) if engine.has_work for output in engine.step() for token in output.token_ids]
    engine.add_prefix("p", [*prompt, *answer[:5]])
    warm(engine)
    engine.scheduler.pool.clear_published(pinned=True)
    engine.scheduler.prefixes.take_aborts_and_requests()
    serve(engine, prompt, 17, name="b")
    hashes = engine.scheduler.cache.new_sequence(make_request("x", [*prompt, *answer]), 0).block_hashes
    assert engine.scheduler.cache.checkpoints.find_deepest(hashes, 2)[0] == 2
