"""Belady's optimal eviction for prefix caches: the largest number of hits that any eviction policy can reach.

A pool of `num_blocks` serves one request after the other. While a request is served, the pool holds all of its blocks;
what is left may keep others. A block hits if it was kept since its previous use, so every pair of consecutive uses of a
block is an interval: it hits if the block is kept at all requests in between. At each of them at most `num_blocks` less
that request's own blocks can be kept. The largest set of intervals within these limits is found by one pass in time
order: where too many blocks are to be kept, those with the latest next use are dropped, deepest first (Belady, IBM
Systems Journal 5/2, 1966; for intervals of one weight and limits that vary, Faigle and Nawijn, 1995).

The result is exact, and prefix closed without being forced to: a block is used whenever a block behind it is used, so
its next use is not later, and it is dropped after them. It is an upper bound for every engine that serves the requests
in this order, also for one that serves several at a time: these only leave less for others.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

NEVER = -1


def belady_hit_blocks_per_request(paths: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
    """Return the number of leading blocks of each request that hit in a pool of `num_blocks`. O(n log n).

    `paths` are the chains of block ids, equal if all blocks up to there are equal. Of a path longer than the pool only
    the first `num_blocks` are cached.
    """
    held = [path[:num_blocks] for path in paths]
    next_uses = _next_uses(held)
    kept: dict[int, int] = {}  # block -> its next use
    drops: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block); void: not in `kept`
    hits: list[int] = []
    for path, uses in zip(held, next_uses, strict=True):
        num_hits = sum(1 for block in path if kept.pop(block, None) is not None)
        hits.append(num_hits)
        while len(kept) > num_blocks - len(path):
            use, _, block = heappop(drops)
            if kept.get(block) == -use:
                del kept[block]
        for depth, (block, use) in enumerate(zip(path, uses, strict=True)):
            if use != NEVER:
                kept[block] = use
                heappush(drops, (-use, -depth, block))
    return hits


def infinite_cache_hits(paths: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of leading blocks of each request that an infinite cache holds."""
    known: set[int] = set()
    hits: list[int] = []
    for path in paths:
        hits.append(sum(1 for block in path if block in known))
        known.update(path)
    return hits


def _next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each block of each path the index of the next path with it, or NEVER."""
    last: dict[int, int] = {}
    found: list[list[int]] = []
    for index in range(len(paths) - 1, -1, -1):
        found.append([last.get(block, NEVER) for block in paths[index]])
        last.update(dict.fromkeys(paths[index], index))
    found.reverse()
    return found
