"""Sweeps: every combination, seeds, processes, and the search for the smallest fleet."""

from collections.abc import Sequence

import pytest
from sim.fleets import profile, requests

from headstart.sim.fleet_plan import PlanLimits, smallest_fleet
from headstart.sim.sim_report import fleet_report
from headstart.sim.sim_request import SimRequest
from headstart.sim.sweep import PointResult, SettingsGrid, SimulationConfig, SweepOptions, run_sweep
from headstart.workload.slo import Slo


def workload(speed: float, seed: int) -> Sequence[SimRequest]:
    return requests(seed, 40, gap=2.0 / speed)


def sweep(jobs: int) -> list[PointResult]:
    grid = SettingsGrid([profile(24, noise=0.1)], [1, 2], ["cost", "round-robin"], [1.0, 2.0])
    points = list(grid.points(SimulationConfig(profile())))
    assert len(points) == 8
    done: list[str] = []
    found = run_sweep(points, workload, SweepOptions(seeds=2, jobs=jobs), lambda point, count: done.append(point.label))
    assert sorted(done) == sorted(2 * [point.label for point in points])
    assert [one.point for one in found] == points
    return found


def test_processes_change_nothing() -> None:
    assert sweep(1) == sweep(2)


def test_means_and_spread_are_of_the_seeds() -> None:
    one = sweep(1)[0]
    values = [run.values() for run in one.runs]
    means, spread = one.mean_figures(), one.spread()
    assert means["ttft_mean_ms"] == pytest.approx(sum(row["ttft_mean_ms"] for row in values) / 2)
    assert spread["ttft_mean_ms"] == sorted(row["ttft_mean_ms"] for row in values)
    assert spread["ttft_mean_ms"][0] < spread["ttft_mean_ms"][1]
    assert sum(means["requests_by_replica"]) == 40


def test_a_report_adds_up() -> None:
    fleet = SimulationConfig(profile(20), 2, "round-robin").run_new_fleet(requests(7, 60))
    found = fleet_report(fleet, Slo(ttft=5.0))
    assert sum(found.sources.values()) == pytest.approx(1.0)
    assert found.sources["computed"] == pytest.approx(1 - found.summary.cached_share)
    assert sum(found.requests) == 60 and sum(found.evictions) > 0
    within = sum(one.record.ttft is not None and one.record.ttft <= 5.0 for one in fleet.records)
    assert 0 < within < 60 and found.attained == within / 60
    assert found.goodput == pytest.approx(within / found.summary.seconds)
    prompt = sum(one.record.prompt_tokens for one in fleet.records)
    computed = sum(replica.counters().prefill_tokens for replica in fleet.replicas.values())
    assert found.redundancy == computed / fleet.ideal_tokens >= 1.0
    assert fleet.ideal_tokens <= prompt
    assert found.replica_seconds == 2 * fleet.now and 0 < found.busy <= 1


def test_one_replica_with_space_for_everything_has_no_redundancy() -> None:
    fleet = SimulationConfig(profile(4000), 1).run_new_fleet(requests(3, 40, gap=40.0))
    assert fleet_report(fleet).redundancy == pytest.approx(1.0)


def test_the_smallest_fleet_meets_the_limits_and_one_less_does_not() -> None:
    asked, limits = requests(2, 120, gap=0.4), PlanLimits(Slo(ttft=20.0), max_replicas=64)
    tried: list[int] = []
    base = SimulationConfig(profile(24), policy="least-load")
    found = smallest_fleet(asked, base, limits, lambda policy, replicas, holds: tried.append(replicas))
    assert found.replicas is not None and found.replicas > 2 and found.report is not None
    assert found.report.holds and found.num_runs == len(set(tried))
    fewer = fleet_report(
        SimulationConfig(profile(24), found.replicas - 1, "least-load").run_new_fleet(asked), limits.slo
    )
    assert not fewer.holds


def test_limits_that_no_fleet_meets_are_reported() -> None:
    limits = PlanLimits(Slo(ttft=0.5), max_replicas=4)
    assert smallest_fleet(requests(2, 20), SimulationConfig(profile(24)), limits).replicas is None
