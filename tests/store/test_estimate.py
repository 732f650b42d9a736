"""Estimated durations of loads: from what was measured, raised by loads given up, faded when nothing confirms it."""

import pytest

from headstart.store.disk import LoadTimeEstimate


def measured(num_blocks: int = 10, seconds: float = 1.0, latency: float = 0.0) -> LoadTimeEstimate:
    estimate = LoadTimeEstimate()
    estimate.measured(num_blocks, seconds, latency, 0.0)
    return estimate


def test_nothing_measured_is_no_time() -> None:
    estimate = LoadTimeEstimate()
    estimate.record_load_start(0.0)
    assert estimate.expected(100, 0.0) == 0.0 == estimate.blocks_per_s()


def test_it_is_latency_and_so_much_per_block() -> None:
    estimate = measured(latency=0.5)
    assert estimate.expected(20, 0.0) == pytest.approx(2.5) and estimate.blocks_per_s() == pytest.approx(10)


def test_what_was_measured_last_counts_most() -> None:
    estimate = measured()
    for _ in range(10):
        estimate.measured(10, 3.0, 0.0, 0.0)
    assert 2.9 < estimate.expected(10, 0.0) < 3.0


def test_many_blocks_count_more_than_one() -> None:
    estimate = measured(100, 1.0)
    estimate.measured(1, 0.1, 0.0, 0.0)
    assert estimate.expected(1, 0.0) < 0.02


def test_a_load_given_up_raises_it_at_least_twofold_but_once_per_measurement() -> None:
    estimate = measured()
    estimate.record_load_timeout(10, 0.1, 0.0)
    assert estimate.expected(10, 0.0) == pytest.approx(2.0)
    estimate.record_load_timeout(10, 0.1, 0.0)
    assert estimate.expected(10, 0.0) == pytest.approx(2.0)
    estimate.measured(10, 1.0, 0.0, 0.0)
    before = estimate.expected(10, 0.0)
    estimate.record_load_timeout(10, 0.1, 0.0)
    assert estimate.expected(10, 0.0) == pytest.approx(2 * before)


def test_a_load_given_up_late_raises_it_to_what_it_would_have_needed() -> None:
    estimate = measured()
    estimate.record_load_timeout(10, 60.0, 0.0)
    assert estimate.expected(10, 0.0) == pytest.approx(60.0)


def test_given_up_before_anything_was_measured_it_counts_as_measured() -> None:
    estimate = LoadTimeEstimate()
    estimate.record_load_timeout(4, 8.0, 0.0)
    assert estimate.expected(2, 0.0) == pytest.approx(4.0)


def test_unconfirmed_it_fades_until_one_load_is_tried_and_holds_for_all_others_meanwhile() -> None:
    estimate = measured()
    assert estimate.expected(10, 5.0) == pytest.approx(1.0)
    assert estimate.expected(10, 10.0) == pytest.approx(0.5) and estimate.expected(10, 60.0) < 0.001
    estimate.record_load_start(60.0)
    assert estimate.expected(10, 60.0) == pytest.approx(1.0)
