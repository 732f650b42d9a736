"""The intent-recognition workload of PrefixCacheManager (blog): two engines of one model, prefix caching off and on.

Both run in this process in real time and get the same prompts and the same arrival draws. Unloaded latencies come from
requests sent one at a time, off and on in turn; then come Poisson arrivals. `intent_report.py` makes the report.
"""

from array import array
from dataclasses import dataclass
from math import ceil
from random import Random

from headstart.bench.load_search import LEAST_LOAD, START_LOAD, highest_rate
from headstart.core.engine import Engine, EngineInfo
from headstart.core.request import SamplingParams
from headstart.measurement.engines import Setup
from headstart.measurement.inprocess import Run, drive, make_requests
from headstart.measurement.machine import ContentionLog, uncontended
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.workload.request_record import RequestRecord, Summary, median, percentile, summarize
from headstart.workload.slo import Slo, TooManyLate
from headstart.workload.synthetic import INTENT, Shape, random_tokens, unit_arrivals, with_prefix

NUM_BLOCKS = 4224
"""KV blocks of each engine: 64 requests in flight, even if each one holds its own copy of the prefix."""


@dataclass(frozen=True, slots=True)
class IntentConfig:
    """Parameters of the experiment."""

    shape: Shape = INTENT
    runs: int = 3  # rounds of unloaded requests
    requests: int = 8  # per round and side
    draws: int = 1  # Poisson draws, each with its own search
    seconds: float = 10.0  # of arrivals per point, at least
    min_requests: int = 20  # per point, at least
    precision: float = 1.1  # of the search
    limit_factor: float = 4.0  # p90 latency allowed / unloaded latency with caching on
    load_rate: float | None = None  # where time per output token is compared; None: 0.8 / unloaded latency, caching off


QUICK = IntentConfig(runs=2, requests=4, seconds=5.0, min_requests=10, precision=1.3)


@dataclass(slots=True)
class Side:
    """One engine, caching off or on, with its own stream of new prompts: the two streams are equal."""

    name: str
    engine: Engine
    prefix: "array[int]"
    vocab_size: int
    shape: Shape
    rng: Random
    served: int = 0

    def run(self, count: int, *, bar: Bar = QUIET, due: list[float] | None = None, limit: float | None = None) -> Run:
        """Serve `count` new requests. Ends early once the p90 latency is certain to exceed `limit` seconds."""
        prompts = with_prefix(self.prefix, count, self.shape.own, self.vocab_size, self.rng)
        sampling = SamplingParams(max_tokens=self.shape.output, temperature=0.0)
        requests = make_requests(prompts, sampling, f"{self.name}{self.served}")
        self.served += count
        watch = None if limit is None else TooManyLate(count, Slo(e2e=limit))
        return drive(self.engine, requests, due=due, bar=bar, give_up=watch)


@dataclass(frozen=True, slots=True)
class IntentPoint:
    """One side at one rate of one draw."""

    side: str
    draw: int
    rate: float
    requests: int
    holds: bool
    given_up: bool  # certain to miss the limit, so ended early: the figures are those of the finished requests
    summary: Summary


def _by_side() -> dict[str, list[IntentPoint]]:
    return {"off": [], "on": []}


class IntentBench:
    """A running experiment. After `run()` its fields hold all measurements."""

    def __init__(self, setup: Setup, config: IntentConfig, bar: Bar) -> None:
        self.setup, self.config, self.bar = setup, config, bar
        self.log = ContentionLog.new()
        self.problems: list[str] = []
        self.unloaded: dict[str, list[RequestRecord]] = {"off": [], "on": []}
        self.loaded: dict[str, list[IntentPoint]] = _by_side()  # at load_rate
        self.searched: dict[str, list[IntentPoint]] = _by_side()
        self.qps: dict[str, list[float]] = {"off": [], "on": []}  # one per draw
        bar.stage("loading the model twice", None)
        engines = {name: self._build(caching=name == "on") for name in ("off", "on")}
        self.info: EngineInfo = engines["on"][1]
        prefix = random_tokens(config.shape.shared, self.info.vocab_size, Random(f"{setup.seed}/prefix"))
        self.sides = {
            name: Side(name, engine, prefix, info.vocab_size, config.shape, Random(f"{setup.seed}/own"))
            for name, (engine, info) in engines.items()
        }

    def run(self) -> None:
        """Measure everything, which takes some minutes. Stops after the unloaded requests if those fail."""
        self._measure_unloaded()
        if self.problems:
            return
        for draw in range(self.config.draws):
            for name in self.sides:
                self.loaded[name].append(self._measure_point(name, self.load_rate, draw))
            for name in self.sides:
                self.qps[name].append(self._search(name, draw))

    def latency(self, side: str) -> float:
        """Return the median seconds of an unloaded request."""
        return median(latencies(self.unloaded[side]))

    @property
    def limit(self) -> float:
        """Return the p90 latency allowed, in seconds: one limit for both sides."""
        return self.config.limit_factor * self.latency("on")

    @property
    def load_rate(self) -> float:
        """Return the requests per second at which both sides' time per output token is compared."""
        return self.config.load_rate or 0.8 / self.latency("off")

    def _build(self, *, caching: bool) -> tuple[Engine, EngineInfo]:
        return self.setup.build(self.setup.options(num_blocks=NUM_BLOCKS, caching=caching))

    def _measure_unloaded(self) -> None:
        """Serve requests one at a time, off and on in turn; the first two of each side warm up and fill the cache."""
        for side in self.sides.values():
            side.run(1)
            side.run(1)

        def one_round() -> list[tuple[str, Run]]:
            self.bar.stage("one request at a time, caching off and on in turn", 2 * self.config.requests)
            turns = [name for _ in range(self.config.requests) for name in self.sides]
            return [(name, self.sides[name].run(1, bar=self.bar)) for name in turns]

        for _ in range(self.config.runs):
            for name, run in uncontended(one_round, self.log):
                self._check(run, name, "unloaded")
                self.unloaded[name] += run.records

    def misses_alone(self, name: str) -> bool:
        """Return whether unloaded requests of the side exceed the limit, so that no rate can hold."""
        return self.latency(name) > self.limit

    def _search(self, name: str, draw: int) -> float:
        """Return the highest rate of one draw at which the side's p90 latency is within the limit; 0 if none is."""
        if self.misses_alone(name):
            return 0.0

        def holds(rate: float) -> bool:
            point = self._measure_point(name, rate, draw, limit=self.limit)
            self.searched[name].append(point)
            return point.holds

        earlier = self.qps[name][-1] if self.qps[name] else 0.0
        alone = self.latency(name)
        return highest_rate(
            holds, earlier or START_LOAD / alone, precision=self.config.precision, least=LEAST_LOAD / alone
        )

    def _measure_point(self, name: str, rate: float, draw: int, *, limit: float | None = None) -> IntentPoint:
        """Measure one side under Poisson arrivals. Both sides and all rates use the same draw, scaled in time."""
        count = max(self.config.min_requests, ceil(rate * self.config.seconds))
        arrivals = unit_arrivals(count, Random(f"{self.setup.seed}/arrivals/{draw}"))
        due = [time / rate for time in arrivals]

        def measure() -> Run:
            self.bar.stage(f"caching {name}, {rate:.2f} requests/s", count)
            return self.sides[name].run(count, bar=self.bar, due=due, limit=limit)

        run = uncontended(measure, self.log)
        self._check(run, name, f"{rate:.2f} requests/s")
        whole = not run.given_up and not run.errors
        holds = whole and percentile(latencies(run.records), 90) <= self.limit
        return IntentPoint(name, draw, rate, count, holds, run.given_up, summarize(run.records))

    def _check(self, run: Run, name: str, label: str) -> None:
        """Record every problem that invalidates the figures."""
        label = f"caching {name}, {label}"
        self.problems += run.problems(label)
        if name == "off" and any(record.cached_tokens for record in run.records):
            self.problems.append(f"{label}: the engine without caching reports cached tokens")
        wrong = {len(tokens) for tokens in run.outputs} - {self.config.shape.output}
        if wrong and not run.errors:
            self.problems.append(f"{label}: outputs of {sorted(wrong)} tokens instead of {self.config.shape.output}")


def latencies(records: list[RequestRecord]) -> list[float]:
    """Return the end-to-end seconds of the successful requests."""
    return [record.e2e for record in records if record.e2e is not None]
