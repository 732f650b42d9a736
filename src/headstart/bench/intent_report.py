"""The report of `bench intent`, from the measurements of `intent_load.py`, and answers that the laboratory checks."""

from collections.abc import Callable
from typing import Any

from headstart.bench.intent_load import NUM_BLOCKS, IntentBench, IntentConfig, IntentPoint
from headstart.measurement.engines import BUNDLED, Setup, describe
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.measurement.report import Chart, Report, Sheet, spread
from headstart.workload.request_record import RequestRecord, median, summarize

AddAccuracy = Callable[[Report, Bar], None]
"""Measures the bundled model's answers, and adds its figures, problems and table to a report."""
Pair = dict[str, Any]  # side ("off", "on") -> figure


def run_intent(
    setup: Setup, config: IntentConfig | None, bar: Bar = QUIET, *, add_accuracy: AddAccuracy | None = None
) -> Report:
    """Measure load on `setup`'s model if `config` is given, and the bundled one's answers by `add_accuracy`."""
    if config is None:
        report = Report("intent", {}, model=BUNDLED, seed=setup.seed, runs=1, threads=setup.threads)
    else:
        bench = IntentBench(setup, config, bar)
        bench.run()
        report = _report(bench) if bench.qps["on"] else _failed(bench)
    if add_accuracy is not None:
        add_accuracy(report, bar)
    return report


def _failed(bench: IntentBench) -> Report:
    """Return a report without figures: single requests failed already."""
    setup = bench.setup
    problems = list(dict.fromkeys(bench.problems))
    return Report("intent", {}, model=setup.label, seed=setup.seed, runs=0, threads=setup.threads, problems=problems)


def _report(bench: IntentBench) -> Report:
    """Return the report: medians over rounds and draws, in ms and requests per second."""
    setup, config = bench.setup, bench.config
    ttft = {side: _ttfts(records) for side, records in bench.unloaded.items()}
    tpot = {side: [1e3 * _p90(point, "tpot") for point in points] for side, points in bench.loaded.items()}
    stall = {side: [1e3 * _p90(point, "longest_gap") for point in points] for side, points in bench.loaded.items()}
    values: dict[str, Any] = {
        **_pair("ttft_{}_ms", ttft),
        "ttft_ratio": _ratio(median(ttft["off"]), median(ttft["on"])),
        **_pair("tpot_p90_{}_ms", tpot),
        "tpot_p90_ratio": _ratio(median(tpot["off"]), median(tpot["on"])),
        **_pair("stall_p90_{}_ms", stall),
        "load_rate_qps": bench.load_rate,
        **_pair("qps_{}", bench.qps),
        "qps_ratio": _ratio(median(bench.qps["on"]), median(bench.qps["off"])),
        "limit_ms": 1e3 * bench.limit,
        **{f"unloaded_{side}_ms": 1e3 * bench.latency(side) for side in ("off", "on")},
        "cached_share_load": summarize(bench.unloaded["on"]).cached_share,
        "points": [_point_values(point) for side in ("off", "on") for point in bench.searched[side]],
    }
    report = Report(
        "intent",
        values,
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=bench.info.threads,
        spread={
            **{f"ttft_{side}_ms": spread(found) for side, found in ttft.items()},
            **{f"tpot_p90_{side}_ms": spread(found) for side, found in tpot.items()},
            **{f"qps_{side}": spread(found) for side, found in bench.qps.items()},
        },
        setup={
            "shared_tokens": config.shape.shared,
            "own_tokens": config.shape.own,
            "output_tokens": config.shape.output,
            "unloaded_requests": config.runs * config.requests,
            "draws": config.draws,
            "seconds_per_point": config.seconds,
            "min_requests_per_point": config.min_requests,
            "limit_factor": config.limit_factor,
            "search_precision": config.precision,
            "kv_blocks": NUM_BLOCKS,
            **describe(bench.info),
        },
        contention=bench.log.as_dict(),
        problems=list(dict.fromkeys(bench.problems)),
    )
    report.sheets += [_figures(report), _points(bench)]
    if any(bench.searched.values()):
        report.charts.append(_chart(bench))
    return report


def _pair(key: str, found: dict[str, list[float]]) -> Pair:
    return {key.format(side): median(values) for side, values in found.items()}


def _ratio(above: float, below: float) -> float | None:
    """Return the ratio, or None for a zero divisor: no rate held."""
    return above / below if below else None


def _ttfts(records: list[RequestRecord]) -> list[float]:
    return [1e3 * record.ttft for record in records if record.ttft is not None]


def _p90(point: IntentPoint, field: str) -> float:
    found = getattr(point.summary, field)
    return found.p90 if found is not None else float("nan")


def _point_values(point: IntentPoint) -> dict[str, Any]:
    e2e = point.summary.e2e
    return {
        "side": point.side,
        "draw": point.draw,
        "qps": point.rate,
        "requests": point.requests,
        "finished": point.summary.requests - point.summary.errors,
        "e2e_p50_ms": 1e3 * e2e.p50 if e2e else None,
        "e2e_p90_ms": 1e3 * e2e.p90 if e2e and not point.given_up else None,
        "tpot_p90_ms": 1e3 * _p90(point, "tpot"),
        "holds": point.holds,
        "given_up": point.given_up,
    }


def _figures(report: Report) -> Sheet:
    setup, values = report.setup, report.values
    load = f"at {values['load_rate_qps']:.2f} requests/s"
    rows = (
        ("time to first token, alone, ms", "ttft_{}_ms", "ttft_ratio"),
        (f"time per output token p90, {load}, ms", "tpot_p90_{}_ms", "tpot_p90_ratio"),
        (f"longest wait between tokens p90, {load}, ms", "stall_p90_{}_ms", ""),
        (f"highest requests/s, p90 latency <= {values['limit_ms']:.0f} ms", "qps_{}", "qps_ratio"),
        ("latency, alone, ms", "unloaded_{}_ms", ""),
    )
    return Sheet(
        f"{setup['shared_tokens']} shared + {setup['own_tokens']} own tokens in, {setup['output_tokens']} out",
        ("figure", "caching off", "caching on", "ratio"),
        tuple((name, values[key.format("off")], values[key.format("on")], values.get(r)) for name, key, r in rows),
    )


def _points(bench: IntentBench) -> Sheet:
    points = sorted(
        (point for found in bench.searched.values() for point in found), key=lambda point: (point.side, point.rate)
    )
    rows = tuple(
        (point.side, point.rate, point.requests, _e2e_text(point), "yes" if point.holds else "no") for point in points
    )
    alone = tuple(
        (name, "alone", len(found), f"{1e3 * bench.latency(name):.0f} (median)", "no")
        for name, found in bench.unloaded.items()
        if bench.misses_alone(name)
    )
    return Sheet("points of the search", ("caching", "requests/s", "requests", "latency p90 ms", "holds"), alone + rows)


def _e2e_text(point: IntentPoint) -> str:
    if point.given_up or point.summary.e2e is None:
        return "given up: sure to miss"
    return f"{1e3 * point.summary.e2e.p90:.0f}"


def _chart(bench: IntentBench) -> Chart:
    """Return the chart of p90 latency by rate, for every point that was not ended early."""
    found = {
        (side, point.rate): 1e3 * point.summary.e2e.p90
        for side, points in bench.searched.items()
        for point in points
        if point.summary.e2e is not None and not point.given_up
    }
    rates = tuple(sorted({rate for _, rate in found}))
    series = {f"caching {side}": tuple(found.get((side, rate)) for rate in rates) for side in bench.searched}
    series["limit"] = tuple(1e3 * bench.limit for _ in rates)
    return Chart("Intent recognition under load", "requests/s", "latency p90, ms", rates, series)
