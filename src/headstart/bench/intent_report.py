"""The intent-recognition workload of PrefixCacheManager (blog): two engines of one model, prefix caching off and on.

Both run in this process in real time and get the same prompts and the same arrival draws. Unloaded latencies come from
requests sent one at a time, off and on in turn; then come Poisson arrivals. The laboratory checks the answers.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Any

from headstart.bench.rate_report import LEAST_LOAD, START_LOAD, search_highest_rate
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.request import SamplingParams
from headstart.measurement.inprocess import RunResult, requests_from_prompts, run_requests
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import BUNDLED, EngineSetup, describe_engine
from headstart.workload.request_record import RequestRecord, Summary, median, percentile, summarize_records
from headstart.workload.slo import LatenessEarlyStop, Slo
from headstart.workload.synthetic import INTENT, RequestShape, prompts_with_prefix, random_tokens, unit_poisson_arrivals

AddAccuracy = Callable[[BenchmarkReport, ProgressBar], None]
"""Measures the bundled model's answers, and adds its figures, problems and table to a report."""
Pair = dict[str, Any]  # side ("off", "on") -> figure
NUM_BLOCKS = 4224
"""KV blocks of each engine: 64 requests in flight, even if each one holds its own copy of the prefix."""


@dataclass(frozen=True, slots=True)
class IntentConfig:
    """Parameters of the experiment."""

    shape: RequestShape = INTENT
    runs: int = 3  # rounds of unloaded requests
    requests: int = 8  # per round and side
    draws: int = 1  # Poisson draws, each with its own search
    seconds: float = 10.0  # of arrivals per point, at least
    min_requests: int = 20  # per point, at least
    precision: float = 1.1  # of the search
    limit_factor: float = 4.0  # p90 latency allowed / unloaded latency with caching on
    comparison_rate: float | None = (
        None  # where time per output token is compared; None: 0.8 / unloaded latency, caching off
    )


QUICK = IntentConfig(runs=2, requests=4, seconds=5.0, min_requests=10, precision=1.3)


@dataclass(slots=True)
class CachingVariant:
    """One engine, caching off or on, with its own stream of new prompts: the two streams are equal."""

    name: str
    engine: Engine
    prefix: "array[int]"
    vocab_size: int
    shape: RequestShape
    rng: Random
    served: int = 0

    def run(
        self, count: int, *, bar: ProgressBar = QUIET, due: list[float] | None = None, limit: float | None = None
    ) -> RunResult:
        """Serve `count` new requests. Ends early once the p90 latency is certain to exceed `limit` seconds."""
        prompts = prompts_with_prefix(self.prefix, count, self.shape.own, self.vocab_size, self.rng)
        sampling = SamplingParams(max_tokens=self.shape.output, temperature=0.0)
        requests = requests_from_prompts(prompts, sampling, f"{self.name}{self.served}")
        self.served += count
        watch = None if limit is None else LatenessEarlyStop(count, Slo(e2e=limit))
        return run_requests(self.engine, requests, due=due, bar=bar, give_up=watch)


@dataclass(frozen=True, slots=True)
class IntentRatePoint:
    """One side at one rate of one draw."""

    side: str
    draw: int
    rate: float
    requests: int
    holds: bool
    given_up: bool  # certain to miss the limit, so ended early: the figures are those of the finished requests
    summary: Summary


def _by_side() -> dict[str, list[IntentRatePoint]]:
    return {"off": [], "on": []}


class IntentRecognitionBench:
    """A running experiment. After `run()` its fields hold all measurements."""

    def __init__(self, setup: EngineSetup, config: IntentConfig, bar: ProgressBar) -> None:
        self.setup, self.config, self.bar = setup, config, bar
        self.log = ContentionLog.empty()
        self.problems: list[str] = []
        self.unloaded: dict[str, list[RequestRecord]] = {"off": [], "on": []}
        self.loaded: dict[str, list[IntentRatePoint]] = _by_side()  # at comparison_rate
        self.searched: dict[str, list[IntentRatePoint]] = _by_side()
        self.qps: dict[str, list[float]] = {"off": [], "on": []}  # one per draw
        bar.start_stage("loading the model twice", None)
        engines = {
            name: setup.build(setup.options(num_blocks=NUM_BLOCKS, caching=name == "on")) for name in ("off", "on")
        }
        self.info: EngineInfo = engines["on"][1]
        prefix = random_tokens(config.shape.shared, self.info.vocab_size, Random(f"{setup.seed}/prefix"))
        self.sides = {
            name: CachingVariant(name, engine, prefix, info.vocab_size, config.shape, Random(f"{setup.seed}/own"))
            for name, (engine, info) in engines.items()
        }

    def measure_all(self) -> None:
        """Measure everything, which takes some minutes. Stops after the unloaded requests if those fail."""
        self._measure_unloaded()
        if self.problems:
            return
        for draw in range(self.config.draws):
            for name in self.sides:
                self.loaded[name].append(self._measure_point(name, self.comparison_request_rate, draw))
            for name in self.sides:
                self.qps[name].append(self._search(name, draw))

    def median_unloaded_latency(self, side: str) -> float:
        """Return the median seconds of an unloaded request."""
        return median(e2e_latencies(self.unloaded[side]))

    @property
    def p90_latency_limit(self) -> float:
        """Return the p90 latency allowed, in seconds: one limit for both sides."""
        return self.config.limit_factor * self.median_unloaded_latency("on")

    @property
    def comparison_request_rate(self) -> float:
        """Return the requests per second at which both sides' time per output token is compared."""
        return self.config.comparison_rate or 0.8 / self.median_unloaded_latency("off")

    def _measure_unloaded(self) -> None:
        """Serve requests one at a time, off and on in turn; the first two of each side warm up and fill the cache."""
        for side in self.sides.values():
            side.run(1)
            side.run(1)

        def one_round() -> list[tuple[str, RunResult]]:
            self.bar.start_stage("one request at a time, caching off and on in turn", 2 * self.config.requests)
            turns = [name for _ in range(self.config.requests) for name in self.sides]
            return [(name, self.sides[name].run(1, bar=self.bar)) for name in turns]

        for _ in range(self.config.runs):
            for name, run in measure_uncontended(one_round, self.log):
                self._check(run, name, "unloaded")
                self.unloaded[name] += run.records

    def unloaded_latency_exceeds_limit(self, name: str) -> bool:
        """Return whether unloaded requests of the side exceed the limit, so that no rate can hold."""
        return self.median_unloaded_latency(name) > self.p90_latency_limit

    def _search(self, name: str, draw: int) -> float:
        """Return the highest rate of one draw at which the side's p90 latency is within the limit; 0 if none is."""
        if self.unloaded_latency_exceeds_limit(name):
            return 0.0

        def holds(rate: float) -> bool:
            point = self._measure_point(name, rate, draw, limit=self.p90_latency_limit)
            self.searched[name].append(point)
            return point.holds

        earlier = self.qps[name][-1] if self.qps[name] else 0.0
        alone = self.median_unloaded_latency(name)
        return search_highest_rate(
            holds, earlier or START_LOAD / alone, precision=self.config.precision, least=LEAST_LOAD / alone
        )

    def _measure_point(self, name: str, rate: float, draw: int, *, limit: float | None = None) -> IntentRatePoint:
        """Measure one side under Poisson arrivals. Both sides and all rates use the same draw, scaled in time."""
        count = max(self.config.min_requests, ceil(rate * self.config.seconds))
        arrivals = unit_poisson_arrivals(count, Random(f"{self.setup.seed}/arrivals/{draw}"))
        due = [time / rate for time in arrivals]

        def measure() -> RunResult:
            self.bar.start_stage(f"caching {name}, {rate:.2f} requests/s", count)
            return self.sides[name].run(count, bar=self.bar, due=due, limit=limit)

        run = measure_uncontended(measure, self.log)
        self._check(run, name, f"{rate:.2f} requests/s")
        whole = not run.given_up and not run.errors
        holds = whole and percentile(e2e_latencies(run.records), 90) <= self.p90_latency_limit
        return IntentRatePoint(name, draw, rate, count, holds, run.given_up, summarize_records(run.records))

    def _check(self, run: RunResult, name: str, label: str) -> None:
        """Record every problem that invalidates the figures."""
        label = f"caching {name}, {label}"
        self.problems += run.problems(label)
        if name == "off" and any(record.cached_tokens for record in run.records):
            self.problems.append(f"{label}: the engine without caching reports cached tokens")
        wrong = {len(tokens) for tokens in run.outputs} - {self.config.shape.output}
        if wrong and not run.errors:
            self.problems.append(f"{label}: outputs of {sorted(wrong)} tokens instead of {self.config.shape.output}")


def e2e_latencies(records: list[RequestRecord]) -> list[float]:
    """Return the end-to-end seconds of the successful requests."""
    return [record.e2e for record in records if record.e2e is not None]


def run_intent(
    setup: EngineSetup,
    config: IntentConfig | None,
    bar: ProgressBar = QUIET,
    *,
    add_accuracy: AddAccuracy | None = None,
) -> BenchmarkReport:
    """Measure load on `setup`'s model if `config` is given, and the bundled one's answers by `add_accuracy`."""
    if config is None:
        report = BenchmarkReport("intent", {}, model=BUNDLED, seed=setup.seed, runs=1, threads=setup.threads)
    else:
        bench = IntentRecognitionBench(setup, config, bar)
        bench.measure_all()
        report = _report(bench) if bench.qps["on"] else _failed(bench)
    if add_accuracy is not None:
        add_accuracy(report, bar)
    return report


def _failed(bench: IntentRecognitionBench) -> BenchmarkReport:
    """Return a report without figures: single requests failed already."""
    setup = bench.setup
    problems = list(dict.fromkeys(bench.problems))
    return BenchmarkReport(
        "intent", {}, model=setup.label, seed=setup.seed, runs=0, threads=setup.threads, problems=problems
    )


def _report(bench: IntentRecognitionBench) -> BenchmarkReport:
    """Return the report: medians over rounds and draws, in ms and requests per second."""
    setup, config = bench.setup, bench.config
    ttft = {side: [1e3 * one.ttft for one in of if one.ttft is not None] for side, of in bench.unloaded.items()}
    tpot = {side: [1e3 * _p90(point, "tpot") for point in points] for side, points in bench.loaded.items()}
    stall = {side: [1e3 * _p90(point, "longest_gap") for point in points] for side, points in bench.loaded.items()}
    values: dict[str, Any] = {
        **_pair("ttft_{}_ms", ttft),
        "ttft_ratio": _ratio(median(ttft["off"]), median(ttft["on"])),
        **_pair("tpot_p90_{}_ms", tpot),
        "tpot_p90_ratio": _ratio(median(tpot["off"]), median(tpot["on"])),
        **_pair("stall_p90_{}_ms", stall),
        "load_rate_qps": bench.comparison_request_rate,
        **_pair("qps_{}", bench.qps),
        "qps_ratio": _ratio(median(bench.qps["on"]), median(bench.qps["off"])),
        "limit_ms": 1e3 * bench.p90_latency_limit,
        **{f"unloaded_{side}_ms": 1e3 * bench.median_unloaded_latency(side) for side in ("off", "on")},
        "cached_share_load": summarize_records(bench.unloaded["on"]).cached_share,
        "points": [_point_values(point) for side in ("off", "on") for point in bench.searched[side]],
    }
    report = BenchmarkReport(
        "intent",
        values,
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=bench.info.threads,
        spread={
            **{f"ttft_{side}_ms": min_and_max(found) for side, found in ttft.items()},
            **{f"tpot_p90_{side}_ms": min_and_max(found) for side, found in tpot.items()},
            **{f"qps_{side}": min_and_max(found) for side, found in bench.qps.items()},
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
            **describe_engine(bench.info),
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


def _p90(point: IntentRatePoint, field: str) -> float:
    found = getattr(point.summary, field)
    return found.p90 if found is not None else float("nan")


def _point_values(point: IntentRatePoint) -> dict[str, Any]:
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


def _figures(report: BenchmarkReport) -> ReportTable:
    setup, values = report.setup, report.values
    load = f"at {values['load_rate_qps']:.2f} requests/s"
    rows = (
        ("time to first token, alone, ms", "ttft_{}_ms", "ttft_ratio"),
        (f"time per output token p90, {load}, ms", "tpot_p90_{}_ms", "tpot_p90_ratio"),
        (f"longest wait between tokens p90, {load}, ms", "stall_p90_{}_ms", ""),
        (f"highest requests/s, p90 latency <= {values['limit_ms']:.0f} ms", "qps_{}", "qps_ratio"),
        ("latency, alone, ms", "unloaded_{}_ms", ""),
    )
    return ReportTable(
        f"{setup['shared_tokens']} shared + {setup['own_tokens']} own tokens in, {setup['output_tokens']} out",
        ("figure", "caching off", "caching on", "ratio"),
        tuple((name, values[key.format("off")], values[key.format("on")], values.get(r)) for name, key, r in rows),
    )


def _points(bench: IntentRecognitionBench) -> ReportTable:
    points = sorted(
        (point for found in bench.searched.values() for point in found), key=lambda point: (point.side, point.rate)
    )
    rows = tuple(
        (point.side, point.rate, point.requests, _e2e_text(point), "yes" if point.holds else "no") for point in points
    )
    alone = tuple(
        (name, "alone", len(found), f"{1e3 * bench.median_unloaded_latency(name):.0f} (median)", "no")
        for name, found in bench.unloaded.items()
        if bench.unloaded_latency_exceeds_limit(name)
    )
    return ReportTable(
        "points of the search", ("caching", "requests/s", "requests", "latency p90 ms", "holds"), alone + rows
    )


def _e2e_text(point: IntentRatePoint) -> str:
    if point.given_up or point.summary.e2e is None:
        return "given up: sure to miss"
    return f"{1e3 * point.summary.e2e.p90:.0f}"


def _chart(bench: IntentRecognitionBench) -> ReportChart:
    """Return the chart of p90 latency by rate, for every point that was not ended early."""
    found = {
        (side, point.rate): 1e3 * point.summary.e2e.p90
        for side, points in bench.searched.items()
        for point in points
        if point.summary.e2e is not None and not point.given_up
    }
    rates = tuple(sorted({rate for _, rate in found}))
    series = {f"caching {side}": tuple(found.get((side, rate)) for rate in rates) for side in bench.searched}
    series["limit"] = tuple(1e3 * bench.p90_latency_limit for _ in rates)
    return ReportChart("Intent recognition under load", "requests/s", "latency p90, ms", rates, series)
