"""Experiment: the smallest simulated fleet that meets latency limits, by policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.measurement.progress_bar import QUIET, Bar
from headstart.measurement.report import Report, Sheet
from headstart.sim.capacity_plan import FleetSize, PlanLimits, smallest_fleet
from headstart.sim.profiles.profile_file import load_profile
from headstart.sim.reports.fleet_sweep import expand_policies
from headstart.sim.scenarios.scenario import NOTHING_HAPPENS, read_scenario
from headstart.sim.simulation import Simulation
from headstart.sim.sweep import MakeRequests
from headstart.workload.slo import Slo


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """The settings of `headstart plan`."""

    workload: MakeRequests
    policies: Sequence[str]
    profile: str
    slo: Slo
    speed: float = 1.0
    max_replicas: int = 256
    scenario: Path | None = None
    seed: int = 0


def run_fleet_plan(config: PlanConfig, bar: Bar = QUIET) -> Report:
    """Search the smallest fleet of every policy. Raises ConfigError for names and files that cannot be."""
    profile = load_profile(config.profile)
    scenario = read_scenario(config.scenario) if config.scenario is not None else NOTHING_HAPPENS
    requests = config.workload(config.speed, config.seed)
    limits = PlanLimits(config.slo, config.max_replicas)
    found: list[FleetSize] = []
    for policy in expand_policies(config.policies):
        bar.stage(policy)
        base = Simulation(profile, policy=policy, seed=config.seed, scenario=scenario)

        def on_run(policy: str, replicas: int, holds: bool) -> None:
            bar.stage(f"{policy}: {replicas} replicas {'meet' if holds else 'miss'} the limits")

        found.append(smallest_fleet(requests, base, limits, on_run))
    best = min((one for one in found if one.replicas is not None), key=lambda one: _rank(one), default=None)
    return Report(
        "plan",
        {
            "replicas": None if best is None else best.replicas,
            "policy": None if best is None else best.policy,
            "fleets": [_document(one) for one in found],
        },
        seed=config.seed,
        setup={
            "workload": getattr(config.workload, "label", "requests"),
            "requests": len(requests),
            "profile": profile.name,
            "source": profile.source,
            "slo": dict(config.slo.limits),
            "speed": config.speed,
            "max_replicas": config.max_replicas,
        },
        sheets=[_sheet(config, found)],
        problems=[] if best is not None else [f"no fleet of up to {config.max_replicas} replicas meets the limits"],
    )


def _rank(one: FleetSize) -> tuple[int, float]:
    assert one.replicas is not None and one.report is not None
    return one.replicas, -one.report.attained


def _document(one: FleetSize) -> dict[str, Any]:
    values = {} if one.report is None else one.report.values()
    return {"policy": one.policy, "replicas": one.replicas, "runs": one.num_runs, **values}


def _sheet(config: PlanConfig, found: Sequence[FleetSize]) -> Sheet:
    keys = ("attained", "goodput", "ttft_p90_ms", "tpot_p90_ms", "e2e_p90_ms", "hit_rate")
    rows = []
    for one in found:
        values = {} if one.report is None else one.report.values()
        rows.append((one.policy, one.replicas, *(values.get(key) for key in keys), one.num_runs))
    limits = ", ".join(f"{name} {1e3 * limit:g} ms" for name, limit in config.slo.limits)
    columns = ("policy", "fleet", "within", "good/s", "TTFT p90", "TPOT p90", "e2e p90", "hits", "runs")
    return Sheet(f"the smallest fleet with {limits} at the 90th percentile", columns, tuple(rows))
