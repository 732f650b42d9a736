"""Plans of the suite from the options of a verb: one plan per verb, for an engine in this process or a server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from headstart.bench.rate_report import Load
from headstart.bench.suite import Build
from headstart.core.errors import ConfigError
from headstart.measurement.report import BenchmarkReport, ReportChart
from headstart.reuse.log_report import lint_report
from headstart.reuse.logged_prompt import LoggedMessage, LoggedPrompt
from headstart.workload import scenarios
from headstart.workload.jobs import GREEDY, TokenSampling, jobs_from_prompts
from headstart.workload.scenarios import WorkloadPhase, WorkloadScenario
from headstart.workload.synthetic import RequestShape, poisson_arrivals
from headstart.workload.traces import Trace

PREFIXES = ("both", "shared", "distinct")


@dataclass(frozen=True, slots=True)
class SharedPrefixGroups:
    """The sizes of `shared-prefix`, and its arrivals: at a `rate`, with a fixed `concurrency`, or all at once (0)."""

    groups: int = 8
    prompts: int = 8  # per group
    shape: RequestShape = scenarios.GENERATED
    rate: float = 0.0  # requests per second, Poisson
    concurrency: int = 0

    def build_scenario(self, vocab_size: int, rng: Random) -> WorkloadScenario:
        """Return one repetition."""
        due = poisson_arrivals(self.rate, self.groups * self.prompts, rng) if self.rate else None
        return scenarios.shared_prefix_scenario(
            vocab_size,
            rng,
            groups=self.groups,
            prompts=self.prompts,
            shape=self.shape,
            due=due,
            concurrency=self.concurrency,
        )

    @property
    def load_scenario_builder(self) -> Load:
        """Return the same groups for any number of requests; `prompts` is ignored."""

        def build(vocab_size: int, rng: Random, due: Sequence[float]) -> WorkloadScenario:
            each = -(-len(due) // self.groups)
            found = scenarios.shared_prefix_scenario(
                vocab_size, rng, groups=self.groups, prompts=each, shape=self.shape
            )
            jobs = found.phases[0].jobs[: len(due)]
            again = jobs_from_prompts([job.prompt for job in jobs], self.shape.output, due)
            return WorkloadScenario(found.name, (WorkloadPhase("load", tuple(again)),))

        return build

    @property
    def setup_facts(self) -> dict[str, Any]:
        loop = f"open, {self.rate:g} requests/s" if self.rate else f"closed, {self.concurrency} at a time"
        return {
            "loop": loop if self.rate or self.concurrency else "all at once",
            "groups": self.groups,
            "prompts_per_group": self.prompts,
            "shared_tokens": self.shape.shared,
            "own_tokens": self.shape.own,
            "output_tokens": self.shape.output,
        }


def parse_rate(text: str) -> float | None:
    """Return requests per second; 0 for an empty text, None for `search`. Raises ConfigError."""
    if text == "search":
        return None
    try:
        rate = float(text or 0)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf"):
        raise ConfigError(f"--rate {text!r} is no rate; write requests per second, such as 2.5, or: search")
    return rate


def decode_scenario_builder(
    prefixes: str, streams: int, shape: RequestShape, sampling: TokenSampling = GREEDY
) -> Build:
    """Return the scenario of streams behind one cached prefix, then behind one prefix each. Raises ConfigError."""
    if sampling.temperature == 0 and sampling != GREEDY:
        raise ConfigError("--top-p and --top-k do nothing at temperature 0: add --temperature 1")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"--top-p {sampling.top_p} is outside (0, 1]")
    if prefixes not in PREFIXES:
        raise ConfigError(f"--prefixes {prefixes!r} is unknown; use {', '.join(PREFIXES)}")
    kinds = [is_shared for is_shared in (True, False) if prefixes in ("both", "shared" if is_shared else "distinct")]

    def build(vocab_size: int, rng: Random) -> WorkloadScenario:
        parts = [
            scenarios.concurrent_decode_scenario(
                vocab_size, rng, is_shared=kind, streams=streams, shape=shape, sampling=sampling
            )
            for kind in kinds
        ]
        return WorkloadScenario("decode", tuple(phase for part in parts for phase in part.phases))

    return build


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return `128,1000` as (128, 1000). Raises ConfigError."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 1 for part in parts):
        raise ConfigError(f"--lengths {text!r} are no lengths; write tokens, two or more each, such as 128,1000")
    return tuple(int(part) for part in parts)


def prefill_scenario_builder(lengths: Sequence[int], cached_share: float, requests: int) -> Build:
    """Return the scenario of prompts of each length, cold and with a cached beginning, one at a time."""

    def build(vocab_size: int, rng: Random) -> WorkloadScenario:
        return scenarios.prefill_scenario(
            vocab_size, rng, lengths=lengths, cached_share=cached_share, requests=requests
        )

    return build


def add_ttft_by_length_chart(report: BenchmarkReport, lengths: Sequence[int]) -> BenchmarkReport:
    """Return the report of `prefill` with one chart: time to the first token by length."""
    phases = report.values["phases"]
    series: dict[str, tuple[float | None, ...]] = {
        kind: tuple((phases[f"{kind} {length}"]["ttft_ms"] or {}).get("p50") for length in lengths)
        for kind in ("cold", "warm")
    }
    report.charts = [ReportChart("time to the first token", "prompt tokens", "ms (median)", tuple(lengths), series)]
    return report


def rotations_scenario_builder(count: int, length: int, passes: int) -> Build:
    def build(vocab_size: int, rng: Random) -> WorkloadScenario:
        return scenarios.token_rotations_scenario(vocab_size, rng, count=count, length=length, passes=passes)

    return build


def avoidable_prompt_token_share(trace: Trace) -> float | None:
    """Return the share of a trace's prompt tokens that other prompts with the same text would have spared.

    It is that of `headstart lint`, with an infinite cache. None: the trace has lengths and hashes, but no text.
    """
    texts = [request.text for request in trace.requests if request.text]
    if not texts:
        return None
    prompts = [LoggedPrompt(line, (), (LoggedMessage("user", text),)) for line, text in enumerate(texts, 1)]
    return round(lint_report(prompts).avoidable_share, 4)


def describe_loop(trace: Trace, concurrency: int) -> str:
    """Return the words for the loop in which `replay` sends a trace."""
    if concurrency:
        return f"closed, {concurrency} at a time"
    if any(request.after for request in trace.requests):
        return "closed, each request a recorded pause after the answers that it needs"
    return "open, as recorded"


def trace_scenario_builder(trace: Trace, *, speed: float, factor: float, concurrency: int) -> Build:
    """Return the scenario of a trace's requests: when they came, after the answers they need, or so many at a time."""

    def build(vocab_size: int, rng: Random) -> WorkloadScenario:
        jobs = trace.to_jobs(vocab_size, rng.getrandbits(64), factor=factor, speed=speed)
        if concurrency:
            jobs = [replace(job, after=()) for job in jobs]
        return WorkloadScenario("trace", (WorkloadPhase(trace.kind, tuple(jobs), concurrency),))

    return build
