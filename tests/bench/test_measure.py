"""Scenarios on an engine whose model computes nothing: what is counted from outside is what the engine computed."""

from collections.abc import Callable, Sequence
from random import Random

import pytest

from headstart.bench.measure import measure_scenario
from headstart.bench.rate_report import (
    RateSearchConfig,
    cached_prefix_workload,
    measure_rate,
    measure_rates_until_highest,
)
from headstart.core.request import Request
from headstart.measurement.inprocess import EngineRunner, run_requests
from headstart.measurement.runner import EngineSetup, JobsResult
from headstart.workload import scenarios
from headstart.workload.jobs import TokenSampling
from headstart.workload.request_record import RequestRecord
from headstart.workload.slo import Slo
from headstart.workload.synthetic import RequestShape
from headstart_lab.comparison import ROWS, measure_poisson, measure_row
from headstart_lab.runners.null_executor import NullExecutor

MakeSetup = Callable[..., EngineSetup]
SHAPE = RequestShape(shared=48, own=16, output=3)


@pytest.fixture
def runner(make_setup: MakeSetup) -> EngineRunner:
    setup = make_setup()
    return EngineRunner.from_setup(setup, setup.options(num_blocks=8192))


def test_redundancy_is_one_where_nothing_is_computed_twice(runner: EngineRunner) -> None:
    found = measure_scenario(
        runner, scenarios.shared_burst_scenario(runner.vocab_size, Random(1), requests=4, shape=SHAPE)
    )
    assert found.problems == [] and found.was_reset
    result = found["cold"]
    assert (result.computed_prompt_tokens, result.ideal, result.redundancy_factor) == (48 + 4 * 16, 48 + 4 * 16, 1.0)


def test_without_caching_every_twin_computes_the_prefix(make_setup: MakeSetup) -> None:
    setup = make_setup()
    runner = EngineRunner.from_setup(setup, setup.options(num_blocks=512, caching=False))
    found = measure_scenario(
        runner, scenarios.shared_burst_scenario(runner.vocab_size, Random(1), requests=4, shape=SHAPE)
    )
    assert found["cold"].redundancy_factor == pytest.approx(4 * 64 / (48 + 4 * 16))


def test_the_engine_samples_as_the_jobs_ask(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    add = runner.engine.add_request
    monkeypatch.setattr(runner.engine, "add_request", lambda request: asked.append(request) or add(request))
    chosen = TokenSampling(temperature=0.7, top_p=0.9, top_k=5)
    measure_scenario(
        runner,
        scenarios.concurrent_decode_scenario(64, Random(1), is_shared=True, streams=2, shape=SHAPE, sampling=chosen),
    )
    found = [(one.sampling.temperature, one.sampling.top_p, one.sampling.top_k) for one in asked]
    assert found == [(0.0, 1.0, 0), (0.7, 0.9, 5), (0.7, 0.9, 5)]  # the first prepares the cache


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_its_figures_and_repeats_cold(runner: EngineRunner, name: str) -> None:
    for repetition in range(2):
        outcome = measure_row(name, runner, repetition)
        assert outcome.problems == ()
        assert outcome.figures.keys() == {part.key for part in ROWS[name].parts}
        assert all(value is not None and value > 0 for value in outcome.figures.values())
        # 900 tokens are 56 blocks and 4 tokens, which cannot be shared
        assert all(1.0 <= (found or 0) < 1.05 for found in outcome.redundancy.values())


def test_rotations_are_computed_whole_when_cold_and_one_token_each_when_warm(runner: EngineRunner) -> None:
    outcome = measure_row("rotations", runner, 0)
    assert outcome.computed == {"rotations_cold": 48 * 1025, "rotations_warm": 48}
    assert outcome.ideal["rotations_warm"] == 48
    # of 1,000 tokens some rotations begin with the same one
    assert 48 * 1025 - 20 < outcome.ideal["rotations_cold"] <= 48 * 1025


def test_a_closed_loop_has_so_many_at_work_and_counts_latency_from_sending(runner: EngineRunner) -> None:
    jobs = scenarios.cold_ttft_scenario(runner.vocab_size, Random(1), length=20, requests=6).phases[0].jobs
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, runner.engine.stats().num_running)

    run = run_requests(runner.engine, runner._requests(jobs), concurrency=2, on_step=watch)
    assert most <= 2 and len(run.records) == 6
    arrivals = [record.arrival for record in run.records]
    assert arrivals[0] == arrivals[1] < arrivals[2] and arrivals == sorted(arrivals)
    alone = runner.run(jobs, concurrency=1).records
    ends = [record.finish or 0.0 for record in alone]
    assert all(later.arrival >= end for later, end in zip(alone[1:], ends, strict=False))


def test_failures_are_problems_and_give_no_figures(make_setup: MakeSetup, failing: type[NullExecutor]) -> None:
    setup = make_setup(failing)
    runner = EngineRunner.from_setup(setup, setup.options(num_blocks=8192))
    outcome = measure_row("twins", runner, 0)
    assert outcome.figures == {"twins": None} and outcome.redundancy == {"twins": None}
    assert any("32 of 32 requests failed" in problem for problem in outcome.problems)


class SlowRunner:
    """Serves one request at a time, each in 0.1 s of a time of its own; may keep silent about cached tokens."""

    label, vocab_size = "slow", 1000

    def __init__(self, reports_cached: bool = True) -> None:
        self.about: dict[str, object] = {}
        self.reports_cached = reports_cached

    def try_clear_prefix_cache(self) -> bool:
        return False

    def run(self, jobs: Sequence[scenarios.Job], *, concurrency: int = 0, give_up=None, **_: object) -> JobsResult:
        records, now, is_cut = list[RequestRecord](), 0.0, False
        for index, job in enumerate(jobs):
            arrival = now if concurrency else job.at
            now = max(now, arrival) + 0.1
            records.append(RequestRecord(f"r{index}", arrival, now, now, len(job.prompt), 0, job.output))
            if give_up is not None and give_up(records[-1]):
                is_cut = True
                break
        return JobsResult(records, now, is_cut, self.reports_cached)

    def close(self) -> None: ...


def test_redundancy_is_unknown_where_cached_tokens_are_not_reported() -> None:
    scenario = scenarios.shared_burst_scenario(1000, Random(1), requests=4, shape=SHAPE)
    assert measure_scenario(SlowRunner(), scenario)["cold"].redundancy_factor == pytest.approx(4 * 64 / 112)
    silent = measure_scenario(SlowRunner(reports_cached=False), scenario)["cold"]
    assert (
        silent.redundancy_factor is None
        and silent.computed_prompt_tokens is None
        and silent.trial.computed_prompt_tokens is None
    )


def test_the_highest_rate_is_below_what_one_at_a_time_can_serve() -> None:
    config = RateSearchConfig(seconds=5.0, min_requests=200, precision=1.05)
    found = measure_rates_until_highest(SlowRunner(), cached_prefix_workload(SHAPE), Slo(e2e=0.4), 3.0, config)
    assert 3.0 < found.rate < 10.0 and found.problems == []
    assert all(point.holds == (point.rate <= found.rate) for point in found.points)
    assert any(point.result.trial.is_cut for point in found.points)


def test_a_rate_without_limits_is_measured_to_its_end() -> None:
    point = measure_rate(
        SlowRunner(), cached_prefix_workload(SHAPE), Slo(), 50.0, RateSearchConfig(min_requests=20, seconds=0.1)
    )
    assert len(point.result.trial.records) == 20 and point.holds


def test_poisson_allows_four_times_the_latency_alone_unless_told() -> None:
    config = RateSearchConfig(seconds=1.0, min_requests=50, precision=1.2)
    outcome, alone = measure_poisson(SlowRunner(), None, config, shape=SHAPE)
    assert alone == pytest.approx(0.1)
    told, _ = measure_poisson(SlowRunner(), 0.4, config, shape=SHAPE)
    assert outcome.figures == told.figures and (outcome.figures["poisson"] or 0) > 1
    assert outcome.redundancy["poisson"] == pytest.approx(64 / 16, rel=0.1)
