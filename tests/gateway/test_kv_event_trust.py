"""Strikes, bytes and suspensions of a publisher of KV events."""

import pytest

from headstart.gateway.kv_events.kv_event_intake import (
    BURST_BYTES,
    BYTES_PER_SECOND,
    FIRST_SUSPENSION,
    MAX_STRIKES,
    MAX_SUSPENSION,
    STRIKE_SECONDS,
    PublisherAbuseRecord,
    UntrustedPublisherError,
)


def test_only_the_first_strike_of_a_time_is_worth_a_line() -> None:
    trust = PublisherAbuseRecord()
    assert [trust.count_strike("bad", now) for now in (0.0, 1.0, 2.0, 3.0 + STRIKE_SECONDS)] == [
        True,
        False,
        False,
        True,
    ]


def test_many_strikes_in_a_short_time_suspend() -> None:
    trust = PublisherAbuseRecord()
    for number in range(MAX_STRIKES - 1):
        trust.count_strike("bad", number)
    with pytest.raises(UntrustedPublisherError, match="bad, and 8 such faults within 60 s"):
        trust.count_strike("bad", MAX_STRIKES)


def test_strikes_that_are_far_apart_do_not() -> None:
    trust = PublisherAbuseRecord()
    for number in range(10 * MAX_STRIKES):
        trust.count_strike("bad", number * STRIKE_SECONDS / (MAX_STRIKES - 2))


def test_more_bytes_than_any_engine_sends_suspend() -> None:
    trust = PublisherAbuseRecord()
    trust.enforce_byte_rate(BURST_BYTES, 0.0)
    trust.enforce_byte_rate(BYTES_PER_SECOND, 1.0)
    with pytest.raises(UntrustedPublisherError, match="more than 1024 MiB"):
        trust.enforce_byte_rate(1, 1.0)
    trust.suspend_publisher(1.0)
    trust.enforce_byte_rate(BURST_BYTES, 1.0)


def test_suspensions_that_follow_each_other_grow_to_a_bound_and_begin_anew_after_a_while() -> None:
    trust, now, lengths = PublisherAbuseRecord(), 0.0, list[float]()
    for _ in range(10):
        lengths.append(trust.suspend_publisher(now))
        now += lengths[-1] + 1.0
    assert lengths[:3] == [FIRST_SUSPENSION, 2 * FIRST_SUSPENSION, 4 * FIRST_SUSPENSION]
    assert lengths[-1] == lengths[-2] == MAX_SUSPENSION
    assert trust.suspend_publisher(now + 3 * MAX_SUSPENSION) == FIRST_SUSPENSION
