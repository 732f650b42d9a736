"""The scan lab on a pool of sixteen blocks: what it counts, and that it tells the two orders apart."""

from headstart_lab.engine.scan import ScanConfig, run_scan

SMALL = ScanConfig(prefix=16, own=4, uses=6, one_off=12, concurrency=2, num_blocks=16, block_size=4)


def test_a_hot_prefix_survives_scans_and_least_recently_used_order_loses_it() -> None:
    report = run_scan(0, SMALL)
    assert report.values["hot_hit_rate"] == 1.0
    assert report.values["lru_hot_hit_rate"] == 0.0
    assert report.values["first_hit_use"] == 3
    assert report.problems == []


def test_what_is_found_is_not_computed() -> None:
    values = run_scan(0, SMALL).values
    found = (SMALL.uses - 2) * SMALL.prefix
    assert values["lru_tokens_computed"] - values["tokens_computed"] == found


def test_a_prefix_that_may_not_be_protected_makes_the_run_invalid() -> None:
    report = run_scan(0, ScanConfig(prefix=44, own=4, uses=6, one_off=12, concurrency=2, num_blocks=16, block_size=4))
    assert report.values["hot_hit_rate"] < 0.9
    assert any("of the hot prefix" in problem for problem in report.problems)
