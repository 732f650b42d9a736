"""Capacity plan: the smallest simulated fleet whose latencies meet an SLO, and the policy it needs.

The search assumes that a larger fleet is not slower: it doubles the replicas until the SLO is met, then bisects. A run
ends as soon as so many requests are late that the SLO cannot be met.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headstart.sim.sim_fleet import VirtualFleet
from headstart.sim.sim_report import FleetReport, report
from headstart.sim.sim_request import SimRequest
from headstart.sim.simulation import Simulation
from headstart.workload.slo import Slo, TooManyLate


@dataclass(frozen=True, slots=True)
class FleetSize:
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
    base: Simulation,
    limits: PlanLimits,
    on_run: Callable[[str, int, bool], None] = lambda policy, replicas, holds: None,
) -> FleetSize:
    """Return the smallest number of replicas of `base` that meets the SLO. `on_run`: called after every run."""
    tried: dict[int, FleetReport] = {}

    def holds(num: int) -> bool:
        if num not in tried:
            tried[num] = report(_run(requests, replace(base, replicas=num), limits.slo), limits.slo)
            on_run(base.policy, num, _meets(tried[num], len(requests)))
        return _meets(tried[num], len(requests))

    low, high = 0, 1  # `low` replicas do not meet it
    while not holds(high):
        if high == limits.max_replicas:
            return FleetSize(base.policy, None, None, len(tried))
        low, high = high, min(2 * high, limits.max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return FleetSize(base.policy, high, tried[high], len(tried))


def _run(requests: Sequence[SimRequest], simulation: Simulation, slo: Slo) -> VirtualFleet:
    """Run until all requests have ended, or too many are late."""
    fleet = simulation.build()
    late = TooManyLate(len(requests), slo)

    def check(record: object) -> None:
        if late(fleet.records[-1].record):
            fleet.is_halted = True

    fleet.on_record = check
    fleet.run(requests)
    return fleet


def _meets(found: FleetReport, num_requests: int) -> bool:
    return found.holds and found.summary.requests == num_requests
