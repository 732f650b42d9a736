"""The shadow against a cache that is really one: a pool of the same size that serves the same requests."""

from collections.abc import Iterable
from itertools import takewhile
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fleets import names

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.router.index.approximate_index import UNKNOWN_BLOCKS, ApproximateIndex
from headstart.router.index.prefix_index import Reservation


class RealCache:
    """Serve one request after the other, as an engine does."""

    def __init__(self, num_blocks: int, policy: str = "lru") -> None:
        self.pool = BlockPool(num_blocks + 1, eviction_policy=policy)

    def serve(self, chain: list[BlockHash]) -> int:
        """Blocks of the chain that were there."""
        pool = self.pool
        found = [entry[0] for entry in takewhile(bool, map(pool.published_entry, chain)) if entry]
        pool.acquire(found)
        blocks = found + pool.allocate(len(chain) - len(found))
        for index in range(len(found), len(chain)):
            pool.publish(blocks[index], chain[index], chain[index - 1] if index else BlockHash(b""), b"")
        pool.release(blocks)
        return len(found)

    def flush(self) -> None:
        self.pool.clear_published()


def serve(shadow: ApproximateIndex, chain: list[BlockHash], real: RealCache | None = None) -> tuple[int, int]:
    """Serves a chain, reports what was cached and checks the shadow; (believed, real)."""
    found = pass_through(shadow, chain, real)
    shadow.check()
    return found


def pass_through(shadow: ApproximateIndex, chain: list[BlockHash], real: RealCache | None = None) -> tuple[int, int]:
    """Serves a chain without the check."""
    hold = shadow.record_sent(chain)
    cached = hold.hit if real is None else real.serve(chain)
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, cached)
    shadow.record_finished(hold, chain)
    return hold.hit, cached


def serve_all(shadow: ApproximateIndex, chains: Iterable[list[BlockHash]]) -> None:
    for chain in chains:
        serve(shadow, chain)


def test_what_was_sent_is_believed_to_be_there() -> None:
    shadow = ApproximateIndex(8)
    serve(shadow, names(1, 2))
    assert shadow.num_cached_prefix_blocks(names(1, 2, 3)) == 2
    assert shadow.num_cached_prefix_blocks(names(1, 4)) == 1
    assert shadow.num_cached_prefix_blocks(names(4, 2)) == 0


def test_a_chain_loses_its_tail_before_its_head() -> None:
    shadow = ApproximateIndex(4)
    serve_all(shadow, (names(1, 2, 3), names(5, 6)))
    assert shadow.num_cached_prefix_blocks(names(1, 2, 3)) == 2


def test_blocks_of_requests_under_way_are_not_evicted() -> None:
    shadow = ApproximateIndex(4)
    hold = shadow.record_sent(names(1, 2, 3))
    serve(shadow, names(5, 6))
    assert shadow.num_cached_prefix_blocks(names(1, 2, 3)) == 3
    assert shadow.num_cached_prefix_blocks(names(5, 6)) == 1  # there was room for one block
    shadow.record_prefilled(hold)
    shadow.record_finished(hold, names(1, 2, 3))
    shadow.check()


def test_learning_at_the_response_believes_nothing_before() -> None:
    shadow = ApproximateIndex(8, at_pick=False)
    hold = shadow.record_sent(names(1, 2))
    assert shadow.num_cached_prefix_blocks(names(1, 2)) == 0
    twin = shadow.record_sent(names(1, 2))
    shadow.record_prefilled(hold)
    assert shadow.num_cached_prefix_blocks(names(1, 2)) == 2
    shadow.record_prefilled(twin)
    for one in (hold, twin):
        shadow.record_finished(one, names(1, 2))
    assert len(shadow) == 2
    shadow.check()


def test_what_was_generated_is_there_too() -> None:
    shadow = ApproximateIndex(8)
    hold = shadow.record_sent(names(1))
    shadow.record_prefilled(hold)
    shadow.record_finished(hold, names(1, 2))
    assert shadow.num_cached_prefix_blocks(names(1, 2, 3)) == 2


def test_a_request_that_failed_leaves_nothing_that_it_was_to_compute() -> None:
    shadow = ApproximateIndex(8)
    serve(shadow, names(1))
    hold = shadow.record_sent(names(1, 2, 3))
    twin = shadow.record_sent(names(1, 2))
    shadow.record_failed(hold)
    assert shadow.num_cached_prefix_blocks(names(1, 2, 3)) == 2  # its twin is still to compute the second
    shadow.record_failed(twin)
    assert shadow.num_cached_prefix_blocks(names(1, 2, 3)) == 1
    shadow.record_failed(twin)
    shadow.check()


def test_what_a_failed_request_has_probably_computed_is_not_dropped_with_another_one() -> None:
    """Else a block would be there without the one before it: the next request of that prompt would fail."""
    shadow = ApproximateIndex(8)
    shadow.record_failed(shadow.record_sent(names(1, 2, 3)), num_kept=2)
    shadow.record_failed(shadow.record_sent(names(1, 5)))
    assert [shadow.num_cached_prefix_blocks(names(1, 2, 3), near=near) for near in range(4)] == [2] * 4
    serve(shadow, names(1, 2, 3))


def test_what_a_request_without_space_has_computed_is_not_dropped_with_one_that_was_to_compute_it() -> None:
    shadow = ApproximateIndex(3)
    other, waiting = shadow.record_sent(names(7, 8, 9)), shadow.record_sent(names(1, 2))
    shadow.record_finished(other, names(7, 8, 9))
    later = shadow.record_sent(names(1))
    shadow.record_finished(waiting, names(1, 2))
    shadow.record_failed(later)
    assert [shadow.num_cached_prefix_blocks(names(1, 2), near=near) for near in range(3)] == [2] * 3


def test_a_twin_that_came_too_early_does_not_make_it_believe_in_evictions() -> None:
    shadow = ApproximateIndex(8)
    serve_all(shadow, (names(7), names(8)))
    leader, twin = shadow.record_sent(names(1, 2)), shadow.record_sent(names(1, 2))
    assert twin.hit == 2 and twin.sure == 0
    shadow.record_prefilled(leader)
    shadow.on_hit_reported(twin, 0)
    assert shadow.num_trims == shadow.num_flushes == 0
    assert shadow.num_cached_prefix_blocks(names(7)) == shadow.num_cached_prefix_blocks(names(8)) == 1


def test_what_is_older_than_a_missing_block_is_gone_too() -> None:
    shadow = ApproximateIndex(8)
    serve_all(shadow, (names(number) for number in range(1, 9)))
    hold = shadow.record_sent(names(4))
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, 0)
    assert [shadow.num_cached_prefix_blocks(names(number)) for number in range(1, 9)] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert shadow.num_trims == 1 and shadow.num_flushes == 0


def test_what_hangs_on_a_missing_block_is_gone_with_it() -> None:
    shadow = ApproximateIndex(16)
    serve_all(shadow, (names(9), names(1, 2, 3, 4), *(names(number) for number in range(20, 28))))
    hold = shadow.record_sent(names(1, 2))
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, 1)
    assert shadow.num_trims == 1
    assert shadow.num_cached_prefix_blocks(names(1, 2, 3, 4)) == 2
    assert shadow.num_cached_prefix_blocks(names(20)) == shadow.num_cached_prefix_blocks(names(27)) == 1


def test_a_missing_block_says_how_much_the_cache_really_holds() -> None:
    shadow = ApproximateIndex(256)
    real = RealCache(64)
    for turn in range(12):
        for number in range(96):
            serve(shadow, names(number), real)
        serve(shadow, names(95 - turn), real)
    assert 32 <= shadow.estimated_capacity <= 96
    assert shadow.num_unreserved_blocks == 256, "as reported, whatever its hits say"


def test_a_block_that_was_there_against_belief_makes_a_shadow_grow() -> None:
    shadow = ApproximateIndex()
    assert shadow.estimated_capacity == UNKNOWN_BLOCKS
    shadow._blocks.resize(16)
    serve_all(shadow, (names(number) for number in range(20)))
    hold = shadow.record_sent(names(0))
    assert hold.hit == 0
    shadow.on_hit_reported(hold, 1)
    assert shadow.estimated_capacity == 18
    assert shadow.num_unreserved_blocks == 17, "by the estimate, since none is reported"


def test_a_prefix_it_never_heard_of_says_nothing_about_its_size() -> None:
    shadow = ApproximateIndex()
    hold = shadow.record_sent(names(1))
    shadow.on_hit_reported(hold, 1)
    assert shadow.estimated_capacity == UNKNOWN_BLOCKS


def test_an_emptied_cache_is_noticed_by_one_request() -> None:
    shadow = ApproximateIndex(64)
    serve_all(shadow, (names(number, number + 100) for number in range(10)))
    hold = shadow.record_sent(names(9, 109))
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, 0)
    assert shadow.num_flushes == 1
    assert [shadow.num_cached_prefix_blocks(names(number)) for number in range(9)] == [0] * 9
    assert shadow.num_cached_prefix_blocks(names(9, 109)) == 2 and shadow.estimated_capacity == 64
    shadow.record_finished(hold, names(9, 109))
    shadow.check()


def test_requests_sent_before_a_flush_was_noticed_say_nothing_new() -> None:
    shadow = ApproximateIndex(64)
    serve_all(shadow, (names(number) for number in range(10)))
    first, second = shadow.record_sent(names(8, 80)), shadow.record_sent(names(9, 90))
    shadow.record_prefilled(first)
    shadow.on_hit_reported(first, 0)
    shadow.record_finished(first, first.block_hashes)  # computed after the flush
    shadow.record_prefilled(second)
    shadow.on_hit_reported(second, 0)
    assert shadow.num_flushes == 1
    assert shadow.num_cached_prefix_blocks(names(8, 80)) == 2 and shadow.num_cached_prefix_blocks(names(7)) == 0


def test_blocks_that_the_request_computes_itself_do_not_speak_against_a_flush() -> None:
    shadow = ApproximateIndex(16)
    chain = names(*range(12))
    serve_all(shadow, (names(90), chain, names(91)))
    hold = shadow.record_sent(chain)
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, 0)
    assert (shadow.num_flushes, shadow.num_trims, shadow.estimated_capacity) == (1, 0, 16)


def test_a_chain_of_which_most_is_there_was_not_emptied() -> None:
    shadow = ApproximateIndex(256)
    chain = names(*range(10))
    serve_all(shadow, (*(names(number) for number in range(100, 140)), chain))
    hold = shadow.record_sent(chain)
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, 8)
    assert (shadow.num_flushes, shadow.num_trims) == (0, 1)
    assert [shadow.num_cached_prefix_blocks(names(number)) for number in range(100, 140)] == [0] * 8 + [1] * 32


def test_what_was_missing_before_says_what_is_lately() -> None:
    """A size far too large makes any use look recent; what a cache seemed to hold when it lost something does not."""
    shadow = ApproximateIndex(4096)
    serve_all(shadow, (names(number, 0, 0) for number in range(700)))
    for number, num_trims in ((100, 1), (300, 2), (450, 3)):  # the last: 750 used since, less than a quarter of 4,096
        hold = shadow.record_sent(names(number, 0, 0))
        shadow.record_prefilled(hold)
        shadow.on_hit_reported(hold, 0)
        shadow.record_finished(hold, hold.block_hashes)
        assert (shadow.num_trims, shadow.num_flushes) == (num_trims, 0)


def test_a_guessed_size_is_replaced_at_once_and_a_reported_one_slowly() -> None:
    for told in (0, UNKNOWN_BLOCKS):
        shadow = ApproximateIndex(told)
        for number in range(5000):
            pass_through(shadow, names(number))  # a check each would take long
        shadow.check()
        hold = shadow.record_sent(names(400))
        shadow.record_prefilled(hold)
        shadow.on_hit_reported(hold, 0)
        kept = 4599
        assert shadow.estimated_capacity == (
            UNKNOWN_BLOCKS - 4 if told else UNKNOWN_BLOCKS - (UNKNOWN_BLOCKS - kept) // 2
        )


def test_a_chain_for_which_there_never_was_room_makes_it_grow_by_all_of_it() -> None:
    shadow = ApproximateIndex(64)
    shadow._blocks.resize(16)
    chain = names(*range(40))
    assert serve(shadow, chain, RealCache(64)) == (0, 0)
    assert shadow.num_cached_prefix_blocks(chain) == 16
    hold = shadow.record_sent(chain)
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, 40)
    assert shadow.estimated_capacity == 40
    shadow.record_finished(hold, chain)
    assert shadow.num_cached_prefix_blocks(chain) == 40
    shadow.check()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_block_that_went_in_a_flush_and_is_there_says_that_the_cache_is_small(is_there: bool) -> None:
    shadow = ApproximateIndex(256)
    serve_all(shadow, (names(number) for number in range(40)))
    for number, cached in ((10, 0), (30, is_there)):  # 11 to 39 were used after 10
        hold = shadow.record_sent(names(number))
        shadow.record_prefilled(hold)
        shadow.on_hit_reported(hold, int(cached))
        shadow.record_finished(hold, hold.block_hashes)
    assert shadow.num_flushes == 1
    assert shadow.estimated_capacity == ((256 + 29) // 2 if is_there else 256)
    hold = shadow.record_sent(names(31))
    shadow.on_hit_reported(hold, 1)  # that is settled
    assert shadow.estimated_capacity == ((256 + 29) // 2 if is_there else 256)


def test_a_report_that_is_off_by_little_moves_little() -> None:
    shadow = ApproximateIndex(64)
    chain = names(*range(20))
    serve_all(shadow, (*(names(number) for number in range(100, 120)), chain, *(names(n) for n in range(200, 220))))
    hold = shadow.record_sent(chain)
    shadow.record_prefilled(hold)
    shadow.on_hit_reported(hold, 19)
    assert shadow.num_trims == 1 and shadow.estimated_capacity == 64 - 4
    there = [shadow.num_cached_prefix_blocks(names(number)) for number in range(100, 120)]
    assert there == [0] * 4 + [1] * 16


def test_contradicting_reports_shorten_the_steps_and_agreeing_ones_lengthen_them() -> None:
    shadow, steps = ApproximateIndex(64), list[float]()
    for direction in (1, -1, 1, 1, 1, 1):
        shadow._turn(direction)
        steps.append(shadow._step)
    assert steps == [0.5, 0.25, 0.125, 0.25, 0.5, 0.5]


def test_without_correction_it_believes_what_it_believed() -> None:
    shadow = ApproximateIndex(8, corrects=False)
    serve_all(shadow, (names(1), names(2)))
    hold = shadow.record_sent(names(2))
    shadow.on_hit_reported(hold, 0)
    assert shadow.num_cached_prefix_blocks(names(1)) == 1


def test_clearing_forgets_all_and_requests_under_way_are_taken_in_when_they_answer() -> None:
    shadow = ApproximateIndex(8)
    serve(shadow, names(7))
    hold, lost = shadow.record_sent(names(1, 2)), shadow.record_sent(names(3))
    shadow.clear()
    assert len(shadow) == 0
    shadow.record_failed(lost)
    shadow.record_prefilled(hold)
    assert shadow.num_cached_prefix_blocks(names(1, 2)) == 2
    shadow.record_finished(hold, names(1, 2))
    shadow.record_finished(hold, names(1, 2))
    shadow.check()


number = st.integers(0, 3)
chains = st.lists(st.lists(number, min_size=1, max_size=5), min_size=1, max_size=60)


@pytest.mark.parametrize("policy", ["lru", "2q"])
@given(st.integers(6, 14), chains)
def test_a_shadow_of_the_right_size_predicts_exactly(policy: str, num_blocks: int, served: list[list[int]]) -> None:
    real = RealCache(num_blocks, policy)
    shadow = ApproximateIndex(num_blocks, eviction_policy=policy)
    if policy == "2q":  # its ghost list is shorter than an engine's, and that is all that differs
        real.pool = BlockPool(num_blocks + 1, eviction_policy=policy, history_pools=1)
    for chain in served:
        believed, cached = serve(shadow, names(*chain), real)
        assert believed == cached
    assert shadow.num_trims == shadow.num_flushes == 0


@given(st.integers(6, 10), st.integers(6, 40), chains, st.integers(0, 60))
def test_after_any_report_no_request_is_believed_to_hit_more_than_it_does_twice_in_a_row(
    num_real: int, num_believed: int, served: list[list[int]], flush_at: int
) -> None:
    """Self-correction: the same prompt again, at once, is always predicted exactly, whatever was wrong before."""
    real, shadow = RealCache(num_real), ApproximateIndex(num_believed)
    for index, chain in enumerate(served):
        if index == flush_at:
            real.flush()
        serve(shadow, names(*chain), real)
        believed, cached = serve(shadow, names(*chain), real)
        assert believed == cached == len(chain)


Act = tuple[int, list[int], int]


@given(
    st.integers(5, 12), st.booleans(), st.lists(st.tuples(number, st.lists(number, max_size=5), number), max_size=80)
)
def test_whatever_happens_a_block_is_there_only_with_all_before_it(
    num_blocks: int, at_pick: bool, acts: list[Act]
) -> None:
    shadow = ApproximateIndex(num_blocks, at_pick=at_pick)
    under_way: list[Reservation] = []
    for kind, chain, which in acts:
        if kind == 0 or not under_way:
            under_way.append(shadow.record_sent(names(*chain)))
        elif kind == 1:
            hold = under_way[which % len(under_way)]
            shadow.record_prefilled(hold)
            shadow.on_hit_reported(hold, min(which, len(hold.block_hashes)))
        elif kind == 2:
            hold = under_way.pop(which % len(under_way))
            shadow.record_finished(
                hold,
                hold.block_hashes + names(*chain)[len(hold.block_hashes) :]
                if not hold.block_hashes
                else hold.block_hashes,
            )
        elif which:
            shadow.record_failed(under_way.pop(which % len(under_way)))
        else:
            shadow.clear()
        shadow.check()
        for first in range(4):
            full = names(first, *chain)
            contains = [shadow._blocks.pool.contains(name) for name in full]
            assert shadow.num_cached_prefix_blocks(full) == sum(1 for _ in takewhile(bool, contains)) == sum(contains)
        assert shadow.num_unreserved_blocks <= shadow.cache_capacity_blocks
    for hold in under_way:
        shadow.record_finished(hold, hold.block_hashes)
    assert shadow.num_unreserved_blocks == shadow.cache_capacity_blocks, "nothing is in flight"


def test_blocks_that_requests_in_flight_hold_or_wait_for_are_claimed() -> None:
    shadow = ApproximateIndex(4)
    first = shadow.record_sent(names(1, 2, 3))
    assert shadow.num_unreserved_blocks == 1
    second = shadow.record_sent(names(1, 2, 5, 6))  # shares two blocks, and has space for one
    assert shadow.num_unreserved_blocks == -1
    shadow.record_finished(first, names(1, 2, 3))
    shadow.record_prefilled(second)
    assert shadow.num_unreserved_blocks == 0
    shadow.record_finished(second, names(1, 2, 5, 6))
    assert shadow.num_unreserved_blocks == 4
    assert ApproximateIndex().num_unreserved_blocks == inf, "its size is not known"


def test_new_blocks_cost_nothing_while_there_is_room() -> None:
    shadow = ApproximateIndex(8)
    serve_all(shadow, [names(1, 2), names(1, 2, 3), names(1, 2, 4)])
    assert shadow.expected_evicted_reusable_blocks(4) == 0.0
    assert shadow.expected_evicted_reusable_blocks(5) > 0.0


def test_what_is_used_again_and_again_is_a_loss_and_what_was_used_once_hardly() -> None:
    hot, cold = ApproximateIndex(6), ApproximateIndex(6)
    serve_all(hot, [names(1, 2), names(3, 4), names(1, 2), names(3, 4), names(1, 2), names(5, 6), names(3, 4)])
    serve_all(cold, [names(2 * i, 2 * i + 1) for i in range(8)])
    assert cold.expected_evicted_reusable_blocks(4) == 0.0  # nothing came back so far
    assert 1.0 < hot.expected_evicted_reusable_blocks(4) <= 4.0
    assert (
        hot.expected_evicted_reusable_blocks(2)
        < hot.expected_evicted_reusable_blocks(4)
        <= hot.expected_evicted_reusable_blocks(6)
    )


def test_a_burst_that_is_over_is_a_smaller_loss_than_a_prefix_that_came_as_often_at_its_pace() -> None:
    paced, burst = ApproximateIndex(32), ApproximateIndex(32)
    for i in range(20):
        serve(paced, names(1, 2) if i % 5 == 0 else names(10 + i))
        serve(burst, names(1, 2) if i < 4 else names(10 + i))
    now_evicts = [shadow.expected_evicted_reusable_blocks(32 - len(shadow) + 18) for shadow in (paced, burst)]
    assert now_evicts[1] < now_evicts[0]


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=40), st.integers(0, 20))
def test_a_loss_is_never_more_than_what_goes(chains: list[list[int]], num: int) -> None:
    shadow = ApproximateIndex(8)
    serve_all(shadow, [names(*chain) for chain in chains])
    assert 0.0 <= shadow.expected_evicted_reusable_blocks(num) <= max(num - (8 - len(shadow)), 0) + 1e-9
    assert shadow.expected_evicted_reusable_blocks(num) <= 8


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sent", "computed", "observed", "finished", "failed", "clear"]),
            st.lists(st.integers(0, 5), min_size=1, max_size=4),
            st.integers(0, 5),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_a_loss_that_was_worked_out_before_is_no_other_than_a_new_one(
    steps: list[tuple[str, list[int], int]], at_pick: bool
) -> None:
    shadow, holds = ApproximateIndex(8, at_pick=at_pick), list[Reservation]()
    for what, chain, number in steps:
        if what == "sent":
            holds.append(shadow.record_sent(names(*chain)))
        elif what == "clear":
            shadow.clear()
        elif holds:
            hold = holds[number % len(holds)]
            if what == "computed":
                shadow.record_prefilled(hold)
            elif what == "observed":
                shadow.on_hit_reported(hold, min(number, len(hold.block_hashes)))
            elif what == "finished":
                shadow.record_finished(hold, hold.block_hashes)
            else:
                shadow.record_failed(hold)
        known = [shadow.expected_evicted_reusable_blocks(count) for count in range(12)]
        shadow._blocks._worth = None
        assert [shadow.expected_evicted_reusable_blocks(count) for count in range(12)] == known


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=12), st.lists(st.integers(0, 90), min_size=1)
)
def test_a_loss_does_not_depend_on_the_losses_asked_before(chains: list[list[int]], sizes: list[int]) -> None:
    asked, fresh = ApproximateIndex(80), [ApproximateIndex(80) for _ in sizes]
    for shadow in (asked, *fresh):
        for chain in chains:
            serve(shadow, names(*chain))
    assert [asked.expected_evicted_reusable_blocks(size) for size in sizes] == [
        one.expected_evicted_reusable_blocks(size) for one, size in zip(fresh, sizes, strict=True)
    ]
