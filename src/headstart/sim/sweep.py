"""Sweep: simulations of every combination of settings, over seeds, in this process or in several."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from headstart.router.policies.policy import Policy
from headstart.router.policies.policy_table import make_policy
from headstart.router.router import Router
from headstart.sim.oracle_policy import ORACLE, OraclePolicy
from headstart.sim.profile import ReplicaProfile
from headstart.sim.scenario import NOTHING_HAPPENS, FleetScenario, ScenarioEventRunner
from headstart.sim.sim_fleet import DEFAULTS, FleetOptions, SimRecord, VirtualFleet, make_endpoint
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_report import FleetReport, fleet_report
from headstart.sim.sim_request import SimRequest
from headstart.workload.slo import Slo

UNLIMITED = Slo()
MakeRequests = Callable[[float, int], Sequence[SimRequest]]
"""Map (speed, seed) to a workload; must be picklable for more than one process."""
MakePolicy = Callable[[Mapping[str, SimReplica]], Policy]
"""Map the replicas of a fleet, by name, to a policy: one with exact knowledge reads their state."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The settings of one run. Replicas are named r0, r1, ...; requests go to the routers in turn."""

    profile: ReplicaProfile
    replicas: int = 8
    policy: str = "cost"
    seed: int = 0
    routers: int = 1
    believed_blocks: int = 0  # size of the routers' indexes; 0: the true one
    scenario: FleetScenario = NOTHING_HAPPENS
    options: FleetOptions = DEFAULTS

    def build_fleet(self, make: MakePolicy | None = None) -> VirtualFleet:
        """Return a fleet with its events, ready to run. `make`: the policy of each router, instead of the named one.

        Raises ConfigError for an unknown policy or replica.
        """
        profile = self.profile
        if self.scenario.offload is not None:
            profile = replace(profile, offload=self.scenario.offload)

        def new_replica(name: str, now: float) -> SimReplica:
            return SimReplica(name, profile, seed=self.seed, now=now)

        found = [new_replica(f"r{index}", 0.0) for index in range(self.replicas)]
        routers: list[Router] = []
        fleet = VirtualFleet(found, routers, self.options)
        for _ in range(self.routers):
            router = Router((make or self._policy)(fleet.replicas))
            for one in found:
                router.add(make_endpoint(one, self.believed_blocks))
            routers.append(router)
        ScenarioEventRunner(self.scenario, fleet, new_replica)
        return fleet

    def _policy(self, replicas: Mapping[str, SimReplica]) -> Policy:
        return OraclePolicy(replicas) if self.policy == ORACLE else make_policy(self.policy)

    def run_new_fleet(
        self, requests: Sequence[SimRequest], on_record: Callable[[SimRecord], None] | None = None
    ) -> VirtualFleet:
        """Run the workload; return the fleet in its final state."""
        fleet = self.build_fleet()
        fleet.on_record = on_record
        fleet.run(requests)
        return fleet


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One combination of settings; its runs differ in the seed only."""

    simulation: SimulationConfig
    speed: float

    @property
    def label(self) -> str:
        simulation = self.simulation
        return f"{simulation.policy} x{simulation.replicas} @{self.speed:g}"


@dataclass(frozen=True, slots=True)
class PointResult:
    """The runs of one point, one per seed."""

    point: GridPoint
    runs: tuple[FleetReport, ...]

    def mean_figures(self) -> dict[str, Any]:
        """Return the figures as plain values: means over the seeds, and of lists the sorted means by rank."""
        rows = [run.values() for run in self.runs]
        return {name: _mean([row[name] for row in rows]) for name in rows[0]}

    def spread(self) -> dict[str, list[float]]:
        """Return [min, max] over the seeds of every figure that is a number."""
        rows = [run.values() for run in self.runs]
        found: dict[str, list[float]] = {}
        for name, value in rows[0].items():
            if isinstance(value, int | float) and all(row[name] is not None for row in rows):
                found[name] = [min(row[name] for row in rows), max(row[name] for row in rows)]
        return found


@dataclass(frozen=True, slots=True)
class SettingsGrid:
    """The settings to combine."""

    profiles: Sequence[ReplicaProfile]
    replicas: Sequence[int]
    policies: Sequence[str]
    speeds: Sequence[float]

    def points(self, base: SimulationConfig) -> Iterator[GridPoint]:
        """Yield every combination; what the grid does not set comes from `base`."""
        for profile, replicas, speed, policy in product(self.profiles, self.replicas, self.speeds, self.policies):
            yield GridPoint(replace(base, profile=profile, replicas=replicas, policy=policy), speed)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """`seeds` runs per point; `jobs` processes."""

    seeds: int = 1
    jobs: int = 1
    slo: Slo = UNLIMITED


def run_sweep(
    points: Sequence[GridPoint], make: MakeRequests, options: SweepOptions, on_run: Callable[[GridPoint, int], None]
) -> list[PointResult]:
    """Run every point with every seed; return the results in the order of the points.

    `on_run` is called with the point and the number of requests of each run that has ended.
    """
    tasks = [(point, seed) for point in points for seed in range(options.seeds)]
    found: dict[int, FleetReport] = {}
    if options.jobs <= 1:
        for index, (point, seed) in enumerate(tasks):
            found[index] = run_point_with_seed(point, seed, make, options.slo)
            on_run(point, found[index].summary.requests)
    else:
        with ProcessPoolExecutor(options.jobs) as pool:
            futures = {
                pool.submit(run_point_with_seed, point, seed, make, options.slo): index
                for index, (point, seed) in enumerate(tasks)
            }
            for future in as_completed(futures):
                index = futures[future]
                found[index] = future.result()
                on_run(tasks[index][0], found[index].summary.requests)
    size = options.seeds
    return [
        PointResult(point, tuple(found[number * size + seed] for seed in range(size)))
        for number, point in enumerate(points)
    ]


def run_point_with_seed(point: GridPoint, seed: int, make: MakeRequests, slo: Slo) -> FleetReport:
    """Run one point with one seed."""
    simulation = replace(point.simulation, seed=point.simulation.seed + seed)
    return fleet_report(simulation.run_new_fleet(make(point.speed, simulation.seed)), slo)


def _mean(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):
        ranked = [sorted(value) for value in values]
        return [fmean(rank) for rank in zip(*ranked, strict=False)] if len(values) > 1 else first
    if isinstance(first, bool):
        return all(values)
    known = [value for value in values if value is not None]
    if not known:
        return None
    return fmean(known) if len(values) > 1 else known[0]
