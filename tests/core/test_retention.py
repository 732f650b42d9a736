"""Hints add up to one priority per block; times run out; blocks without hints are not listed."""

from headstart.core.cache.retention import RetentionHints
from headstart.core.request import DEFAULT_RETENTION, RetentionHint


def test_a_block_without_a_hint_has_the_default_priority_and_costs_nothing() -> None:
    hints = RetentionHints(bytearray(4))
    hints.record_hint(1, DEFAULT_RETENTION, 0.0)
    assert hints.block_priority(1) == 50 and len(hints) == 0


def test_the_highest_priority_of_all_users_counts_in_either_order() -> None:
    hints = RetentionHints(bytearray(4))
    for block, asked in ((1, (20, 90)), (2, (90, 20)), (3, (20, 50))):
        for priority in asked:
            hints.record_hint(block, RetentionHint(priority), 0.0)
    assert [hints.block_priority(block) for block in (1, 2, 3)] == [90, 90, 50] and len(hints) == 2


def test_a_low_hint_does_not_lower_a_block_used_without_one() -> None:
    hints = RetentionHints(bytearray(4))
    hints.record_hint(1, DEFAULT_RETENTION, 0.0)
    hints.record_hint(1, RetentionHint(10), 0.0)
    assert hints.block_priority(1) == 50
    hints.record_hint(2, RetentionHint(10), 0.0)
    assert hints.block_priority(2) == 10


def test_a_time_runs_out_after_the_last_use() -> None:
    hints = RetentionHints(bytearray(4))
    hints.record_hint(1, RetentionHint(90, ttl=5.0), 0.0)
    hints.record_hint(1, RetentionHint(90, ttl=5.0), 3.0)
    assert hints.take_expired(7.9) == [] and hints.block_priority(1) == 90
    assert hints.take_expired(8.0) == [(1, 90)] and hints.block_priority(1) == 50 and len(hints) == 0


def test_the_longest_of_several_times_counts() -> None:
    hints = RetentionHints(bytearray(4))
    hints.record_hint(1, RetentionHint(90, ttl=9.0), 0.0)
    hints.record_hint(1, RetentionHint(80, ttl=1.0), 2.0)
    assert hints.take_expired(8.0) == [] and hints.take_expired(9.0) == [(1, 90)]


def test_what_was_asked_for_good_stays_when_the_time_is_over() -> None:
    hints = RetentionHints(bytearray(4))
    hints.record_hint(1, RetentionHint(60), 0.0)
    hints.record_hint(1, RetentionHint(90, ttl=1.0), 0.0)
    assert hints.block_priority(1) == 90
    assert hints.take_expired(1.0) == [(1, 90)] and hints.block_priority(1) == 60


def test_a_time_never_makes_a_low_priority_higher() -> None:
    hints = RetentionHints(bytearray(4))
    hints.record_hint(1, RetentionHint(10, ttl=1.0), 0.0)
    assert hints.take_expired(2.0) == [] and hints.block_priority(1) == 10


def test_tails_run_out_before_heads() -> None:
    hints = RetentionHints(bytearray(4))
    for block in (3, 2, 1):
        hints.record_hint(block, RetentionHint(90, ttl=1.0), 0.0)
    assert [block for block, _ in hints.take_expired(1.0)] == [3, 2, 1]


def test_of_equal_times_the_block_used_last_runs_out_last() -> None:
    hints = RetentionHints(bytearray(4))
    for block in (1, 2, 1):  # a head, then its new tail and the head again
        hints.record_hint(block, RetentionHint(90, ttl=1.0), 0.0)
    assert [block for block, _ in hints.take_expired(1.0)] == [2, 1]


def test_a_block_that_lost_its_content_starts_anew() -> None:
    hints = RetentionHints(bytearray(4))
    hints.record_hint(1, RetentionHint(90, ttl=1.0), 0.0)
    hints.drop_block_hint(1)
    assert hints.block_priority(1) == 50 and hints.take_expired(2.0) == []


def test_times_of_blocks_that_came_and_went_do_not_pile_up() -> None:
    hints = RetentionHints(bytearray(4))
    for _ in range(1000):
        hints.record_hint(1, RetentionHint(90, ttl=1e6), 0.0)
        hints.drop_block_hint(1)
    assert len(hints._due) <= 67
