"""The report on the highest request rate that holds: first unloaded requests, then the rate search."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from headstart.bench.measure import Measured, measure
from headstart.bench.rate import DEFAULTS, Load, RateConfig, RatePoint, RateSearch, search_rate
from headstart.bench.suite import by_phase, check_lengths, latencies, redundancy_sheet, redundancy_text
from headstart.measurement.machine import ContentionLog, uncontended
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.measurement.report import Chart, Report, Sheet
from headstart.measurement.runner import Runner
from headstart.workload.request_record import median, summarize
from headstart.workload.scenarios import Scenario
from headstart.workload.slo import Slo

LIMIT_FACTOR = 4
"""Default limit: this factor times the unloaded latency, unless limits are given."""


@dataclass(frozen=True, slots=True)
class RatePlan:
    """The load and its latency limits. Without limits: LIMIT_FACTOR times the unloaded latency."""

    name: str
    load: Load
    seed: int
    slo: Slo
    config: RateConfig = DEFAULTS
    alone: int = 8  # requests served one at a time before the search
    is_guarded: bool = True
    setup: dict[str, Any] = field(default_factory=dict[str, Any])


def run_rate_search(runner: Runner, plan: RatePlan, bar: Bar = QUIET) -> Report:
    """Measure unloaded requests, then search the highest rate. Raises ConfigError for requests that do not fit."""
    scenario = _alone(plan, runner.vocab_size)
    check_lengths(runner, scenario)
    log = ContentionLog.new()
    alone = uncontended(lambda: measure(runner, scenario, bar), log, retries=int(plan.is_guarded))
    known = [record.e2e for record in alone["alone"].trial.records if record.ok and record.e2e is not None]
    if not known or alone.problems:
        return _report(runner, plan, alone, None)
    slo = plan.slo or Slo(e2e=LIMIT_FACTOR * median(known))
    if not slo.holds(alone["alone"].trial.records, share=50):  # then no rate can hold
        return _report(runner, plan, alone, RateSearch(0.0, (), slo))
    config = replace(plan.config, seed=plan.seed)
    found = uncontended(lambda: search_rate(runner, plan.load, slo, median(known), config, bar), log, retries=0)
    report = _report(runner, plan, alone, found)
    if plan.is_guarded:
        report.contention = log.as_dict()
    return report


def _alone(plan: RatePlan, vocab_size: int) -> Scenario:
    """Return the load's scenario with one request at a time."""
    found = plan.load(vocab_size, Random(f"{plan.seed}/alone"), [0.0] * plan.alone)
    last = replace(found.phases[-1], name="alone", concurrency=1)
    return replace(found, name=plan.name, phases=(*found.phases[:-1], last))


def _report(runner: Runner, plan: RatePlan, alone: Measured, search: RateSearch | None) -> Report:
    values = {phase.name: phase.values(search.slo if search else plan.slo) for phase in by_phase([alone])}
    report = Report(
        plan.name,
        {"highest_rate": None, "redundancy": values["alone"]["redundancy"], "phases": values},
        model=runner.about.get("model"),
        seed=plan.seed,
        threads=runner.about.get("settings", {}).get("threads"),
        setup={**plan.setup, **runner.about, "seconds_per_rate": plan.config.seconds},
        problems=alone.problems,
    )
    report.sheets += [redundancy_sheet(values), latencies(values)]
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
    summary = summarize(trial.records)
    shown = {"ttft": summary.ttft, "tpot": summary.tpot, "e2e": summary.e2e}
    return {
        "rate": point.rate,
        "requests": len(point.result.phase.jobs),
        "finished": summary.requests - summary.errors,
        "given_up": trial.is_cut,
        **{f"{name}_p90_ms": None if trial.is_cut or not f else 1e3 * f.p90 for name, f in shown.items()},
        "goodput": slo.goodput(trial.records),
        "redundancy": point.result.redundancy,
        "reports_cached": trial.reports_cached,
        "holds": point.holds,
    }


def _points_sheet(search: RateSearch, points: list[dict[str, Any]]) -> Sheet:
    limits = ", ".join(f"{name} <= {1e3 * limit:.0f} ms" for name, limit in search.slo.limits)
    keys = ("rate", "requests", "ttft_p90_ms", "tpot_p90_ms", "e2e_p90_ms", "goodput")
    columns = ("req/s", "sent", "TTFT p90", "TPOT p90", "e2e p90", "goodput")
    rows = tuple(
        (
            *(found[key] for key in keys),
            redundancy_text(found),
            "given up" if found["given_up"] else "yes" if found["holds"] else "no",
        )
        for found in sorted(points, key=lambda found: found["rate"])
    )
    title = f"highest rate with p90 of {limits}: {search.rate:.3g} requests/s (ms; -: given up, sure to miss)"
    if not points:
        title = f"highest rate with p90 of {limits}: 0 requests/s, since requests alone miss that"
    return Sheet(title, (*columns, "redundancy", "holds"), rows)


def _chart(search: RateSearch, points: list[dict[str, Any]]) -> Chart:
    """Return the chart of p90 / limit for every limited latency, by rate; a rate holds below 1."""
    ordered = sorted((found for found in points if not found["given_up"]), key=lambda found: found["rate"])
    series: dict[str, tuple[float | None, ...]] = {}
    for name, limit in search.slo.limits:
        series[f"{name}, limit {1e3 * limit:.0f} ms"] = tuple(
            None if found[f"{name}_p90_ms"] is None else found[f"{name}_p90_ms"] / (1e3 * limit) for found in ordered
        )
    series["limit"] = tuple(1.0 for _ in ordered)
    return Chart("load", "requests/s", "p90 / limit", tuple(found["rate"] for found in ordered), series)
