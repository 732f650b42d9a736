"""The pool by hand: order of reuse, verification on a hit, and what happens to corrupt blocks."""

from array import array

import pytest
from pools import ROOT, STRIDE, Index, lookup, names_of, publish_chain

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import root_hash
from headstart.core.cache.history import EvictionRecord


def test_scratch_is_reused_before_published_blocks_and_tails_before_heads() -> None:
    pool = BlockPool(8)
    chain, scratch = pool.allocate(3), pool.allocate(2)
    publish_chain(pool, chain, range(12))
    pool.release(chain)
    pool.release(scratch)
    assert pool.allocate(7)[:2] == scratch  # last in, first out: released from the end, so the first comes first
    pool.check_invariants()


def test_eviction_takes_the_least_recently_released_chain_from_its_tail() -> None:
    pool = BlockPool(7)
    old, new = pool.allocate(3), pool.allocate(3)
    old_names, new_names = publish_chain(pool, old, range(12)), publish_chain(pool, new, range(20, 32))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(4) == [*reversed(old), new[2]]
    assert lookup(pool, old_names, range(12)) == [] and lookup(pool, new_names, range(20, 32)) == new[:2]
    assert pool.num_capacity_evictions == 4


def test_a_hit_revives_idle_blocks_and_they_are_not_handed_out() -> None:
    pool = BlockPool(5)
    chain = pool.allocate(2)
    names = publish_chain(pool, chain, range(8))
    pool.release(chain)
    hit = lookup(pool, names, range(8))
    assert pool.num_idle_among(hit) == 2
    pool.acquire(hit)
    assert not set(pool.allocate(2)) & set(hit) and pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_published_blocks_are_listed_with_their_users_pins_and_reuse() -> None:
    pool = BlockPool(8, eviction_policy="2q")
    chain, private = pool.allocate(2), pool.allocate(1)
    names = publish_chain(pool, chain, range(8))
    pool.pin_hashes(names[:1])
    pool.release(chain)
    pool.acquire(chain[1:])
    rows = pool.published_in_id_range(0, 8)
    assert [(row.block, row.block_hash, row.num_refs, row.is_pinned) for row in rows] == [
        (chain[0], names[0], 0, True),
        (chain[1], names[1], 1, False),
    ]
    assert rows[1].is_reused and not rows[1].tenant and rows[1].parent == names[0]
    assert pool.published_in_id_range(private[0], 8) == [] and pool.published_in_id_range(8, 99) == []


def test_a_colliding_name_is_a_miss() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    names = publish_chain(pool, [block], range(4))
    assert lookup(pool, names, range(4)) == [block]
    assert lookup(pool, names, range(1, 5)) == []  # the name's tokens differ
    assert (
        pool.match_prefix(names, root_hash(b"other"), array("i", range(4)).tobytes(), STRIDE) == []
    )  # its parent differs


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
    pool.check_invariants()


def test_distrusted_blocks_are_not_found_and_are_zeroed_before_the_next_use() -> None:
    pool = BlockPool(4)
    used, idle = pool.allocate(1), pool.allocate(1)
    names = publish_chain(pool, [*used, *idle], range(8))
    pool.release(idle)
    pool.discard_corrupt([*used, *idle])
    pool.release(used)
    pool.check_invariants()
    assert lookup(pool, names, range(8)) == [] and pool.take_unzeroed_blocks() == []
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert sorted(pool.take_unzeroed_blocks()) == sorted([*used, *idle]) and pool.take_unzeroed_blocks() == []


def test_clear_forgets_names_but_not_owners() -> None:
    pool = BlockPool(4)
    used, idle = pool.allocate(1), pool.allocate(1)
    names = publish_chain(pool, [*used, *idle], range(8))
    pool.release(idle)
    pool.clear_published()
    pool.check_invariants()
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


def test_a_pool_drained_to_empty_is_handed_out_again_in_the_order_of_release() -> None:
    pool = BlockPool(5)
    for _ in range(3):
        blocks = pool.allocate(4)
        assert pool.num_free == 0
        pool.release(blocks)
        pool.check_invariants()
    assert pool.allocate(4) == blocks


def test_asking_for_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool(5)
    chain = pool.allocate(2)
    publish_chain(pool, chain, range(8))
    pool.release(chain)
    with pytest.raises(AssertionError, match="5 blocks wanted, 4 free"):
        pool.allocate(5)
    assert pool.num_free == 4 and pool.num_published == 2 and pool.evictions["capacity"] == 0
    pool.check_invariants()


@pytest.mark.parametrize("policy", ["lru", "2q"])
def test_scratch_goes_first_then_cached_chains_from_their_tails(policy: str) -> None:
    pool = BlockPool(11, eviction_policy=policy)
    cached, partial, _ = pool.allocate(4), pool.allocate(2), pool.allocate(0)
    publish_chain(pool, cached, range(16))
    pool.release([*cached, *partial])
    # the partly filled blocks, last in first out; then those never used; then the chain
    assert pool.allocate(10) == [*partial, 7, 8, 9, 10, *reversed(cached)]


def test_of_a_hit_and_another_block_the_other_one_is_evicted() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    names = publish_chain(pool, first, range(4))
    publish_chain(pool, second, range(10, 14))
    pool.release(first)
    pool.release(second)
    hit = lookup(pool, names, range(4))
    assert pool.num_available_after_acquire(hit) == 1
    pool.acquire(hit)
    assert pool.allocate(1) == second and lookup(pool, names, range(4)) == first


def test_a_block_that_is_filled_anew_has_lost_its_name() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    old = publish_chain(pool, blocks, range(4))
    pool.release(blocks)
    assert pool.allocate(1) == blocks and not pool.contains(old[0])
    new = publish_chain(pool, blocks, range(10, 14))
    assert pool.contains(new[0]) and lookup(pool, old, range(4)) == []


def test_of_two_blocks_of_one_content_the_published_one_can_still_be_found() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    names = publish_chain(pool, first, range(4))
    pool.publish(second[0], names[0], ROOT, array("i", range(4)).tobytes())
    pool.release(second)
    assert pool.allocate(1) == second and lookup(pool, names, range(4)) == first
    pool.release(first)
    pool.allocate(2)
    assert not pool.contains(names[0])


def test_what_was_evicted_is_remembered_with_who_needed_its_place_and_when() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    names = publish_chain(pool, blocks, range(8))
    pool.release(blocks)
    assert pool.find_eviction_record(names[1]) is None
    pool.now = 7.0
    pool.allocate(1, by="r9")
    assert (
        pool.find_eviction_record(names[1]) == EvictionRecord("capacity", "r9", 7.0)
        and pool.find_eviction_record(names[0]) is None
    )
    pool.discard_corrupt(blocks[:1])
    assert pool.find_eviction_record(names[0]) == EvictionRecord("failed", "", 7.0)
    assert pool.evictions == {"capacity": 1, "failed": 1, "reset": 0, "replaced": 0}


def test_2q_finds_a_chain_that_comes_back_between_scans_and_lru_does_not() -> None:
    found: dict[str, list[int]] = {}
    for policy in ("lru", "2q"):
        pool = BlockPool(9, eviction_policy=policy)
        found[policy] = []
        for use in range(5):
            hit = lookup(pool, names_of(range(8)), range(8))
            found[policy].append(len(hit))
            pool.acquire(hit)
            chain = hit + pool.allocate(2 - len(hit))
            if not hit:
                publish_chain(pool, chain, range(8))
            pool.release(chain)
            for one_off in range(12):  # three times the pool
                start = 1000 * (use + 1) + 10 * one_off
                blocks = pool.allocate(2)
                publish_chain(pool, blocks, range(start, start + 8))
                pool.release(blocks)
        pool.check_invariants()
    assert found == {"lru": [0, 0, 0, 0, 0], "2q": [0, 0, 2, 2, 2]}


def test_listeners_hear_of_every_change_and_of_a_clear_once() -> None:
    pool = BlockPool(4)
    index = Index()
    pool.listeners.append(index)
    blocks = pool.allocate(3)
    names = publish_chain(pool, blocks, range(12))
    pool.release(blocks)
    assert index.names == set(names)
    pool.allocate(1)
    assert index.names == set(names[:2])
    pool.discard_corrupt(blocks[1:2])
    assert index.names == set(names[:1])
    index.removed_names.clear()
    pool.clear_published()
    assert index.names == set() and index.num_clears == 1 and index.removed_names == []


def test_clear_counts_what_it_forgets() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    names = publish_chain(pool, blocks, range(8))
    pool.release(blocks)
    pool.clear_published()
    assert pool.evictions["reset"] == 2 and pool.find_eviction_record(names[0]) == EvictionRecord("reset", "", 0.0)
    pool.check_invariants()
