"""The pool by hand: what is kept longer than its turn. Pins, wishes, hints, shares of tenants."""

from array import array

import pytest
from pools import Index, lookup, names_of, publish_chain

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.core.request import DEFAULT_RETENTION, RetentionHint


def store(
    pool: BlockPool, tokens: range, tenant: str = "", retention: RetentionHint = DEFAULT_RETENTION
) -> tuple[list[int], list[BlockHash]]:
    """A chain that was computed and is idle now."""
    blocks = pool.allocate(len(tokens) // 4, tenant)
    names = publish_chain(pool, blocks, tokens, tenant)
    pool.release(blocks, retention)
    return blocks, names


def test_pinned_blocks_are_neither_free_nor_evicted_until_unpinned() -> None:
    pool = BlockPool(6)
    pinned, names = store(pool, range(8))
    pool.pin_hashes(names)
    assert (pool.num_free, pool.num_pinned_idle, pool.num_pinned_hashes) == (3, 2, 2)
    pool.allocate(3)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)
    pool.check_invariants()
    pool.unpin_hashes(names)
    pool.check_invariants()
    assert pool.num_free == 2 and pool.allocate(2) == list(reversed(pinned))


def test_a_pinned_block_in_use_becomes_idle_and_pinned_and_back() -> None:
    pool = BlockPool(4)
    blocks, names = store(pool, range(4))
    pool.pin_hashes(names)
    assert (
        pool.num_idle_among(blocks) == 0 and pool.num_available_after_acquire(blocks) == 2
    )  # it was not free to begin with
    pool.acquire(blocks)
    assert pool.num_pinned_idle == 0 and pool.num_free == 2
    pool.release(blocks)
    assert pool.num_pinned_idle == 1 and pool.num_free == 2
    pool.check_invariants()


def test_a_name_may_be_pinned_before_it_is_computed_and_more_than_once() -> None:
    pool = BlockPool(4)
    names = names_of(range(4))
    pool.pin_hashes(names)
    pool.pin_hashes(names)
    blocks, _ = store(pool, range(4))
    assert pool.is_pinned(names[0]) and pool.num_pinned_idle == 1
    pool.unpin_hashes(names)
    assert pool.num_pinned_idle == 1
    pool.unpin_hashes(names)
    assert pool.num_pinned_idle == 0 and pool.num_free == 3 and lookup(pool, names, range(4)) == blocks
    with pytest.raises(AssertionError, match="unpinned more often"):
        pool.unpin_hashes(names)


def test_unpinned_while_in_use_it_is_ordinary_cache_when_released() -> None:
    pool = BlockPool(3)
    blocks, names = store(pool, range(4))
    pool.pin_hashes(names)
    pool.acquire(blocks)
    pool.unpin_hashes(names)
    pool.release(blocks)
    assert pool.num_free == 2 and pool.num_pinned_idle == 0
    pool.check_invariants()


def test_clear_spares_pinned_blocks_unless_they_are_meant_too() -> None:
    pool = BlockPool(8)
    index = Index()
    pool.listeners.append(index)
    _, names = store(pool, range(8))
    _, others = store(pool, range(20, 28))
    pool.pin_hashes(names)
    pool.clear_published()
    pool.check_invariants()
    assert index.names == set(names) and index.num_clears == 0 and set(index.removed_names) == set(others)
    pool.clear_published(pinned=True)
    pool.check_invariants()
    assert index.names == set() and index.num_clears == 1 and pool.num_free == 7
    blocks, _ = store(pool, range(8))  # still pinned by name
    assert pool.num_pinned_idle == 2 and lookup(pool, names, range(8)) == blocks


def test_a_pinned_block_whose_row_failed_is_given_up_and_may_be_computed_again() -> None:
    pool = BlockPool(4)
    blocks, names = store(pool, range(4))
    pool.pin_hashes(names)
    pool.discard_corrupt(blocks)
    pool.check_invariants()
    assert pool.num_free == 3 and not pool.contains(names[0])
    store(pool, range(4))
    assert pool.num_pinned_idle == 1


@pytest.mark.parametrize("policy", ["lru", "2q"])
def test_wanted_blocks_are_evicted_after_all_others_and_still_tails_first(policy: str) -> None:
    pool = BlockPool(6, eviction_policy=policy)
    wanted, names = store(pool, range(8))
    others, _ = store(pool, range(20, 32))
    pool.add_queued_refs(names)
    assert pool.allocate(3) == list(reversed(others))
    pool.check_invariants()
    assert pool.allocate(2) == list(reversed(wanted))


def test_two_requests_want_one_block_until_both_have_it() -> None:
    pool = BlockPool(3)
    wanted, names = store(pool, range(4))
    other, _ = store(pool, range(20, 24))
    pool.add_queued_refs(names)
    pool.add_queued_refs(names)
    pool.drop_queued_refs(names)
    assert pool.allocate(1) == other
    pool.drop_queued_refs(names)
    with pytest.raises(AssertionError, match="dereferenced more often"):
        pool.drop_queued_refs(names)
    assert pool.allocate(1) == wanted


def test_a_wish_may_grow_with_the_chain_and_be_taken_back_at_once() -> None:
    pool = BlockPool(5)
    blocks, names = store(pool, range(8))
    others, _ = store(pool, range(20, 28))
    pool.add_queued_refs(names[:1])
    pool.add_queued_refs(names[1:])
    assert pool.allocate(2) == list(reversed(others))
    pool.drop_queued_refs(names)
    assert pool.allocate(2) == list(reversed(blocks))
    pool.check_invariants()


def test_blocks_that_were_spared_go_back_in_line_without_references() -> None:
    pool = BlockPool(6)
    _, names = store(pool, range(8))
    others, _ = store(pool, range(20, 32))
    pool.add_queued_refs(names)
    pool.release(pool.allocate(1))  # the wanted chain was first in line and is set aside
    pool.drop_queued_refs(names)
    pool.check_invariants()
    assert pool.allocate(3) == [others[2], others[1], others[0]]
    assert [pool.contains(name) for name in names] == [True, True]


def test_a_tail_that_went_back_in_line_stays_before_its_wanted_head() -> None:
    pool = BlockPool(5)
    blocks, names = store(pool, range(8))
    store(pool, range(20, 28))
    pool.add_queued_refs(names[:1])
    pool.add_queued_refs(names)
    pool.allocate(1)  # both were first in line and are set aside
    pool.drop_queued_refs(names)
    pool.add_queued_refs(names)
    pool.allocate(1)
    pool.check_invariants()
    assert pool.allocate(2) == list(reversed(blocks))


def test_use_of_a_pinned_block_counts_as_use_without_a_hint() -> None:
    pool = BlockPool(3)
    other, _ = store(pool, range(20, 24))
    blocks, names = store(pool, range(4))
    pool.pin_hashes(names)
    pool.acquire(blocks)
    pool.release(blocks, RetentionHint(10))
    pool.unpin_hashes(names)
    assert pool.allocate(2) == [*other, *blocks]


def test_heat_spreads_through_pinned_blocks_to_the_head_of_their_chain() -> None:
    pool = BlockPool(5, eviction_policy="2q")
    names, raw = names_of(range(8)), array("i", range(4, 8)).tobytes()
    head = pool.allocate(1)
    publish_chain(pool, head, range(4))  # in use to the end: by itself it is not used again
    for _ in range(2):
        pool.acquire(head)
        tail = pool.allocate(1)
        pool.publish(tail[0], names[1], names[0], raw)  # the second time it was evicted before
        if not pool.is_pinned(names[0]):
            pool.release([*head, *tail])
            pool.release(pool.allocate(3))
            pool.pin_hashes(names)
    pool.release([*head, *tail])
    pool.release(head)
    pool.unpin_hashes(names)
    one_off, _ = store(pool, range(20, 24))
    assert pool.allocate(4)[1:] == [*one_off, *tail, *head]


def test_wants_of_names_that_are_not_there_do_no_harm() -> None:
    pool = BlockPool(3)
    names = names_of(range(8))
    pool.add_queued_refs(names)
    blocks, _ = store(pool, range(4))
    assert pool.allocate(2) and not pool.contains(names[0])
    pool.drop_queued_refs(names)
    assert pool.ref_count(blocks[0]) == 1


def test_low_priority_goes_first_and_high_priority_last() -> None:
    pool = BlockPool(7)
    high, _ = store(pool, range(8), retention=RetentionHint(90))
    normal, _ = store(pool, range(20, 28))
    low, _ = store(pool, range(40, 48), retention=RetentionHint(10))
    pool.check_invariants()
    assert pool.allocate(6) == [*reversed(low), *reversed(normal), *reversed(high)]


def test_a_retention_time_ends_and_the_block_counts_as_just_released() -> None:
    pool = BlockPool(4)
    kept, _ = store(pool, range(4), retention=RetentionHint(90, ttl=10.0))
    first, _ = store(pool, range(20, 24))
    second, _ = store(pool, range(40, 44))
    pool.now = 9.0
    assert pool.allocate(1) == first
    pool.now = 10.0
    pool.release(first)
    pool.allocate(1)
    assert pool.allocate(1) == second
    assert pool.allocate(1) == kept
    pool.check_invariants()


def flood(pool: BlockPool, tenant: str, num: int) -> None:
    """One-off blocks, one after the other."""
    for index in range(num):
        start = 1000 + 4 * index
        store(pool, range(start, start + 4), tenant)


def test_a_flood_of_one_tenant_leaves_another_its_share() -> None:
    pool = BlockPool(21, tenant_floor=0.5)
    _, names = store(pool, range(40), "b")
    flood(pool, "a", 60)
    pool.check_invariants()
    assert [pool.contains(name) for name in names] == [True] * 10  # the larger one loses first, and that is a


def test_a_tenant_cannot_take_the_share_of_another_except_as_a_last_resort() -> None:
    pool = BlockPool(9, tenant_floor=0.5)
    _, names = store(pool, range(20), "b")  # 5 blocks; the floor is 4 until there is a second tenant, then 2
    assert pool.num_available_after_acquire((), "a") == 3 + 1
    assert pool.num_available_after_acquire((), "a", last_resort=True) == pool.num_available_after_acquire((), "b") == 8
    pool.allocate(4, "a")
    assert [pool.contains(name) for name in names] == [True] * 4 + [False]
    assert pool.num_available_after_acquire((), "a") == 2 and pool.num_available_after_acquire((), "b") == 4
    pool.allocate(2, "a")
    with pytest.raises(AssertionError, match="2 blocks wanted, 0 free"):
        pool.allocate(2, "a")
    pool.allocate(2, "a", last_resort=True)
    pool.check_invariants()
    assert not any(map(pool.contains, names))


def test_a_hit_leaves_less_to_protect() -> None:
    pool = BlockPool(9, tenant_floor=0.5)
    blocks, _ = store(pool, range(12), "b")
    assert pool.num_available_after_acquire(blocks, "a") == 5 and pool.num_available_after_acquire(blocks[:1], "a") == 5
    assert pool.num_available_after_acquire((), "a") == 5


def test_public_blocks_have_no_floor() -> None:
    pool = BlockPool(9, tenant_floor=0.5)
    _, names = store(pool, range(16))
    pool.allocate(8, "a")
    assert not any(map(pool.contains, names))


def test_the_tenant_with_most_to_spare_loses_first() -> None:
    pool = BlockPool(10)
    _, few = store(pool, range(8), "b")
    _, many = store(pool, range(100, 120), "c")
    pool.allocate(2 + 3, "a")
    assert [pool.contains(name) for name in few] == [True] * 2
    assert [pool.contains(name) for name in many] == [True] * 2 + [False] * 3
