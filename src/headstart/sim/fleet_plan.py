"""Capacity plan: the smallest simulated fleet whose latencies meet an SLO, by policy; `headstart plan`.

The search assumes that a larger fleet is not slower: it doubles the replicas until the SLO is met, then bisects. A run
ends as soon as so many requests are late that the SLO cannot be met.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.sim.fleet_sweep import expand_policies
from headstart.sim.profile import ReplicaProfile
from headstart.sim.profile_file import resolve_profile
from headstart.sim.scenario import NOTHING_HAPPENS, read_scenario
from headstart.sim.sim_fleet import VirtualFleet
from headstart.sim.sim_report import FleetReport, fleet_report
from headstart.sim.sim_request import SimRequest
from headstart.sim.sim_workload import prompt_block_paths
from headstart.sim.sweep import MakeRequests, SimulationConfig
from headstart.workload.slo import LatenessEarlyStop, Slo


@dataclass(frozen=True, slots=True)
class SmallestFleet:
    """The result for one policy. `replicas` None: not even the largest fleet meets the SLO."""

    policy: str
    replicas: int | None
    report: FleetReport | None  # of a run with that many
    num_runs: int


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The bounds of a search."""

    slo: Slo
    max_replicas: int = 256


def smallest_fleet(
    requests: Sequence[SimRequest],
    base: SimulationConfig,
    limits: PlanLimits,
    on_run: Callable[[str, int, bool], None] = lambda policy, replicas, holds: None,
) -> SmallestFleet:
    """Return the smallest number of replicas of `base` that meets the SLO. `on_run`: called after every run."""
    tried: dict[int, FleetReport] = {}

    def holds(num: int) -> bool:
        if num not in tried:
            tried[num] = fleet_report(_run(requests, replace(base, replicas=num), limits.slo), limits.slo)
            on_run(base.policy, num, _meets(tried[num], len(requests)))
        return _meets(tried[num], len(requests))

    low, high = 0, 1  # `low` replicas do not meet it
    while not holds(high):
        if high == limits.max_replicas:
            return SmallestFleet(base.policy, None, None, len(tried))
        low, high = high, min(2 * high, limits.max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return SmallestFleet(base.policy, high, tried[high], len(tried))


def _run(requests: Sequence[SimRequest], simulation: SimulationConfig, slo: Slo) -> VirtualFleet:
    """Run until all requests have ended, or too many are late."""
    fleet = simulation.build_fleet()
    late = LatenessEarlyStop(len(requests), slo)

    def check(record: object) -> None:
        if late(fleet.records[-1].record):
            fleet.is_halted = True

    fleet.on_record = check
    fleet.run(requests)
    return fleet


def _meets(found: FleetReport, num_requests: int) -> bool:
    return found.holds and found.summary.requests == num_requests


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """The settings of `headstart plan`."""

    workload: MakeRequests
    policies: Sequence[str]
    profile: str
    slo: Slo
    blocks: Sequence[int] = (0,)  # KV blocks per replica; 0: the profile's
    pool_shares: Sequence[float] = ()  # the same, in distinct blocks of the workload
    speed: float = 1.0
    max_replicas: int = 256
    scenario: Path | None = None
    seed: int = 0


def run_fleet_plan(config: PlanConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Search the smallest fleet of every policy. Raises ConfigError for names and files that cannot be."""
    profile = resolve_profile(config.profile)
    scenario = read_scenario(config.scenario) if config.scenario is not None else NOTHING_HAPPENS
    requests = config.workload(config.speed, config.seed)
    limits = PlanLimits(config.slo, config.max_replicas)
    found: list[tuple[int, SmallestFleet]] = []  # with the KV blocks of a replica
    sizes = _pool_sizes(config, profile, requests)
    for size, policy in product(sizes, expand_policies(config.policies)):
        label = f"{policy}, {size:,} blocks" if len(sizes) > 1 else policy
        bar.start_stage(label)
        base = SimulationConfig(replace(profile, num_blocks=size), policy=policy, seed=config.seed, scenario=scenario)

        def on_run(policy: str, replicas: int, holds: bool, label: str = label) -> None:
            bar.start_stage(f"{label}: {replicas} replicas {'meet' if holds else 'miss'} the limits")

        found.append((size, smallest_fleet(requests, base, limits, on_run)))
    meeting = [pair for pair in found if pair[1].replicas is not None]
    best_size, best = min(meeting, key=lambda pair: _rank(pair[1]), default=(None, None))
    return BenchmarkReport(
        "plan",
        {
            "replicas": None if best is None else best.replicas,
            "policy": None if best is None else best.policy,
            "blocks": best_size,
            "fleets": [{"blocks": size, **_document(one)} for size, one in found],
        },
        seed=config.seed,
        setup={
            "workload": getattr(config.workload, "label", "requests"),
            "requests": len(requests),
            **getattr(config.workload, "report_facts", {}),
            "profile": profile.name,
            "source": profile.source,
            "slo": dict(config.slo.limits),
            "speed": config.speed,
            "max_replicas": config.max_replicas,
        },
        sheets=[_sheet(config, found)],
        problems=[] if best is not None else [f"no fleet of up to {config.max_replicas} replicas meets the limits"],
    )


def _pool_sizes(config: PlanConfig, profile: ReplicaProfile, requests: Sequence[SimRequest]) -> list[int]:
    """Return the KV blocks of a replica to try."""
    distinct = prompt_block_paths(requests, profile.block_size).num_distinct if config.pool_shares else 0
    shares = [max(int(share * distinct), 1) for share in config.pool_shares]
    return [blocks or profile.num_blocks for blocks in config.blocks] + shares


def _rank(one: SmallestFleet) -> tuple[int, float]:
    assert one.replicas is not None and one.report is not None
    return one.replicas, -one.report.attained


def _document(one: SmallestFleet) -> dict[str, Any]:
    values = {} if one.report is None else one.report.values()
    return {"policy": one.policy, "replicas": one.replicas, "runs": one.num_runs, **values}


def _sheet(config: PlanConfig, found: Sequence[tuple[int, SmallestFleet]]) -> ReportTable:
    keys = ("attained", "goodput", "ttft_p90_ms", "tpot_p90_ms", "e2e_p90_ms", "hit_rate")
    rows = []
    for size, one in found:
        values = {} if one.report is None else one.report.values()
        rows.append((one.policy, size, one.replicas, *(values.get(key) for key in keys), one.num_runs))
    limits = ", ".join(f"{name} {1e3 * limit:g} ms" for name, limit in config.slo.limits)
    columns = ("policy", "blocks", "fleet", "within", "good/s", "TTFT p90", "TPOT p90", "e2e p90", "hits", "runs")
    return ReportTable(f"the smallest fleet with {limits} at the 90th percentile", columns, tuple(rows))
