"""The report of `bench fleet`: figures with their intervals by workload and router, and whether its goals are met."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup
from headstart.workload.request_record import percentile
from headstart_lab.bootstrap import Interval, interval, mean
from headstart_lab.router.fleet import measure_fleet
from headstart_lab.router.fleet_trial import BASELINE, TITLES, FleetConfig, Measured, Trial
from headstart_lab.runners.route_process import parse_peer

QUICK = FleetConfig(groups=6, prompts=3)
OURS = "cost"
RATIO = 3.0  # round robin's mean time to the first token / ours, at high hit
FIGURES = ("ttft_mean_ms", "ttft_p90_ms")
COLUMNS = (
    *("router", "TTFT mean ms", "95 %", "p90", "TPOT p99 ms", "end to end ms", "hit rate", "error, tokens"),
    *("router CPU ms", "shares"),
)


def run_fleet(
    setup: EngineSetup, config: FleetConfig, bar: ProgressBar = QUIET, *, peer: Sequence[str] = ()
) -> BenchmarkReport:
    """Measure every router on each workload, and every NAME=ENVIRONMENT of `peer`. Raises ConfigError."""
    config = replace(config, peers=(*config.peers, *map(parse_peer, peer)))
    return make_report(setup, config, measure_fleet(setup, config, bar))


def make_report(setup: EngineSetup, config: FleetConfig, measured: Measured) -> BenchmarkReport:
    """Return the report: figures, intervals, tables, a chart. Failed requests make it invalid."""
    report = BenchmarkReport(
        "fleet",
        {},
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=1,
        setup=_setup(config, measured),
        contention=measured.log.as_dict(),
    )
    intervals: dict[str, Interval] = {}
    for kind, trials in measured.trials.items():
        rows: list[tuple[Any, ...]] = []
        for name, runs in trials.items():
            key = f"{kind}.{name}"
            failed = [error for trial in runs for error in trial.errors]
            if failed:
                report.problems.append(f"{key}: {len(failed)} requests failed, the first with: {failed[0]}")
            if not all(trial.ttfts for trial in runs):
                continue
            report.values |= {f"{key}.{figure}": value for figure, value in _figures(runs).items()}
            report.spread[f"{key}.ttft_mean_ms"] = min_and_max([mean(trial.ttfts) for trial in runs])
            intervals |= {f"{key}.{figure}": found for figure, found in _intervals(runs, setup.seed).items()}
            rows.append(_row(name, report.values, intervals[f"{key}.ttft_mean_ms"], key, runs))
        title = f"{TITLES[kind]}: {_lengths(config, kind)}, {measured.rates[kind]:.3g} requests/s"
        report.sheets.append(ReportTable(title, COLUMNS, tuple(rows)))
    report.values["intervals"] = {key: list(found) for key, found in intervals.items()}
    report.values |= goals(report.values, intervals)
    report.charts.append(_chart(report.values, measured))
    return report


def goals(values: Mapping[str, Any], intervals: Mapping[str, Interval]) -> dict[str, Any]:
    """Return whether the goals of the issue are met, except goals about routers that were not measured.

    "No worse" means a smaller mean, or overlapping intervals.
    """
    names = {kind: _names(values, kind) for kind in TITLES}
    found: dict[str, Any] = {}
    if OURS in names["high"] and BASELINE in names["high"]:
        ratio = values[f"high.{BASELINE}.ttft_mean_ms"] / values[f"high.{OURS}.ttft_mean_ms"]
        found["round_robin_over_cost"] = ratio
        found["goal.high.three_times_better"] = ratio >= RATIO
    for kind, others in names.items():
        for name in others:
            if OURS not in others or name == OURS:
                continue
            ours, theirs = f"{kind}.{OURS}.ttft_mean_ms", f"{kind}.{name}.ttft_mean_ms"
            found[f"goal.{kind}.no_worse_than.{name}"] = values[ours] <= values[theirs] or intervals[ours].overlaps(
                intervals[theirs]
            )
    return found


def _names(values: Mapping[str, Any], kind: str) -> list[str]:
    start, end = f"{kind}.", ".ttft_mean_ms"
    return [key[len(start) : -len(end)] for key in values if key.startswith(start) and key.endswith(end)]


def _figures(runs: Sequence[Trial]) -> dict[str, float]:
    ttfts = list(chain.from_iterable(trial.ttfts for trial in runs))
    errors = [error for trial in runs for error in trial.prediction_errors]
    found = {
        "ttft_mean_ms": mean(ttfts),
        "ttft_p90_ms": percentile(ttfts, 90),
        "tpot_p99_ms": percentile(list(chain.from_iterable(trial.tpots for trial in runs)) or [0.0], 99),
        "e2e_mean_ms": mean(list(chain.from_iterable(trial.latencies for trial in runs))),
        "hit_rate": mean([trial.hit_rate for trial in runs]),
        "router_cpu_ms": 1e3 * sum(trial.router_cpu for trial in runs) / len(ttfts),
    }
    return found | ({"prediction_error_tokens": mean(errors)} if errors else {})


def _intervals(runs: Sequence[Trial], seed: int) -> dict[str, Interval]:
    ttfts, rng = [trial.ttfts for trial in runs], Random(f"{seed}/bootstrap")
    return {
        "ttft_mean_ms": interval(ttfts, mean, rng),
        "ttft_p90_ms": interval(ttfts, lambda values: percentile(values, 90), rng),
        "hit_rate": interval([[trial.hit_rate] for trial in runs], mean, rng),
    }


def _row(name: str, values: Mapping[str, Any], found: Interval, key: str, runs: Sequence[Trial]) -> tuple[Any, ...]:
    shares = [mean(share) for share in zip(*(sorted(trial.shares, reverse=True) for trial in runs), strict=True)]
    return (
        name,
        values[f"{key}.ttft_mean_ms"],
        f"{found.low:.4g} to {found.high:.4g}",
        values[f"{key}.ttft_p90_ms"],
        values[f"{key}.tpot_p99_ms"],
        values[f"{key}.e2e_mean_ms"],
        values[f"{key}.hit_rate"],
        values.get(f"{key}.prediction_error_tokens"),
        values[f"{key}.router_cpu_ms"],
        " ".join(f"{share:.2f}" for share in shares),
    )


def _lengths(config: FleetConfig, kind: str) -> str:
    shape = config.shapes[kind]
    if kind == "decode":
        return (
            f"{config.groups} groups by Zipf, prompt {shape.shared} + {shape.own}, output about {shape.output} tokens"
        )
    return f"{config.groups} groups of {config.prompts}, system {shape.shared}, question {shape.own} tokens"


def _setup(config: FleetConfig, measured: Measured) -> dict[str, Any]:
    versions = {name: runs[0].version for trials in measured.trials.values() for name, runs in trials.items() if runs}
    return {
        "replicas": config.replicas,
        "threads_per_replica": 1,
        "pool_blocks": config.pool_blocks,
        "groups": config.groups,
        "prompts_per_group": config.prompts,
        "output_tokens": config.output,
        "decode_output_tokens": config.decode_output,
        "scale": config.scale,
        "requests_per_second": measured.rates,
        "round_robin_bears": measured.borne,
        "load": config.load,
        "routers": versions,
    }


def _chart(values: Mapping[str, Any], measured: Measured) -> ReportChart:
    names = list(next(iter(measured.trials.values())))
    series = {
        f"{TITLES[kind]}, {label}": tuple(values.get(f"{kind}.{name}.{figure}") for name in names)
        for kind in measured.trials
        for figure, label in zip(FIGURES, ("mean", "p90"), strict=True)
    }
    return ReportChart("time to the first token by router", "", "ms", tuple(names), series, log_y=True)
