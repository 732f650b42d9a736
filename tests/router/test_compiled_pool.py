"""Compiled pools decide as those in Python do: equal indexes, and equal decisions of whole fleets."""

import os
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from router.fleets import BLOCK, ask, names

from headstart.core.cache.hashing import BlockHash
from headstart.model.kernels.build import BuildError, find_cxx_compiler
from headstart.model.kernels.compiled_pool import compiled_pool_factory
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.modelled_pool import MakePool, ModelledPool
from headstart.router.index.prefix_index import Reservation
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import ReportedTokenUsage

POOLS = compiled_pool_factory()
needs_pools = pytest.mark.skipif(POOLS is None, reason="no compiler")
POLICIES = ("lru", "2q")


def test_there_are_compiled_pools_wherever_there_is_a_compiler() -> None:
    """Or else the tests below would be left out without a word."""
    if os.environ.get("HEADSTART_KERNELS") == "none":
        pytest.skip("there are to be no kernels")
    try:
        assert find_cxx_compiler(os.environ) and POOLS is not None
    except BuildError:
        assert POOLS is None


class Twins:
    """Two indexes that get the same calls; what they answer is compared after each."""

    def __init__(self, num_blocks: int, policy: str, *, at_pick: bool) -> None:
        assert POOLS is not None
        makers: tuple[MakePool, MakePool] = (ModelledPool, POOLS)
        self.indexes = [
            ApproximateIndex(num_blocks, eviction_policy=policy, at_pick=at_pick, allow=lambda _, n: n, make_pool=make)
            for make in makers
        ]

    def record_sent(self, chain: list[BlockHash]) -> list[Reservation]:
        one, other = reservations = [index.record_sent(chain) for index in self.indexes]
        for name in ("hit", "sure", "missing", "evicted", "doubtful", "epoch", "num_losses"):
            assert getattr(one, name) == getattr(other, name), name
        assert len(one.blocks) == len(other.blocks) and list(one.serials) == list(other.serials)
        return reservations

    def call(self, name: str, reservations: list[Reservation], *args: object) -> None:
        for index, reservation in zip(self.indexes, reservations, strict=True):
            getattr(index, name)(reservation, *args)

    def check(self, chains: list[list[BlockHash]], rng: Random) -> None:
        one, other = self.indexes
        for index in self.indexes:
            index.check()
        assert one.describe() == other.describe() and one.num_unreserved_blocks == other.num_unreserved_blocks
        for chain in chains:
            near = rng.randrange(len(chain) + 1)
            assert one.num_cached_prefix_blocks(chain, near=near) == other.num_cached_prefix_blocks(chain)
            assert one.count_in_use_and_prefix(chain) == other.count_in_use_and_prefix(chain)
            assert all((block in one) == (block in other) for block in chain)
        for num in (1, 3, 70):
            assert one.expected_evicted_reusable_blocks(num) == other.expected_evicted_reusable_blocks(num)


@needs_pools
@given(st.integers(0, 2**32), st.sampled_from(POLICIES), st.booleans())
@example(101, "lru", True)
def test_an_index_on_compiled_pools_equals_one_in_python(seed: int, policy: str, at_pick: bool) -> None:
    """Chains that share beginnings, evictions, failures, reports that shrink, grow and flush it, and resets."""
    rng = Random(seed)
    twins = Twins(rng.choice((3, 6, 20, 60)), policy, at_pick=at_pick)
    chains = [names(*(rng.randrange(3) for _ in range(rng.randrange(1, 9)))) for _ in range(12)]
    under_way: list[list[Reservation]] = []
    for _ in range(60):
        act = rng.random()
        if act < 0.45 or not under_way:
            under_way.append(twins.record_sent(rng.choice(chains)))
        elif act < 0.55:
            twins.call("record_prefilled", rng.choice(under_way))
        elif act < 0.7:
            chosen = rng.choice(under_way)
            twins.call("on_hit_reported", chosen, rng.randrange(len(chosen[0].block_hashes) + 1))
        elif act < 0.88:
            done = under_way.pop(rng.randrange(len(under_way)))
            longer = [chain for chain in chains if chain[: len(done[0].block_hashes)] == done[0].block_hashes]
            twins.call("record_finished", done, rng.choice([done[0].block_hashes, *longer]))
        elif act < 0.97:
            twins.call("record_failed", under_way.pop(), rng.randrange(3))
        else:
            for index in twins.indexes:
                index.clear()
        twins.check(chains, rng)


@needs_pools
@pytest.mark.parametrize("policy", POLICIES)
def test_pools_that_grow_and_forget_evictions_stay_equal(policy: str) -> None:
    """Several times their initial size, with more evictions than are remembered, and tables that widen."""
    rng, twins = Random(1), Twins(5_000, policy, at_pick=True)
    seen: list[list[BlockHash]] = []
    for number in range(160):
        chain = [BlockHash(rng.randbytes(32)) for _ in range(rng.randrange(1, 200))]
        if seen and rng.random() < 0.5:
            chain = rng.choice(seen)[: rng.randrange(1, 150)] + chain
        seen.append(chain)
        reservations = twins.record_sent(chain)
        twins.call("record_finished", reservations, chain)
        if not number % 20:
            twins.check(seen[-30:], rng)
    twins.check(seen, rng)


@needs_pools
@given(st.integers(0, 2**32))
def test_fleets_on_compiled_pools_decide_as_those_in_python(seed: int) -> None:
    """Replicas join, some with a filled index, leave, and lose their caches; prompts hit some of them in part."""
    assert POOLS is not None
    rng = Random(seed)
    makers: tuple[MakePool, MakePool] = (ModelledPool, POOLS)
    routers = (Router(), Router(match_all=POOLS.match_in_all_pools))
    under_way: list[tuple[RoutedInFlight, RoutedInFlight]] = []
    num_made = 0

    def join() -> None:
        nonlocal num_made
        size, chain, is_filled = rng.choice((4, 16, 40)), names(1, 2, 0), rng.random() < 0.3
        policy, block_size = rng.choice(POLICIES), rng.choice((BLOCK, BLOCK, 2 * BLOCK))
        for router, make in zip(routers, makers, strict=True):
            index = ApproximateIndex(size, eviction_policy=policy, make_pool=make)
            if is_filled:
                index.record_finished(index.record_sent(chain), chain)
            router.add(Endpoint(f"r{num_made}", index, block_size=block_size))
        num_made += 1

    for _ in range(rng.choice((2, 5, 30))):
        join()
    for number in range(50):
        now, act = float(number), rng.random()
        if act < 0.05:
            join()
        elif act < 0.1 and len(routers[0].endpoints) > 1:
            name = rng.choice(list(routers[0].endpoints))
            for router in routers:
                router.remove(name)
        elif act < 0.15:
            name = rng.choice(list(routers[0].endpoints))
            for router in routers:
                router.endpoints[name].index.on_cache_reset()
        elif act < 0.6 or not under_way:
            tokens = [rng.randrange(3) for _ in range(rng.randrange(7))]
            one, other = (router.pick(ask(*tokens), now) for router in routers)
            assert [c.name for c in one.choice.ranked] == [c.name for c in other.choice.ranked]
            assert one.choice.scores == other.choice.scores
            hits = [(c.hit_blocks, c.hit_tokens) for c in one.view.candidates]
            assert hits == [(c.hit_blocks, c.hit_tokens) for c in other.view.candidates]
            sent = (routers[0].record_sent(one, now), routers[1].record_sent(other, now))
            under_way.append(sent)
        else:
            done = under_way.pop(rng.randrange(len(under_way)))
            usage = rng.choice((None, ReportedTokenUsage(done[0].view.num_prompt_tokens or 1, rng.randrange(20))))
            if rng.random() < 0.85:
                for router, one in zip(routers, done, strict=True):
                    router.record_finished(one, now, usage)
            else:
                for router, one in zip(routers, done, strict=True):
                    router.record_failed(one, now, blame=False)


@needs_pools
def test_a_replaced_pool_is_freed_in_slices() -> None:
    assert POOLS is not None
    index = ApproximateIndex(20_000, make_pool=POOLS)
    chain = [BlockHash(bytes([0] * 24) + number.to_bytes(8, "little")) for number in range(10_000)]
    index.record_finished(index.record_sent(chain), chain)
    index.clear()
    freed = 0
    while num := index.free_discarded_entries(1_000):
        freed += num
    assert freed >= 10_000 and len(index) == 0
