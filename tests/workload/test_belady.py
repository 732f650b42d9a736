"""The Belady bound: equal to an exhaustive search on small instances, and no policy of the pool beats it."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.workload.belady import belady_hit_blocks_per_request, infinite_cache_hits
from headstart.workload.block_paths import BlockPaths
from headstart_lab.cache.eviction_replay import replay

Paths = list[list[int]]


def chains(words: Sequence[Sequence[int]]) -> Paths:
    """Words over a small alphabet as chains of ids: equal ids, equal prefixes."""
    ids: dict[tuple[int, ...], int] = {}
    return [[ids.setdefault(tuple(word[: end + 1]), len(ids)) for end in range(len(word))] for word in words]


def best(paths: Paths, num_blocks: int) -> int:
    """The largest number of hits, over all choices of what a pool keeps. Only leading blocks hit."""
    held = [tuple(path[:num_blocks]) for path in paths]

    @cache
    def from_here(index: int, kept: frozenset[int]) -> int:
        if index == len(held):
            return 0
        path = held[index]
        hits = next((depth for depth, block in enumerate(path) if block not in kept), len(path))
        others = sorted(kept - set(path))
        space = min(num_blocks - len(path), len(others))
        # Keeping more is never worse, so only the largest sets of others have to be tried.
        return hits + max(
            from_here(index + 1, frozenset(path) | frozenset(chosen)) for chosen in combinations(others, space)
        )

    return from_here(0, frozenset())


words = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8)


@settings(max_examples=300, deadline=None)
@given(words, st.integers(1, 6))
def test_the_bound_is_the_best_of_all_choices(given_words: list[list[int]], num_blocks: int) -> None:
    paths = chains(given_words)
    assert sum(belady_hit_blocks_per_request(paths, num_blocks)) == best(paths, num_blocks)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=40), st.integers(1, 20), st.integers(1, 4))
def test_no_eviction_policy_hits_more(given_words: list[list[int]], num_blocks: int, concurrency: int) -> None:
    paths = chains(given_words)
    bound = belady_hit_blocks_per_request(paths, num_blocks)
    prompts = BlockPaths(1, paths, [len(path) for path in paths])
    for policy in EVICTION_POLICIES:
        assert sum(replay(prompts, policy, num_blocks, concurrency)) <= sum(bound)
    ideal = infinite_cache_hits(paths)
    assert all(hit <= most for hit, most in zip(bound, ideal, strict=True))
    assert belady_hit_blocks_per_request(paths, sum(map(len, paths)) + 1) == ideal


def test_it_keeps_what_is_used_next_and_not_what_was_used_last() -> None:
    paths = chains([[1], [2], [3], [1], [2]])
    assert belady_hit_blocks_per_request(paths, 2) == [
        0,
        0,
        0,
        1,
        0,
    ]  # 1 is kept past 2 and 3; least recently used finds nothing
    assert belady_hit_blocks_per_request(paths, 3) == [0, 0, 0, 1, 1]


def test_hits_are_leading_blocks_also_where_space_ends_within_a_chain() -> None:
    paths = chains([[1, 1, 1], [2, 2], [1, 1, 1]])
    assert belady_hit_blocks_per_request(paths, 4) == [0, 0, 2]
    assert belady_hit_blocks_per_request(paths, 2) == [0, 0, 0]  # the pool is full of the second one


@pytest.mark.parametrize(("num_blocks", "hits"), [(2, 2), (8, 3)])
def test_of_a_prompt_longer_than_the_pool_only_the_beginning_is_cached(num_blocks: int, hits: int) -> None:
    assert belady_hit_blocks_per_request(chains([[1, 1, 1], [1, 1, 1]]), num_blocks) == [0, hits]
