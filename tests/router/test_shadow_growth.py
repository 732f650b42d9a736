"""The shadow's pool: it begins small, grows to the capacity and, on proof, beyond it, and is emptied in slices."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router.fleets import names
from router.test_approximate_index import serve
from router.test_kv_event_index import new, stored

from headstart.core.cache.events import AllBlocksCleared
from headstart.router.index import modelled_pool as module
from headstart.router.index.approximate_index import FREED, FREED_PER_BLOCK, ApproximateIndex
from headstart.router.index.kv_event_index import FREED as FREED_PER_EVENT
from headstart.router.index.prefix_index import Reservation

ALL = 10**9  # entries


def report(shadow: ApproximateIndex, chain: list[bytes], cached: int) -> None:
    """A request of which so many blocks were cached."""
    hold = shadow.record_sent(chain)  # type: ignore[arg-type]
    shadow.on_hit_reported(hold, cached)
    shadow.record_finished(hold, hold.block_hashes)
    shadow.check()


def reuse(shadow: ApproximateIndex, count: int, num_requests: int) -> None:
    """Requests for one of so many chains of two blocks, all of which stay cached once they were computed."""
    rng, seen = Random(0), set[int]()
    for _ in range(num_requests):
        number = rng.randrange(count)
        report(shadow, names(number, 1000 + number), 2 if number in seen else 0)
        seen.add(number)


# ------------------------------------------------------------------------------------------------------------ on proof


def test_a_cache_that_proves_to_be_larger_than_it_said_is_believed_to_be() -> None:
    """Behind the 16 blocks that it tells of lies a store with room for all there is: 20 chains of two."""
    shadow = ApproximateIndex(16, allow=lambda held, asked: asked)
    reuse(shadow, 20, 600)
    assert shadow.estimated_capacity >= 40 and shadow.max_blocks >= 40
    assert all(shadow.num_cached_prefix_blocks(names(number, 1000 + number)) == 2 for number in range(20))


def test_without_leave_it_never_outgrows_its_size() -> None:
    for allow in (None, lambda held, asked: held):
        shadow = ApproximateIndex(16, allow=allow)
        reuse(shadow, 20, 600)
        assert shadow.estimated_capacity == shadow.max_blocks == 16


def test_a_replica_that_lies_gets_no_more_than_is_granted() -> None:
    asked_for: list[int] = []

    def allow(held: int, asked: int) -> int:
        asked_for.append(asked)
        return min(asked, 24)

    shadow, rng = ApproximateIndex(16, allow=allow), Random(0)
    for _ in range(2_000):
        number = rng.randrange(500)
        report(shadow, names(number, 1000 + number, 2000 + number), 3)  # everything is always cached
        assert len(shadow) <= shadow.estimated_capacity <= 24
    assert asked_for and shadow.max_blocks == 24


# ----------------------------------------------------------------------------------------------------------- slow twin

acts = st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 6), max_size=6), st.integers(0, 6)), max_size=60)


@pytest.mark.parametrize("policy", ["lru", "2q"])
@settings(max_examples=60)
@given(st.integers(0, 24), acts)
def test_a_pool_that_grows_believes_what_one_of_full_size_does(
    policy: str, size: int, acts: list[tuple[int, list[int], int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_GROWTH", 2)
        small = ApproximateIndex(size, eviction_policy=policy)
        small_holds: list[Reservation] = []
        patch.setattr(module, "MIN_GROWTH", 10**6)
        whole = ApproximateIndex(size, eviction_policy=policy)
        whole_holds: list[Reservation] = []
        for kind, chain, which in acts:
            for growth, shadow, holds in ((2, small, small_holds), (10**6, whole, whole_holds)):
                patch.setattr(module, "MIN_GROWTH", growth)
                if kind == 4:
                    shadow.clear()
                elif kind < 2 or not holds:
                    holds.append(shadow.record_sent(names(*chain)))
                elif kind == 2:
                    hold = holds.pop(which % len(holds))
                    shadow.on_hit_reported(hold, min(which, len(hold.block_hashes)))
                    shadow.record_finished(hold, hold.block_hashes)
                else:
                    shadow.record_failed(holds.pop(which % len(holds)))
                shadow.check()
            assert (small.estimated_capacity, len(small), small.num_flushes) == (
                whole.estimated_capacity,
                len(whole),
                whole.num_flushes,
            )
            assert small.num_cached_prefix_blocks(names(*chain)) == whole.num_cached_prefix_blocks(names(*chain))
            assert small.expected_evicted_reusable_blocks(5) == pytest.approx(whole.expected_evicted_reusable_blocks(5))


# ---------------------------------------------------------------------------------------------------------- in slices

NUM_BLOCKS = 4_000


def full() -> ApproximateIndex:
    shadow = ApproximateIndex(NUM_BLOCKS)
    for number in range(NUM_BLOCKS // 4):
        serve(shadow, names(*range(4 * number, 4 * number + 4)))
    assert len(shadow) == NUM_BLOCKS
    return shadow


def flush_by_report(shadow: ApproximateIndex) -> None:
    report(shadow, names(*range(NUM_BLOCKS - 4, NUM_BLOCKS)), 0)  # what was used last is missing
    assert shadow.num_flushes == 1


@pytest.mark.parametrize("empty", [ApproximateIndex.clear, flush_by_report])
def test_a_cache_that_is_emptied_frees_its_pool_a_slice_at_a_time(empty: Callable[[ApproximateIndex], None]) -> None:
    """None of the steps takes longer the larger the cache was."""
    first, second = full(), full()
    for shadow in (first, second):
        empty(shadow)
        shadow._forget_flush()  # else a flush by a report keeps its pool until it is settled
        assert len(shadow) <= 4 and shadow.estimated_capacity == NUM_BLOCKS
        assert all(shadow.num_cached_prefix_blocks(names(4 * number)) == 0 for number in range(NUM_BLOCKS // 4 - 1))
    left = first.free_discarded_entries(ALL)
    assert left > 2 * NUM_BLOCKS, "emptying it has freed next to nothing"
    assert first.free_discarded_entries(ALL) == 0
    serve(second, names(7, 8))
    after_one = left - second.free_discarded_entries(ALL)
    assert 0 < after_one <= 2 * (FREED + 2 * FREED_PER_BLOCK)


def test_what_is_left_of_former_pools_never_adds_up() -> None:
    """A replica that empties its cache again and again: each block that is taken in frees more than it takes."""
    shadow, most = full(), 0
    for _ in range(5):
        shadow.clear()
        for number in range(NUM_BLOCKS // 8):
            hold = shadow.record_sent(names(*range(4 * number, 4 * number + 4)))
            shadow.record_finished(hold, hold.block_hashes)
    shadow.clear()
    most = shadow.free_discarded_entries(ALL)
    assert most <= 16 * NUM_BLOCKS, "one pool, and nothing of those before"


def test_told_contents_are_cleared_at_once_and_freed_with_the_events_that_follow() -> None:
    told = new()
    letters = [chr(0x4E00 + number) for number in range(5_000)]
    for letter, number in zip(letters, range(5_000), strict=True):
        told.apply([stored(letter, number)])
    assert len(told) == 5_000
    told.apply([AllBlocksCleared()])
    assert len(told) == 0 and told.num_cached_prefix_blocks(names(1), 0.0) == 0
    told.check()
    told.apply([stored("a", 1)])
    assert told.num_cached_prefix_blocks(names(1), 0.0) == 1
    left = told.free_discarded_entries(ALL)
    assert 0 < left == 3 * 5_000 - FREED_PER_EVENT, "handles, names and the blocks before them, less one slice"
    assert told.free_discarded_entries(ALL) == 0 and told.num_cached_prefix_blocks(names(1), 0.0) == 1
