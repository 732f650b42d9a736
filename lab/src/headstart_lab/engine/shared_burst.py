"""Experiment: twins, a burst behind one new prefix. It should be computed once, not once for each simultaneous request.

Released engines share it only within one step, or not at all where a prompt takes many steps. Forms: plain, under a
prefill cap (the prefix takes many steps), a tree of prompts, one prompt many times, and a leader that is aborted or
fails during the prefill that the others wait for.
"""

from array import array
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from headstart.core.batch import Batch, RowError, RowErrorKind, RowResult, StepResult
from headstart.core.cache.block_store import Data
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.executor import Executor
from headstart.core.request import CacheMode, Request, SamplingParams
from headstart.measurement.inprocess import RunResult, requests_from_prompts, run_requests
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.workload.request_record import median
from headstart_lab.engine.burst_forms import BLOCK_SIZE, LOSS_STEP, Form, check_form

MAX_REDUNDANCY = 1.02
COLUMNS = ("form", "prefill computed", "ideal", "redundancy", "steps", "seconds", "seconds, caching off")


def run_twins(
    setup: EngineSetup, forms: list[Form], *, runs: int = 3, baseline: bool = True, bar: ProgressBar = QUIET
) -> BenchmarkReport:
    """Measure bursts, each on its own engine, cold every time; with `baseline` also without any reuse."""
    forms = [check_form(form) for form in forms]
    log, results = ContentionLog.empty(), list[_Result]()
    known: dict[bytes, RunResult] = {}  # runs without reuse, by their prompts
    info: EngineInfo | None = None
    for form in forms:
        bar.start_stage(f"loading the model for {form.name}", None)
        options = setup.options(num_blocks=_pool_blocks(form))
        engine, info = setup.build(replace(options, long_prefill_token_threshold=form.cap))
        prompts = form.prompts(info.vocab_size, Random(setup.seed))
        result = _Result(form)
        if baseline:
            key = b"".join(prompt.tobytes() for prompt in prompts)
            if key not in known:
                known[key] = _run_without_reuse(engine, form, prompts, bar)
            result.off = known[key]
        for number in range(runs):
            bar.start_stage(f"{form.name} {number + 1}/{runs}", form.num_requests)
            result.add(measure_uncontended(lambda e=engine, f=form, p=prompts, n=number: _run(e, f, p, n, bar), log))
        results.append(result)
    assert info is not None, "no form to measure"
    return _report(setup, info, results, runs, log)


@dataclass(slots=True)
class _Result:
    """The results of one form."""

    form: Form
    runs: list[RunResult] = field(default_factory=list[RunResult])
    lost: list[int] = field(default_factory=list[int])
    off: RunResult | None = None  # the same prompts, every token computed

    def add(self, found: tuple[RunResult, int]) -> None:
        run, lost = found
        self.runs.append(run)
        self.lost.append(lost)

    def prefill(self, index: int) -> int:
        """Return the prompt tokens computed in one run: all except those computed by decodes."""
        run = self.runs[index]
        return run.computed_tokens - sum(record.output_tokens - 1 for record in run.records if record.ok)

    @property
    def worst(self) -> int:
        """Return the index of the run with the highest redundancy."""
        return max(range(len(self.runs)), key=self.redundancy)

    def redundancy(self, index: int) -> float:
        return self.prefill(index) / self.form.ideal_tokens(self.lost[index])

    @property
    def differing(self) -> int:
        """Return the number of first output tokens that differ from those without reuse, in all runs.

        Later tokens are not compared: where two logits are within rounding of each other, chunk sizes decide.
        """
        if self.off is None:
            return 0
        expected = [tokens[:1] for tokens in self.off.outputs]
        pairs = [pair for run in self.runs for pair in zip(run.records, run.outputs, strict=True)]
        return sum(record.ok and expected[_index(record.request_id)] != tokens[:1] for record, tokens in pairs)

    def values(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "prefill_computed": self.prefill(worst),
            "ideal": self.form.ideal_tokens(self.lost[worst]),
            "redundancy": self.redundancy(worst),
            "total_s": median(run.seconds for run in self.runs),
            "steps": len(self.runs[worst].steps),
            "off_s": self.off.seconds if self.off else None,
            "differing_tokens": self.differing,
        }

    def problems(self) -> list[str]:
        """Return the problems that invalidate the figures, and violated expectations."""
        name, expected = self.form.name, self.form.num_requests - bool(self.form.loss)
        problems: list[str] = []
        for index, run in enumerate(self.runs):
            finished = sum(record.ok for record in run.records)
            if finished != expected:
                problems.append(f"{name}: {finished} requests finished instead of {expected}, {len(run.errors)} failed")
            elif self.redundancy(index) > MAX_REDUNDANCY:
                ideal = self.form.ideal_tokens(self.lost[index])
                problems.append(f"{name}: {self.prefill(index)} prompt tokens computed, ideal {ideal}")
        return problems


class _LosingExecutor:
    """An executor that aborts or fails one request in its `LOSS_STEP`-th chunk, while the step is in flight."""

    def __init__(self, inner: Executor, engine: Engine, request_id: str, loss: str) -> None:
        self.num_blocks, self.block_size, self.block_bytes = inner.num_blocks, inner.block_size, inner.block_bytes
        self.lost = 0  # computed tokens of the request at that moment
        self._inner = inner
        self._engine = engine
        self._request_id = request_id
        self._loss = loss
        self._chunks = 0

    def execute(self, batch: Batch) -> StepResult:
        result = self._inner.execute(batch)
        for index, chunk in enumerate(batch.chunks):
            if chunk.request_id == self._request_id:
                self._chunks += 1
                if self._chunks == LOSS_STEP:
                    self.lost = chunk.start + len(chunk.token_ids)
                    return self._lose(result, index)
        return result

    def read_block(self, block_id: int) -> Data:
        return self._inner.read_block(block_id)

    def write_block(self, block_id: int, data: Data) -> None:
        self._inner.write_block(block_id, data)

    def zero_blocks(self, block_ids: list[int]) -> None:
        self._inner.zero_blocks(block_ids)

    def _lose(self, result: StepResult, index: int) -> StepResult:
        if self._loss == "abort":
            self._engine.abort(self._request_id)
            return result
        rows = (
            *result.rows[:index],
            RowResult(error=RowError(RowErrorKind.NON_FINITE, "planted")),
            *result.rows[index + 1 :],
        )
        return result._replace(rows=rows)


def _run(
    engine: Engine, form: Form, prompts: "list[array[int]]", number: int, bar: ProgressBar
) -> tuple[RunResult, int]:
    """Return (the burst on an empty cache, tokens computed by its aborted or failed leader)."""
    assert engine.reset_prefix_cache(), "an idle engine did not clear its prefix cache"
    requests = requests_from_prompts(prompts, _greedy(form), f"{form.name}-{number}")
    if not form.loss:
        return run_requests(engine, requests, bar=bar), 0
    executor = engine.executor
    engine.executor = losing = _LosingExecutor(executor, engine, requests[0].request_id, form.loss)
    try:
        return run_requests(engine, requests, bar=bar), losing.lost
    finally:
        engine.executor = executor


def _run_without_reuse(engine: Engine, form: Form, prompts: "list[array[int]]", bar: ProgressBar) -> RunResult:
    """Run the same prompts with the cache bypassed."""
    bar.start_stage(f"{form.name}, caching off", len(prompts))
    requests = requests_from_prompts(prompts, _greedy(form), "off")
    return run_requests(engine, [_bypassing(request) for request in requests], bar=bar)


def _bypassing(request: Request) -> Request:
    return replace(request, cache=CacheMode.BYPASS)


def _greedy(form: Form) -> SamplingParams:
    return SamplingParams(max_tokens=form.output, temperature=0.0)


def _pool_blocks(form: Form) -> int:
    """Return the blocks for every request without any sharing."""
    longest = form.prefix + form.own + form.output + (form.branch if form.tree else 0)
    return form.num_requests * (-(-longest // BLOCK_SIZE) + 1) + 64


def _index(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])


def _report(
    setup: EngineSetup, info: EngineInfo, results: list[_Result], runs: int, log: ContentionLog
) -> BenchmarkReport:
    found = [result.values() for result in results]
    worst = max(range(len(found)), key=lambda index: found[index]["redundancy"])
    names = [result.form.name for result in results]
    report = BenchmarkReport(
        "twins",
        {
            **found[worst],
            "worst_form": names[worst],
            "forms": [{"form": name, **values} for name, values in zip(names, found, strict=True)],
        },
        model=setup.label,
        seed=setup.seed,
        runs=runs,
        threads=info.threads,
        spread={"total_s": min_and_max([run.seconds for run in results[worst].runs])},
        setup={
            "requests": results[0].form.num_requests,
            "prefix_tokens": results[0].form.prefix,
            "own_tokens": results[0].form.own,
            "branch_tokens": results[0].form.branch,
            "output_tokens": results[0].form.output,
            **describe_engine(info),
        },
        contention=log.as_dict(),
        problems=[problem for result in results for problem in result.problems()],
    )
    differing = sum(values["differing_tokens"] for values in found)
    if differing and info.dtype == "float32":
        report.problems.append(f"{differing} first tokens differ from those without reuse in float32")
    keys = ("prefill_computed", "ideal", "redundancy", "steps", "total_s", "off_s")
    rows = tuple((name, *(values[key] for key in keys)) for name, values in zip(names, found, strict=True))
    report.sheets.append(ReportTable("a burst behind one new prefix", COLUMNS, rows))
    series = {key: tuple(values[key] for values in found) for key in ("prefill_computed", "ideal")}
    report.charts.append(ReportChart("prompt tokens computed", "form", "tokens", tuple(names), series))
    return report
