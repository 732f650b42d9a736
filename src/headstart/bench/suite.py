"""The suite: a workload served several times by one runner, and its report.

Each repetition has its own prompts. Times are medians over the repetitions; percentiles are over all requests of all
repetitions; redundancy, computed by the client, is reported beside the time to the first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headstart.bench.measure import PhaseResult, ScenarioResult, measure_scenario
from headstart.core.errors import ConfigError
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import JobRunner
from headstart.workload.request_record import Percentiles, RequestRecord, Summary, median, percentile, summarize_records
from headstart.workload.scenarios import WorkloadScenario
from headstart.workload.slo import Slo

Build = Callable[[int, Random], WorkloadScenario]  # (vocabulary size, rng) -> one repetition
SHARES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
NO_LIMITS = Slo()


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """The workload, the number of repetitions and the latency limits."""

    name: str
    build: Build
    seed: int = 0
    runs: int = 1
    slo: Slo = NO_LIMITS
    is_guarded: bool = True  # repeat runs disturbed by other processes; False if the server is one of these processes
    setup: dict[str, Any] = field(default_factory=dict[str, Any])  # sizes, for the report


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase over all repetitions."""

    name: str
    results: tuple[PhaseResult, ...]

    @property
    def records(self) -> list[RequestRecord]:
        return [record for result in self.results for record in result.trial.records]

    @property
    def seconds_per_repetition(self) -> list[float]:
        return [result.trial.seconds for result in self.results]

    @property
    def concurrent_decode_rates(self) -> list[float]:
        """Return the decode rates; empty unless all jobs start at once, so that all decode together for a while."""
        if any(result.phase.concurrency or any(job.at for job in result.phase.jobs) for result in self.results):
            return []
        return [rate for result in self.results if (rate := result.trial.concurrent_decode_rate) is not None]

    @property
    def most_redundant_result(self) -> PhaseResult:
        """Return the repetition with the highest redundancy."""
        return max(self.results, key=lambda result: result.redundancy_factor or 0.0)

    def json_fields(self, slo: Slo) -> dict[str, Any]:
        """Return the keys of the JSON object; latencies in ms."""
        summary, worst = summarize_records(self.records), self.most_redundant_result
        seconds, each = median(self.seconds_per_repetition), len(self.results)
        reported = all(result.trial.reports_cached for result in self.results)
        found: dict[str, Any] = {
            "requests": summary.requests,
            "errors": summary.errors,
            "seconds": seconds,
            "request_rate": (summary.requests - summary.errors) / each / seconds if seconds else None,
            "output_tokens_per_s": summary.output_tokens / each / seconds if seconds else None,
            "decode_tokens_per_s": median(self.concurrent_decode_rates) if self.concurrent_decode_rates else None,
            "prompt_tokens": summary.prompt_tokens,
            "cached_tokens": summary.cached_tokens if reported else None,
            "cached_share": summary.cached_share if reported else None,
            "prefill_computed": worst.computed_prompt_tokens,
            "ideal": worst.ideal,
            "redundancy": worst.redundancy_factor,
            "reports_cached": reported,
            **{f"{name}_ms": percentiles_in_ms(values) for name, values in latency_distributions(summary).items()},
        }
        return found | (_goodput(self, slo) if slo else {})


def run_suite(runner: JobRunner, plan: SuitePlan, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Serve the workload `plan.runs` times. Raises ConfigError for requests longer than the runner's context."""
    check_request_lengths(runner, plan.build(runner.vocab_size, Random(0)))
    log, found = ContentionLog.empty(), list[ScenarioResult]()
    for number in range(plan.runs):
        tries = 0

        def once(number: int = number) -> ScenarioResult:
            nonlocal tries
            tries += 1  # a repeated run also needs new prompts
            return measure_scenario(runner, plan.build(runner.vocab_size, Random(f"{plan.seed}/{number}/{tries}")), bar)

        found.append(measure_uncontended(once, log) if plan.is_guarded else once())
    report = suite_report(runner, plan, found)
    if plan.is_guarded:
        report.contention = log.as_dict()
    return report


def check_request_lengths(runner: JobRunner, scenario: WorkloadScenario) -> None:
    """Raise ConfigError if a request is longer than the runner's context, where that is known."""
    limit = runner.about.get("max_model_len")
    if limit is not None and scenario.longest > limit:
        raise ConfigError(
            f"{scenario.name}: a request of {scenario.longest} tokens, output included, does not fit the model's "
            f"context of {limit}; request shorter ones"
        )


def suite_report(runner: JobRunner, plan: SuitePlan, found: Sequence[ScenarioResult]) -> BenchmarkReport:
    """Return the report. Figures of the last phase are at the top level of the document, all phases under `phases`."""
    phases = group_results_by_phase(found)
    values = {phase.name: phase.json_fields(plan.slo) for phase in phases}
    last = phases[-1]
    report = BenchmarkReport(
        plan.name,
        {**values[last.name], "phases": values},
        model=runner.about.get("model"),
        seed=plan.seed,
        runs=plan.runs,
        threads=runner.about.get("settings", {}).get("threads"),
        spread={f"{phase.name}.seconds": min_and_max(phase.seconds_per_repetition) for phase in phases},
        setup={**plan.setup, **runner.about, "was_reset": all(one.was_reset for one in found)},
        problems=list(dict.fromkeys(problem for one in found for problem in one.problems)),
    )
    report.sheets += [speed_table(plan.name, values), redundancy_table(values), latency_table(values)]
    if plan.slo:
        report.sheets.append(_slo_sheet(plan.slo, values))
    report.charts += [tokens_chart(phases), latency_chart(last)]
    if all(found["decode_tokens_per_s"] for found in values.values()):
        report.charts.append(decode_chart(values))
    return report


def group_results_by_phase(found: Sequence[ScenarioResult]) -> list[PhaseFigures]:
    """Return the measured phases by name, in order; a phase that is served several times has several results."""
    results: dict[str, list[PhaseResult]] = {}
    for measured in found:
        for result in measured.phases:
            results.setdefault(result.phase.name, []).append(result)
    return [PhaseFigures(name, tuple(several)) for name, several in results.items()]


def speed_table(title: str, values: dict[str, dict[str, Any]]) -> ReportTable:
    """Return the speed table: one row per phase, medians over the repetitions."""
    keys = ("requests", "seconds", "request_rate", "output_tokens_per_s", "decode_tokens_per_s")
    columns = ("phase", "requests", "seconds", "requests/s", "tokens/s", "all decoding")
    return ReportTable(title, columns, tuple((name, *(found[key] for key in keys)) for name, found in values.items()))


def redundancy_table(values: dict[str, dict[str, Any]]) -> ReportTable:
    """Return the redundancy table: prompt tokens computed in the worst repetition, beside the median TTFT."""
    rows = tuple(
        (
            *(name, (found["ttft_ms"] or {}).get("p50")),
            *(found["prefill_computed"], found["ideal"], format_redundancy(found)),
        )
        for name, found in values.items()
    )
    columns = ("phase", "TTFT p50, ms", "prompt tokens computed", "least possible", "redundancy")
    return ReportTable("prefill redundancy, counted by the client", columns, rows)


def format_redundancy(found: dict[str, Any]) -> str | None:
    """Return the redundancy with two decimals, or "not reported" if the runner does not report cached tokens."""
    if found["redundancy"] is not None:
        return f"{found['redundancy']:.2f}"
    return None if found["reports_cached"] else "not reported"


def latency_table(values: dict[str, dict[str, Any]]) -> ReportTable:
    """Return the table of all latency distributions of all phases."""
    rows = tuple(
        (f"{name}: {key}", *found[f"{key}_ms"].values())
        for name, found in values.items()
        for key in ("ttft", "tpot", "e2e", "longest_gap")
        if found[f"{key}_ms"] is not None
    )
    return ReportTable("latencies, ms", ("phase", *Percentiles._fields), rows)


def latency_distributions(summary: Summary) -> dict[str, Percentiles | None]:
    return {"ttft": summary.ttft, "tpot": summary.tpot, "e2e": summary.e2e, "longest_gap": summary.longest_gap}


def percentiles_in_ms(found: Percentiles | None) -> dict[str, float] | None:
    return None if found is None else {name: 1e3 * value for name, value in found._asdict().items()}


def tokens_chart(phases: Sequence[PhaseFigures]) -> ReportChart:
    """Return the chart of prompt tokens per phase, in one repetition: sent, computed, and least possible."""
    worst = [phase.most_redundant_result for phase in phases]
    series: dict[str, tuple[float | None, ...]] = {
        "sent": tuple(sum(len(job.prompt) for job in result.phase.jobs) for result in worst),
        "computed": tuple(result.computed_prompt_tokens for result in worst),
        "least possible": tuple(result.ideal for result in worst),
    }
    return ReportChart("prompt tokens", "phase", "tokens", tuple(phase.name for phase in phases), series)


def decode_chart(values: dict[str, dict[str, Any]]) -> ReportChart:
    """Return the chart of tokens per second while all streams decode."""
    series = {"median": tuple(found["decode_tokens_per_s"] for found in values.values())}
    return ReportChart("decode", "phase", "tokens/s while all decode", tuple(values), series)


def latency_chart(phase: PhaseFigures) -> ReportChart:
    """Return the percentiles of the time to the first and to the last token."""
    known = {
        "first token": [record.ttft for record in phase.records if record.ok and record.ttft is not None],
        "last token": [record.e2e for record in phase.records if record.ok and record.e2e is not None],
    }
    series: dict[str, tuple[float | None, ...]] = {
        name: tuple(1e3 * percentile(found, share) if found else None for share in SHARES)
        for name, found in known.items()
    }
    return ReportChart(f"latency, {phase.name}", "percentile", "ms", SHARES, series)


def _goodput(phase: PhaseFigures, slo: Slo) -> dict[str, Any]:
    """Return goodput and SLO attainment. Goodput is per repetition: requests of different ones do not compete."""
    rates = [slo.goodput(result.trial.records) for result in phase.results]
    return {"goodput": median(rates), "slo_attained": slo.attainment(phase.records)}


def _slo_sheet(slo: Slo, values: dict[str, dict[str, Any]]) -> ReportTable:
    limits = ", ".join(f"{name} <= {1e3 * limit:g} ms" for name, limit in slo.limits)
    rows = tuple(
        (name, found["request_rate"], found["goodput"], found["slo_attained"]) for name, found in values.items()
    )
    return ReportTable(f"goodput: {limits}", ("phase", "requests/s", "of those within limits", "share within"), rows)
