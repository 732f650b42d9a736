"""Promised blocks: whether a request should wait for blocks that running prefills are going to write.

Block hashes are chained, so equal hashes are at equal places and mean equal prefixes: all searches are by bisection.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

BlockHashes = Sequence[bytes]


class Writer(NamedTuple):
    """A running prefill: the hashes of the full blocks of its prompt, and how many of these are cached already."""

    block_hashes: BlockHashes
    num_written: int


def is_promised(
    block_hashes: BlockHashes, num_usable: int, writers: Iterable[Writer], is_cached: Callable[[bytes], bool]
) -> bool:
    """Return whether a writer is going to write the first of these blocks that is not cached. Changes nothing.

    `num_usable`: leading blocks that the request could take from the cache at all.
    """
    num_cached: int | None = None
    for writer in writers:
        num_common = num_common_blocks(block_hashes, writer.block_hashes, num_usable)
        if num_common <= writer.num_written:
            continue  # its part of the prefix is cached
        if num_cached is None:
            num_cached = num_cached_blocks(block_hashes, num_usable, is_cached)
        if num_cached < num_common:
            return True
    return False


def num_common_blocks(one: BlockHashes, other: BlockHashes, num_usable: int) -> int:
    """Return the number of leading blocks that are equal, at most `num_usable`."""
    low, high = 0, min(len(one), len(other), num_usable)
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def num_cached_blocks(block_hashes: BlockHashes, num_usable: int, is_cached: Callable[[bytes], bool]) -> int:
    """Return the number of leading blocks that are cached, at most `num_usable`.

    By bisection: the parents of a cached block are usually cached. Where they are not, the result may be any place
    with a cached block before it and a missing one behind it.
    """
    low, high = 0, min(len(block_hashes), num_usable)
    while low < high:
        middle = (low + high) // 2
        if is_cached(block_hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low
