"""The pool by hand: order of reuse, verification on a hit, and what happens to blocks nobody may trust."""

from array import array
from collections.abc import Iterable

import pytest

from headstart.core.blocks import BlockPool
from headstart.core.hashing import BlockHash, extend_hashes, root_hash

ROOT = root_hash(b"")
STRIDE = 16


def publish_chain(pool: BlockPool, blocks: list[int], tokens: range) -> list[BlockHash]:
    ids = array("i", tokens)
    names: list[BlockHash] = []
    extend_hashes(names, ids, 4, ROOT)
    for index, block in enumerate(blocks):
        raw = ids[index * 4 : index * 4 + 4].tobytes()
        assert pool.publish(block, names[index], names[index - 1] if index else ROOT, raw)
    return names


def lookup(pool: BlockPool, names: list[BlockHash], tokens: Iterable[int]) -> list[int]:
    return pool.lookup(names, ROOT, array("i", tokens).tobytes(), STRIDE)


def test_scratch_is_reused_before_published_blocks_and_tails_before_heads() -> None:
    pool = BlockPool(8)
    chain, scratch = pool.allocate(3), pool.allocate(2)
    publish_chain(pool, chain, range(12))
    pool.release(chain)
    pool.release(scratch)
    assert pool.allocate(7)[:2] == scratch  # last in, first out: released from the end, so the first comes first
    pool.check()


def test_eviction_takes_the_least_recently_released_chain_from_its_tail() -> None:
    pool = BlockPool(7)
    old, new = pool.allocate(3), pool.allocate(3)
    old_names, new_names = publish_chain(pool, old, range(12)), publish_chain(pool, new, range(20, 32))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(4) == [*reversed(old), new[2]]
    assert lookup(pool, old_names, range(12)) == [] and lookup(pool, new_names, range(20, 32)) == new[:2]
    assert pool.num_evictions == 4


def test_a_hit_revives_idle_blocks_and_they_are_not_handed_out() -> None:
    pool = BlockPool(5)
    chain = pool.allocate(2)
    names = publish_chain(pool, chain, range(8))
    pool.release(chain)
    hit = lookup(pool, names, range(8))
    assert pool.num_idle(hit) == 2
    pool.acquire(hit)
    assert not set(pool.allocate(2)) & set(hit) and pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_a_colliding_name_is_a_miss() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    names = publish_chain(pool, [block], range(4))
    assert lookup(pool, names, range(4)) == [block]
    assert lookup(pool, names, range(1, 5)) == []  # the name's tokens differ
    assert pool.lookup(names, root_hash(b"other"), array("i", range(4)).tobytes(), STRIDE) == []  # its parent differs


def test_a_colliding_name_deeper_in_a_chain_keeps_the_blocks_before_it() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    names = publish_chain(pool, blocks, range(8))
    assert lookup(pool, names, range(8)) == blocks
    assert lookup(pool, names, [*range(4), 9, 9, 9, 9]) == blocks[:1]


def test_the_second_block_of_one_name_stays_private() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    (name,) = publish_chain(pool, [first], range(4))
    assert not pool.publish(second, name, ROOT, array("i", range(4)).tobytes())
    pool.release([second])
    assert lookup(pool, [name], range(4)) == [first]
    pool.check()


def test_distrusted_blocks_are_not_found_and_are_zeroed_before_the_next_use() -> None:
    pool = BlockPool(4)
    used, idle = pool.allocate(1), pool.allocate(1)
    names = publish_chain(pool, [*used, *idle], range(8))
    pool.release(idle)
    pool.distrust([*used, *idle])
    pool.release(used)
    pool.check()
    assert lookup(pool, names, range(8)) == [] and pool.take_blocks_to_zero() == []
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert sorted(pool.take_blocks_to_zero()) == sorted([*used, *idle]) and pool.take_blocks_to_zero() == []


def test_clear_forgets_names_but_not_owners() -> None:
    pool = BlockPool(4)
    used, idle = pool.allocate(1), pool.allocate(1)
    names = publish_chain(pool, [*used, *idle], range(8))
    pool.release(idle)
    pool.clear()
    pool.check()
    assert lookup(pool, names, range(8)) == [] and pool.num_free == 2
    pool.release(used)
    assert pool.num_free == 3


def test_releasing_twice_and_sharing_what_is_private_are_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="not published"):
        pool.acquire(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_block_0_is_never_handed_out() -> None:
    assert 0 not in BlockPool(9).allocate(8)
    with pytest.raises(AssertionError):
        BlockPool(1)
