"""The perfect cache that redundancy is measured against: a fast one and its slow twin, and the figure of an engine."""

from random import Random

import pytest
from checking import generate, make_engine, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.cache.hashing import BlockHash
from headstart.core.engine import Engine
from headstart.core.request import CacheMode
from headstart.core.sched import ideal_cache as ideal
from headstart.core.sched.ideal_cache import MIN_HASHES, POOLS, IdealCache, max_remembered_hashes

BLOCK = 4


def names(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(8, "little")) for number in numbers]


def chain(*path: int) -> list[BlockHash]:
    """The chained names of the blocks of one path in a tree."""
    return [BlockHash(bytes(path[: depth + 1])) for depth in range(len(path))]


class SlowIdealCache:
    """The same by its definition: every use is kept for ever, and names are counted one by one from the first."""

    def __init__(self, max_hashes: int) -> None:
        self.max_hashes = max_hashes
        self.generations: list[list[list[BlockHash]]] = [[]]

    def held(self, last: int) -> set[BlockHash]:
        """All names used in the last so many generations."""
        return {name for uses in self.generations[-last:] for chain in uses for name in chain}

    def num_known(self, names: list[BlockHash]) -> int:
        held = self.held(2)
        return next((index for index, name in enumerate(names) if name not in held), len(names))

    def learn(self, names: list[BlockHash]) -> None:
        is_new = bool(set(names) - self.held(1))
        if is_new and len(self.held(1)) >= max(self.max_hashes // 2, 1):
            self.generations.append([])
        self.generations[-1].append(names)


PATHS = st.lists(st.integers(0, 2), max_size=7).map(tuple)


@settings(max_examples=300, deadline=None)
@given(paths=st.lists(st.tuples(PATHS, st.booleans()), max_size=60), max_hashes=st.integers(1, 30))
def test_it_knows_what_its_slow_twin_knows_whatever_is_forgotten(
    paths: list[tuple[tuple[int, ...], bool]], max_hashes: int
) -> None:
    fast, slow = IdealCache(max_hashes), SlowIdealCache(max_hashes)
    longest = max((len(path) for path, _ in paths), default=0)
    for path, is_learned in paths:
        asked = chain(*path)
        assert fast.num_cached_prefix_blocks(asked) == slow.num_known(asked)
        if is_learned:
            fast.record_use(asked)
            slow.learn(asked)
            assert fast.num_cached_prefix_blocks(asked) == len(asked)
        assert len(fast) <= max_hashes + 2 * longest


@settings(max_examples=200, deadline=None)
@given(paths=st.lists(PATHS, max_size=60), max_hashes=st.integers(2, 40))
def test_what_was_used_before_fewer_names_than_half_of_the_bound_is_known(
    paths: list[tuple[int, ...]], max_hashes: int
) -> None:
    fast = IdealCache(max_hashes)
    for index, path in enumerate(paths):
        asked, known, since = chain(*path), 0, set[BlockHash]()
        for earlier in reversed(paths[:index]):  # until half of the bound was used since, or more
            if len(since) >= max_hashes // 2:
                break
            used = set(chain(*earlier))
            since |= used
            known = max(known, sum(name in used for name in asked))
        assert known <= fast.num_cached_prefix_blocks(asked) <= len(asked)
        fast.record_use(asked)


def test_it_knows_the_leading_names_that_were_there_before() -> None:
    cache = IdealCache(100)
    assert cache.num_cached_prefix_blocks(names(1, 2, 3)) == 0
    cache.record_use(names(1, 2, 3))
    assert cache.num_cached_prefix_blocks(names(1, 2, 3, 4)) == 3 and cache.num_cached_prefix_blocks(names(1, 2)) == 2
    assert cache.num_cached_prefix_blocks(names(5, 6)) == 0 and cache.num_cached_prefix_blocks([]) == 0


def test_a_chain_that_is_forgotten_is_forgotten_from_its_tail() -> None:
    """By hand: a chain of 6 names, 4 of them used again, among 3 generations of 8 names each."""
    cache = IdealCache(16)
    cache.record_use(names(1, 2, 3, 4, 5, 6))
    cache.record_use(names(11, 12))  # 8 names: the generation is full
    cache.record_use(names(1, 2, 3, 4))  # used in this generation: no new name
    cache.record_use(names(21, 22))
    cache.record_use(names(1, 2, 3, 4))  # used in the next generation too
    assert cache.num_cached_prefix_blocks(names(1, 2, 3, 4, 5, 6)) == 6
    cache.record_use(names(*range(31, 35)))
    assert cache.num_cached_prefix_blocks(names(1, 2, 3, 4, 5, 6)) == 6
    cache.record_use(names(41))  # the first generation is forgotten
    assert cache.num_cached_prefix_blocks(names(1, 2, 3, 4, 5, 6)) == 4
    assert cache.num_cached_prefix_blocks(names(11, 12)) == 0


def test_it_remembers_several_pools_of_names_and_no_more() -> None:
    assert max_remembered_hashes(10) == MIN_HASHES and max_remembered_hashes(MIN_HASHES) == POOLS * MIN_HASHES
    cache = IdealCache(max_remembered_hashes(10))
    for number in range(3 * MIN_HASHES):
        cache.record_use(names(number))
        assert cache.num_cached_prefix_blocks(names(max(number - MIN_HASHES // 2 + 1, 0))) == 1
    assert len(cache) <= MIN_HASHES


def infinite(prompts: list[list[int]]) -> int:
    """Tokens that a cache computes which never forgets, nor knows what follows a prompt."""
    known: set[tuple[int, ...]] = set()
    total = 0
    for prompt in prompts:
        blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        hits = next((index for index, block in enumerate(blocks) if block not in known), len(blocks))
        total += max(len(prompt) - BLOCK * hits, 1)
        known.update(blocks)
    return total


def long_run(engine: Engine, seed: int, num_requests: int) -> list[list[int]]:
    """Prompts of a tree that is many times larger than the pool, one at a time; returns them."""
    rng, prompts = Random(seed), list[list[int]]()
    for number in range(num_requests):
        prompt = [token for _ in range(rng.randrange(1, 7)) for token in [rng.randrange(3)] * BLOCK]
        prompts.append(prompt + [5] * rng.randrange(1, BLOCK))
        generate(engine, make_request(f"r{number}", prompts[-1]))
    return prompts


@pytest.mark.parametrize("seed", range(4))
def test_the_figure_of_a_long_run_is_between_what_is_computed_and_an_infinite_cache(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little is remembered: what the engine did not compute, a perfect cache did not either."""
    monkeypatch.setattr(ideal, "MIN_HASHES", 8 * seed)
    monkeypatch.setattr(ideal, "POOLS", seed % 2)
    engine = make_engine(num_blocks=17)
    prompts = long_run(engine, seed, 400)
    stats = engine.stats()
    assert infinite(prompts) <= stats.counters.ideal_tokens <= stats.counters.prefill_tokens


def test_the_figure_of_a_long_run_is_that_of_an_infinite_cache_as_long_as_nothing_is_forgotten() -> None:
    engine = make_engine(num_blocks=17)
    prompts = long_run(engine, 7, 400)
    assert engine.stats().counters.ideal_tokens == infinite(prompts) < engine.stats().counters.prefill_tokens


def test_a_pinned_prefix_is_no_new_prompt_however_long_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideal, "MIN_HASHES", 8)
    monkeypatch.setattr(ideal, "POOLS", 0)
    engine = make_engine(num_blocks=17)
    engine.add_prefix("fixed", range(8))
    for number in range(20):
        generate(engine, make_request(f"other{number}", range(10 * number, 10 * number + 9)))
    before = engine.stats().counters.ideal_tokens
    generate(engine, make_request("asks", [*range(8), 90]))
    assert engine.stats().counters.ideal_tokens - before == 1


def test_a_read_only_prompt_uses_blocks_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideal, "MIN_HASHES", 8)
    monkeypatch.setattr(ideal, "POOLS", 0)
    cache = IdealCache(max_remembered_hashes(0))
    engine = make_engine(num_blocks=17)
    engine.scheduler.accounting._ideal = cache
    generate(engine, make_request("first", range(16)))
    for request_id in ("reads", "again"):
        before = engine.stats().counters.ideal_tokens
        generate(engine, make_request(request_id, [*range(16), 20, 20, 20, 20], cache=CacheMode.READ_ONLY))
        assert engine.stats().counters.ideal_tokens - before == 4
