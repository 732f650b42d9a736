"""Miss ratios of a log over the size of an LRU cache of blocks, in one pass (Mattson's stack algorithm, 1970).

A request uses its blocks from the last to the first, so that the beginning of a prompt is always more recent than its
end, and what is found is a prefix. Long logs are sampled by block hash, as in SHARDS (Waldspurger et al., FAST 2015).
"""

from collections.abc import Sequence
from typing import NamedTuple

MAX_USES = 400_000  # of blocks, followed one by one; beyond that a sample is


class MissRatio(NamedTuple):
    """The share of prompt tokens that a cache of `cache_tokens` does not hold."""

    cache_tokens: int
    miss_ratio: float


def miss_ratios(prompts: Sequence[Sequence[int]], block_tokens: int) -> list[MissRatio]:
    """Return the miss ratios of prompts, each the hashes of its blocks, for caches of 1, 2, 4, ... blocks up to all."""
    num_uses = sum(map(len, prompts))
    rate = num_uses // MAX_USES + 1
    sampled = [[block for block in reversed(prompt) if block % rate == 0] for prompt in prompts]
    distances, num_blocks, num_sampled = _distances(sampled)
    points: list[MissRatio] = []
    size = 1
    while num_sampled:
        hits = sum(count for distance, count in distances.items() if distance * rate <= size)
        points.append(MissRatio(size * block_tokens, 1 - hits / num_sampled))
        if size >= num_blocks * rate:
            break
        size *= 2
    return points


def _distances(prompts: Sequence[Sequence[int]]) -> tuple[dict[int, int], int, int]:
    """Return how often a block is used again after so many distinct blocks, itself included; the blocks; the uses."""
    num_uses = sum(map(len, prompts))
    tree = [0] * (num_uses + 1)  # a Fenwick tree: 1 at the last use of each block

    def add(at: int, value: int) -> None:
        while at <= num_uses:
            tree[at] += value
            at += at & -at

    def total(at: int) -> int:
        found = 0
        while at:
            found += tree[at]
            at -= at & -at
        return found

    last: dict[int, int] = {}
    found: dict[int, int] = {}
    now = 0
    for prompt in prompts:
        for block in prompt:
            now += 1
            before = last.get(block)
            if before is not None:
                distance = len(last) - total(before - 1)
                found[distance] = found.get(distance, 0) + 1
                add(before, -1)
            last[block] = now
            add(now, 1)
    return found, len(last), num_uses
