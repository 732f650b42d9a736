"""Experiment: simulated fleets, every combination of policies, sizes, speeds and profiles, over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.core.errors import ConfigError
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable
from headstart.router.policies.policy_table import make_policy, policy_names
from headstart.sim.oracle_policy import ORACLE
from headstart.sim.profile import ReplicaProfile
from headstart.sim.profile_file import resolve_profile
from headstart.sim.scenario import NOTHING_HAPPENS, read_scenario
from headstart.sim.sim_workload import prompt_block_paths
from headstart.sim.sweep import MakeRequests, PointResult, SettingsGrid, SimulationConfig, SweepOptions, run_sweep
from headstart.workload.belady import belady_hit_blocks_per_request, infinite_cache_hits
from headstart.workload.block_paths import BlockPaths
from headstart.workload.slo import Slo

ALL = "all"
LATENCIES = {
    "ttft_mean_ms": "TTFT",
    "ttft_p50_ms": "p50",
    "ttft_p90_ms": "p90",
    "ttft_p99_ms": "p99",
    "tpot_mean_ms": "TPOT",
    "tpot_p99_ms": "p99",
    "e2e_mean_ms": "e2e",
    "e2e_p99_ms": "p99",
}
WORK = {
    "goodput": "good/s",
    "hit_rate": "hits",
    "redundancy": "redund.",
    "redundancy_bound": "bound",
    "busy": "busy",
    "preemptions": "preempt.",
    "retries": "retried",
    "errors": "failed",
}


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """The settings of `headstart simulate`. `workload` maps (speed, seed) to requests.

    Pools have each of `blocks` (0: the profile's) and each of `pool_shares`, in distinct blocks of the workload, and
    each of `evictions`, eviction policies; none: the profile's.
    """

    workload: MakeRequests
    policies: Sequence[str]
    replicas: Sequence[int]
    speeds: Sequence[float]
    profiles: Sequence[str]
    blocks: Sequence[int] = (0,)
    pool_shares: Sequence[float] = ()
    evictions: Sequence[str] = ()
    scenario: Path | None = None
    routers: int = 1
    noise: float | None = None
    seeds: int = 1
    seed: int = 0
    jobs: int = 1
    slo: Slo = Slo()  # noqa: RUF009


def run_fleet_sweep(config: SweepConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Run all combinations. Raises ConfigError for names, files and sizes that cannot be."""
    policies = expand_policies(config.policies)
    bounds = _Bounds(config)
    profiles = [profile for name in config.profiles for profile in _profiles(name, config, bounds)]
    scenario = read_scenario(config.scenario) if config.scenario is not None else NOTHING_HAPPENS
    base = SimulationConfig(profiles[0], routers=config.routers, seed=config.seed, scenario=scenario)
    points = list(SettingsGrid(profiles, config.replicas, policies, config.speeds).points(base))
    bar.start_stage(f"{len(points)} combinations, {config.seeds} seeds", len(points) * config.seeds)
    options = SweepOptions(config.seeds, config.jobs, config.slo)
    results = run_sweep(points, config.workload, options, lambda point, count: bar.advance())
    means = [{**one.mean_figures(), "redundancy_bound": bounds.redundancy(one.point.simulation)} for one in results]
    label = getattr(config.workload, "label", "requests")
    return BenchmarkReport(
        "simulate",
        {"points": [_document(one, mean) for one, mean in zip(results, means, strict=True)]},
        seed=config.seed,
        runs=config.seeds,
        setup={
            "workload": label,
            **getattr(config.workload, "report_facts", {}),
            "profiles": {profile.name: profile.source for profile in profiles},
            "scenario": None if config.scenario is None else config.scenario.name,
            "routers": config.routers,
            "slo": dict(config.slo.limits),
        },
        sheets=_sheets(label, results, means),
        charts=_charts(results),
        problems=[] if config.scenario is not None else _failures(results),
    )


def expand_policies(names: Sequence[str]) -> list[str]:
    """Return policy names, with `all` expanded. Raises ConfigError for an unknown one."""
    found = [name for given in names for name in ((*policy_names(), ORACLE) if given == ALL else [given])]
    for name in found:
        if name != ORACLE:
            make_policy(name)
    return found


class _Bounds:
    """Belady's bound of the workload of the first seed, by block size and pool; computed when it is asked for."""

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self._paths: dict[int, BlockPaths] = {}
        self._found: dict[tuple[int, int], float] = {}

    def paths(self, block_size: int) -> BlockPaths:
        """Return the prompts in order of arrival."""
        if block_size not in self._paths:
            requests = self._config.workload(self._config.speeds[0], self._config.seed)
            self._paths[block_size] = prompt_block_paths(requests, block_size)
        return self._paths[block_size]

    def redundancy(self, simulation: SimulationConfig) -> float | None:
        """Return the least redundancy of one pool of all replicas' blocks, serving in order of arrival.

        None in a scenario, which may change the pool.
        """
        if self._config.scenario is not None:
            return None
        profile = simulation.profile
        key = (profile.block_size, profile.num_blocks * simulation.replicas)
        if key not in self._found:
            paths = self.paths(profile.block_size)
            least = paths.computed_tokens(infinite_cache_hits(paths.paths))
            self._found[key] = paths.computed_tokens(belady_hit_blocks_per_request(paths.paths, key[1])) / least
        return self._found[key]


def _profiles(name: str, config: SweepConfig, bounds: _Bounds) -> list[ReplicaProfile]:
    """Return a profile with each pool size and eviction policy."""
    profile = resolve_profile(name)
    for eviction in config.evictions:
        if eviction not in EVICTION_POLICIES:
            raise ConfigError(f"there is no eviction policy {eviction!r}; there are {', '.join(EVICTION_POLICIES)}")
    if config.noise is not None:
        profile = replace(profile, noise=config.noise)
    sizes = [blocks or profile.num_blocks for blocks in config.blocks]
    if config.pool_shares:
        distinct = bounds.paths(profile.block_size).num_distinct
        sizes += [max(int(share * distinct), 1) for share in config.pool_shares]
    evictions = config.evictions or (profile.eviction_policy,)
    return [replace(profile, num_blocks=size, eviction_policy=each) for size in sizes for each in evictions]


def _failures(results: Sequence[PointResult]) -> list[str]:
    """Return a problem per point with failed requests; in a scenario they are a result."""
    found: list[str] = []
    for name, one in zip(_labels(results), results, strict=True):
        failed = [run for run in one.runs if run.summary.errors]
        if failed:
            found.append(f"{name}: {failed[0].summary.errors} requests failed, the first with: {failed[0].first_error}")
    return found


def _document(one: PointResult, mean: dict[str, Any]) -> dict[str, Any]:
    simulation = one.point.simulation
    setting = {
        "policy": simulation.policy,
        "replicas": simulation.replicas,
        "speed": one.point.speed,
        "profile": simulation.profile.name,
        "blocks": simulation.profile.num_blocks,
        "eviction_policy": simulation.profile.eviction_policy,
    }
    return {**setting, **mean, "spread": one.spread() if len(one.runs) > 1 else {}}


def _labels(results: Sequence[PointResult]) -> list[str]:
    """Return a label per point: its policy, and the settings in which points differ."""
    parts = [
        (
            one.point.simulation.policy,
            f"x{one.point.simulation.replicas}",
            f"speed {one.point.speed:g}",
            one.point.simulation.profile.name,
            f"{one.point.simulation.profile.num_blocks:,} blocks",
            one.point.simulation.profile.eviction_policy,
        )
        for one in results
    ]
    differ = [index for index in range(1, 6) if len({row[index] for row in parts}) > 1]
    return [", ".join([row[0], *(row[index] for index in differ)]) for row in parts]


def _sheets(label: str, results: Sequence[PointResult], means: Sequence[dict[str, Any]]) -> list[ReportTable]:
    labels = _labels(results)
    asked = f"{results[0].runs[0].summary.requests:,} requests of {label}"
    title = f"{asked}, {results[0].point.simulation.profile.name}; ms"
    by_replica = (("requests", "requests_by_replica"), ("evictions", "evictions_by_replica"))
    return [
        ReportTable(
            title,
            ("policy", *LATENCIES.values()),
            tuple((n, *_of(m, LATENCIES)) for n, m in zip(labels, means, strict=True)),
        ),
        ReportTable(
            "work", ("policy", *WORK.values()), tuple((n, *_of(m, WORK)) for n, m in zip(labels, means, strict=True))
        ),
        ReportTable(
            "by replica: fewest and most",
            ("policy", *(name for name, _ in by_replica)),
            tuple((n, *(_range(m[key]) for _, key in by_replica)) for n, m in zip(labels, means, strict=True)),
        ),
    ]


def _of(means: dict[str, Any], columns: dict[str, str]) -> list[Any]:
    return [means[key] for key in columns]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f}"


def _charts(results: Sequence[PointResult]) -> list[ReportChart]:
    x = tuple(_labels(results))

    def bars(title: str, *keys: str) -> ReportChart:
        means = [one.mean_figures() for one in results]
        return ReportChart(title, "", "ms", x, {k.split("_")[1]: tuple(m[k] for m in means) for k in keys}, log_y=True)

    return [
        bars("time to first token", "ttft_mean_ms", "ttft_p99_ms"),
        bars("time per output token", "tpot_mean_ms", "tpot_p99_ms"),
        bars("end to end", "e2e_mean_ms"),
    ]
