"""FirstBlockTable: an index that is not asked has nothing of the prompt, whatever happened; and the table stays
small."""

import gc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fleets import BLOCK, ROOT, ask, endpoint, names, prompt

from headstart.core.cache.events import BlockStored
from headstart.core.cache.hashing import BlockHash
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.first_blocks import UNLISTED, FirstBlockTable
from headstart.router.index.kv_event_index import ReplicaKVEventIndex
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import ReportedTokenUsage


@given(st.integers(0, 2**32))
def test_hits_are_those_of_every_index_asked_alone(seed: int) -> None:
    """Small caches that evict, lose all, are cleared and replaced; reports that contradict them; blocks at first token.

    One index had blocks before it was added.
    """
    rng, router, under_way = Random(seed), Router(), list[RoutedInFlight]()
    for number in range(4):
        index = ApproximateIndex(rng.choice((4, 6, 20)), at_pick=rng.random() < 0.5)
        if not number:
            index.record_finished(index.record_sent(names(1, 2)), names(1, 2))
        router.add(Endpoint(f"r{number}", index, block_size=BLOCK))
    assert router.endpoints["r0"].index.number != UNLISTED
    for number in range(60):
        now = float(number)
        request, act = ask(*[rng.randrange(3) for _ in range(rng.randrange(5))]), rng.random()
        decision = router.pick(request, now)
        block_hashes = request.prompt.block_hashes(BLOCK)
        for candidate in decision.view.candidates:
            assert candidate.hit_blocks == candidate.endpoint.index.num_cached_prefix_blocks(block_hashes, now)
        if act < 0.5 or not under_way:
            under_way.append(router.record_sent(decision, now, rng.choice((None, f"r{rng.randrange(4)}"))))
        elif act < 0.85:
            done = under_way.pop(rng.randrange(len(under_way)))
            tokens = done.view.request.prompt.num_tokens
            router.record_finished(done, now, rng.choice((None, ReportedTokenUsage(tokens, rng.randrange(tokens)))))
        elif act < 0.93:
            router.record_failed(under_way.pop(), now, blame=False)
        else:
            chosen = router.endpoints[f"r{rng.randrange(4)}"]
            if rng.random() < 0.5:
                chosen.index.on_cache_reset()
            else:
                chosen.reset_for_block_size(BLOCK, ApproximateIndex(6))


@given(st.integers(1, 9), st.integers(0, 9), st.integers(-1, 12))
def test_a_guess_of_the_hit_changes_nothing_but_the_time(num: int, cached: int, near: int) -> None:
    block_hashes, index = names(*range(num)), ApproximateIndex(16)
    cached = min(cached, num)
    index.record_finished(index.record_sent(block_hashes[:cached]), block_hashes[:cached])
    assert index.num_cached_prefix_blocks(block_hashes, near=near) == cached


def test_only_replicas_that_may_have_the_first_block_are_asked() -> None:
    router, asked = Router(), list[str]()
    for name in ("r0", "r1"):
        router.add(endpoint(name))

    def noting(name: str, index: ApproximateIndex) -> None:
        match = index.num_cached_prefix_blocks
        index.num_cached_prefix_blocks = lambda *args: asked.append(name) or match(*args)  # type: ignore[method-assign]

    router.record_sent(router.pick(ask(1, 2), 0.0), 0.0, "r1")
    for name, one in router.endpoints.items():
        noting(name, one.index)  # type: ignore[arg-type]
    assert [c.hit_blocks for c in router.pick(ask(1, 2, 3), 1.0).view.candidates] == [0, 2] and asked == ["r1"]


def test_an_index_that_was_filled_before_it_was_added_is_asked_only_for_what_it_may_have() -> None:
    router, asked = Router(), list[str]()
    guess, told = ApproximateIndex(16), ReplicaKVEventIndex(BLOCK, lambda adapter, domain: ROOT)
    guess.record_finished(guess.record_sent(names(1, 2)), names(1, 2))
    tokens = prompt(3, 4).token_ids[: 2 * BLOCK]
    told.apply([BlockStored((BlockHash(b"x"), BlockHash(b"y")), None, tokens, BLOCK)])
    for number, index in enumerate((guess, told)):
        router.add(Endpoint(f"r{number}", index, block_size=BLOCK))
        match = index.num_cached_prefix_blocks
        index.num_cached_prefix_blocks = lambda *args, n=number, match=match: asked.append(f"r{n}") or match(*args)  # type: ignore
    for blocks, hits, names_asked in (((1, 2, 5), [2, 0], ["r0"]), ((3, 4), [0, 2], ["r1"]), ((5, 6), [0, 0], [])):
        asked.clear()
        assert [c.hit_blocks for c in router.pick(ask(*blocks), 1.0).view.candidates] == hits and asked == names_asked


def test_an_index_belongs_to_one_router() -> None:
    """Its number says nothing in the table of another one: there it would never be asked."""
    shared = endpoint("r0")
    Router().add(shared)
    with pytest.raises(AssertionError, match="one router"):
        Router().add(shared)


def test_the_table_is_about_as_large_as_what_is_cached() -> None:
    """Ten thousand prompts, none twice, in a cache of 16 blocks."""
    table, index = FirstBlockTable(), ApproximateIndex(16)
    table.add_index(index)
    for number in range(10_000):
        block_hashes = [BlockHash(number.to_bytes(32, "little"))]
        index.record_finished(index.record_sent(block_hashes), block_hashes)
    assert 16 <= len(table) <= 34


def test_an_index_that_is_gone_is_forgotten() -> None:
    table = FirstBlockTable()
    for number in range(100):
        index = ApproximateIndex(16)
        table.add_index(index)
        block_hashes = [BlockHash(number.to_bytes(32, "little"))]
        index.record_sent(block_hashes)
        del index
        gc.collect(0)
    assert len(table) <= 4
