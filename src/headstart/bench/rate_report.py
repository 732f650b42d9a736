"""The report on the highest request rate that holds: first unloaded requests, then the rate search.

Search for the highest Poisson request rate at which a runner keeps its latencies within limits.

All rates of a search use the same draw of arrivals, scaled in time, and prompts that the runner has not seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from random import Random
from typing import Any

from headstart.bench.measure import PhaseResult, ScenarioResult, measure_scenario
from headstart.bench.suite import (
    check_request_lengths,
    format_redundancy,
    group_results_by_phase,
    latency_table,
    redundancy_table,
)
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable
from headstart.measurement.runner import JobRunner
from headstart.workload import scenarios
from headstart.workload.request_record import median, summarize_records
from headstart.workload.scenarios import WorkloadScenario
from headstart.workload.slo import LatenessEarlyStop, Slo
from headstart.workload.synthetic import INTENT, RequestShape, random_tokens, unit_poisson_arrivals

LIMIT_FACTOR = 4
"""Default limit: this factor times the unloaded latency, unless limits are given."""
Load = Callable[[int, Random, Sequence[float]], WorkloadScenario]
"""(vocabulary size, rng, arrival time of each request) -> a scenario whose last phase is the load."""
# Shares of the rate of requests one after the other: where a search begins, and below which it gives up. Rates far
# below are hardly other than single requests, and take minutes each.
START_LOAD, LEAST_LOAD = 0.5, 0.2


def search_highest_rate(
    holds: Callable[[float], bool],
    start: float,
    *,
    factor: float = 1.6,
    precision: float = 1.1,
    max_points: int = 14,
    least: float = 0.0,
) -> float:
    """Return the highest measured rate at which `holds(rate)` is true; 0 if there is none of at least `least`.

    Steps from `start` by `factor` until one rate holds and a higher one does not, then halves the gap (geometrically)
    until the two are within `precision` of each other. Measures at most `max_points` rates, each of them once.
    """
    if start <= 0 or factor <= 1 or precision <= 1:
        raise ValueError(f"start {start} must be above 0, factor {factor} and precision {precision} above 1")
    low, high, rate = 0.0, 0.0, start  # low holds, high does not; 0: not known yet
    for _ in range(max_points):
        if holds(rate):
            low = rate
        else:
            high = rate
        if low and high:
            if high / low <= precision:
                break
            rate = sqrt(low * high)
        elif low:
            rate = low * factor
        elif high <= least:
            break
        else:
            rate = max(high / factor, least)
    return low


@dataclass(frozen=True, slots=True)
class RateSearchConfig:
    """Parameters of a search."""

    seconds: float = 30.0  # of arrivals per rate, at least
    min_requests: int = 40  # per rate, at least
    precision: float = 1.1  # of the search
    seed: int | str = 0


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One measured rate, in requests per second."""

    rate: float
    result: PhaseResult
    holds: bool


@dataclass(frozen=True, slots=True)
class RateSearchResult:
    """The result of a search: the highest rate that holds (0: none), and all measured rates, in order."""

    rate: float
    points: tuple[RatePoint, ...]
    slo: Slo

    @property
    def problems(self) -> list[str]:
        """Return the failures. Requests that were not completed because the run was ended early are not failures."""
        return [f"{point.rate:.3g} requests/s: {text}" for point in self.points for text in point.result.problems]


DEFAULTS = RateSearchConfig()


def cached_prefix_workload(shape: RequestShape = INTENT) -> Load:
    """Return the load of PrefixCacheManager (blog): requests behind one prefix that is already cached."""

    def build(vocab_size: int, rng: Random, due: Sequence[float]) -> WorkloadScenario:
        prefix = random_tokens(shape.shared, vocab_size, rng)
        return scenarios.poisson_intent_recognition_scenario(vocab_size, rng, due=due, prefix=prefix, shape=shape)

    return build


def measure_rates_until_highest(
    runner: JobRunner, load: Load, slo: Slo, alone: float, config: RateSearchConfig = DEFAULTS, bar: ProgressBar = QUIET
) -> RateSearchResult:
    """Measure rates until the highest one that holds is known to `config.precision`.

    `alone`: seconds of an unloaded request.
    """
    points: list[RatePoint] = []

    def holds(rate: float) -> bool:
        points.append(measure_rate(runner, load, slo, rate, config, bar))
        return points[-1].holds

    found = search_highest_rate(holds, START_LOAD / alone, precision=config.precision, least=LEAST_LOAD / alone)
    return RateSearchResult(found, tuple(points), slo)


def measure_rate(
    runner: JobRunner, load: Load, slo: Slo, rate: float, config: RateSearchConfig = DEFAULTS, bar: ProgressBar = QUIET
) -> RatePoint:
    """Measure one rate. The run ends early once it is certain to miss `slo`, unless `slo` has no limits."""
    count = max(config.min_requests, ceil(rate * config.seconds))
    due = [at / rate for at in unit_poisson_arrivals(count, Random(f"{config.seed}/arrivals"))]
    scenario = load(runner.vocab_size, Random(f"{config.seed}/{rate}"), due)
    result = measure_scenario(runner, scenario, bar, LatenessEarlyStop(count, slo) if slo else None).phases[-1]
    whole = not result.trial.is_cut and len(result.trial.records) == count
    return RatePoint(rate, result, whole and slo.is_met_at_percentile(result.trial.records))


@dataclass(frozen=True, slots=True)
class RateSearchPlan:
    """The load and its latency limits. Without limits: LIMIT_FACTOR times the unloaded latency."""

    name: str
    load: Load
    seed: int
    slo: Slo
    config: RateSearchConfig = DEFAULTS
    alone: int = 8  # requests served one at a time before the search
    is_guarded: bool = True
    setup: dict[str, Any] = field(default_factory=dict[str, Any])


def run_rate_search(runner: JobRunner, plan: RateSearchPlan, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure unloaded requests, then search the highest rate. Raises ConfigError for requests that do not fit."""
    scenario = _alone(plan, runner.vocab_size)
    check_request_lengths(runner, scenario)
    log = ContentionLog.empty()
    alone = measure_uncontended(lambda: measure_scenario(runner, scenario, bar), log, retries=int(plan.is_guarded))
    known = [record.e2e for record in alone["alone"].trial.records if record.ok and record.e2e is not None]
    if not known or alone.problems:
        return _report(runner, plan, alone, None)
    slo = plan.slo or Slo(e2e=LIMIT_FACTOR * median(known))
    if not slo.is_met_at_percentile(alone["alone"].trial.records, share=50):  # then no rate can hold
        return _report(runner, plan, alone, RateSearchResult(0.0, (), slo))
    config = replace(plan.config, seed=plan.seed)
    found = measure_uncontended(
        lambda: measure_rates_until_highest(runner, plan.load, slo, median(known), config, bar), log, retries=0
    )
    report = _report(runner, plan, alone, found)
    if plan.is_guarded:
        report.contention = log.as_dict()
    return report


def _alone(plan: RateSearchPlan, vocab_size: int) -> WorkloadScenario:
    """Return the load's scenario with one request at a time."""
    found = plan.load(vocab_size, Random(f"{plan.seed}/alone"), [0.0] * plan.alone)
    last = replace(found.phases[-1], name="alone", concurrency=1)
    return replace(found, name=plan.name, phases=(*found.phases[:-1], last))


def _report(
    runner: JobRunner, plan: RateSearchPlan, alone: ScenarioResult, search: RateSearchResult | None
) -> BenchmarkReport:
    values = {
        phase.name: phase.json_fields(search.slo if search else plan.slo) for phase in group_results_by_phase([alone])
    }
    report = BenchmarkReport(
        plan.name,
        {"highest_rate": None, "redundancy": values["alone"]["redundancy"], "phases": values},
        model=runner.about.get("model"),
        seed=plan.seed,
        threads=runner.about.get("settings", {}).get("threads"),
        setup={**plan.setup, **runner.about, "seconds_per_rate": plan.config.seconds},
        problems=alone.problems,
    )
    report.sheets += [redundancy_table(values), latency_table(values)]
    if search is None:
        return report
    points = [_values(point, search.slo) for point in search.points]
    held = [found for found in points if found["holds"] and found["rate"] == search.rate]
    report.values |= {
        "highest_rate": search.rate,
        "slo_ms": {name: 1e3 * limit for name, limit in search.slo.limits},
        "redundancy": held[0]["redundancy"] if held else None,
        "goodput": held[0]["goodput"] if held else 0.0,
        "points": points,
    }
    report.problems += list(dict.fromkeys(search.problems))
    report.sheets.append(_points_sheet(search, points))
    if not points:
        return report
    report.charts.append(_chart(search, points))
    return report


def _values(point: RatePoint, slo: Slo) -> dict[str, Any]:
    trial = point.result.trial
    summary = summarize_records(trial.records)
    shown = {"ttft": summary.ttft, "tpot": summary.tpot, "e2e": summary.e2e}
    return {
        "rate": point.rate,
        "requests": len(point.result.phase.jobs),
        "finished": summary.requests - summary.errors,
        "given_up": trial.is_cut,
        **{f"{name}_p90_ms": None if trial.is_cut or not f else 1e3 * f.p90 for name, f in shown.items()},
        "goodput": slo.goodput(trial.records),
        "redundancy": point.result.redundancy_factor,
        "reports_cached": trial.reports_cached,
        "holds": point.holds,
    }


def _points_sheet(search: RateSearchResult, points: list[dict[str, Any]]) -> ReportTable:
    limits = ", ".join(f"{name} <= {1e3 * limit:.0f} ms" for name, limit in search.slo.limits)
    keys = ("rate", "requests", "ttft_p90_ms", "tpot_p90_ms", "e2e_p90_ms", "goodput")
    columns = ("req/s", "sent", "TTFT p90", "TPOT p90", "e2e p90", "goodput")
    rows = tuple(
        (
            *(found[key] for key in keys),
            format_redundancy(found),
            "given up" if found["given_up"] else "yes" if found["holds"] else "no",
        )
        for found in sorted(points, key=lambda found: found["rate"])
    )
    title = f"highest rate with p90 of {limits}: {search.rate:.3g} requests/s (ms; -: given up, sure to miss)"
    if not points:
        title = f"highest rate with p90 of {limits}: 0 requests/s, since requests alone miss that"
    return ReportTable(title, (*columns, "redundancy", "holds"), rows)


def _chart(search: RateSearchResult, points: list[dict[str, Any]]) -> ReportChart:
    """Return the chart of p90 / limit for every limited latency, by rate; a rate holds below 1."""
    ordered = sorted((found for found in points if not found["given_up"]), key=lambda found: found["rate"])
    series: dict[str, tuple[float | None, ...]] = {}
    for name, limit in search.slo.limits:
        series[f"{name}, limit {1e3 * limit:.0f} ms"] = tuple(
            None if found[f"{name}_p90_ms"] is None else found[f"{name}_p90_ms"] / (1e3 * limit) for found in ordered
        )
    series["limit"] = tuple(1.0 for _ in ordered)
    return ReportChart("load", "requests/s", "p90 / limit", tuple(found["rate"] for found in ordered), series)
