"""The load client against a stub server, each fault on demand."""

import json
from array import array
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from random import Random

import pytest
from bench.stub_endpoint import Stub, serving

from headstart.bench.endpoint_runner import EndpointRunner
from headstart.bench.measure import measure_scenario
from headstart.bench.streamed_request import EndpointTarget, cached_tokens_in_usage, request_body_of_job
from headstart.core.errors import ConfigError
from headstart.measurement.runner import JobsResult
from headstart.workload import scenarios
from headstart.workload.jobs import Job, TokenSampling, jobs_from_prompts
from headstart.workload.request_record import RequestRecord
from headstart.workload.synthetic import RequestShape, random_tokens

SHAPE = RequestShape(32, 16, 4)


@contextmanager
def connected(stub: Stub, **target: object) -> Generator[EndpointRunner]:
    with serving(stub) as url, closing(EndpointRunner.connect(EndpointTarget(url, **target), 100, Random(0))) as runner:
        yield runner


def jobs(count: int = 6, output: int = 4, due: Sequence[float] | None = None) -> list[Job]:
    return jobs_from_prompts([random_tokens(40, 100, Random(i)) for i in range(count)], output, due)


def test_a_closed_loop_has_so_many_at_a_time_and_keeps_the_order_of_its_jobs() -> None:
    stub = Stub(together=2)
    with connected(stub) as runner:
        asked = jobs()
        trial = runner.run(asked, concurrency=2)
    assert stub.most == 2 and trial.errors == [] and not trial.is_cut
    sent = stub.bodies[stub.probes :]
    assert sorted(tuple(body["prompt"]) for body in sent) == sorted(tuple(job.prompt) for job in asked)
    assert all(body["stream"] and body["ignore_eos"] and body["max_tokens"] == 4 for body in sent)
    assert [record.request_id for record in trial.records] == [f"run1-{i}" for i in range(6)]
    assert trial.records[0].arrival < trial.records[5].arrival
    for record in trial.records:
        assert (record.prompt_tokens, record.output_tokens) == (40, 4)
        assert record.ttft is not None and record.e2e is not None and record.ttft < record.e2e


def test_sampling_is_sent_as_asked() -> None:
    job = Job(array("i", [1]), 2)
    greedy, sampled = (
        json.loads(request_body_of_job(one, "m")) for one in (job, replace(job, sampling=TokenSampling(0.7, 0.9, 5)))
    )
    assert greedy["temperature"] == 0 and "top_p" not in greedy and "top_k" not in greedy
    assert (sampled["temperature"], sampled["top_p"], sampled["top_k"]) == (0.7, 0.9, 5)


def test_an_open_loop_sends_when_due_and_counts_from_then() -> None:
    stub = Stub()
    due = [0.0, 0.1, 0.2]
    with connected(stub, model="mine", api_key="secret") as runner:
        trial = runner.run(jobs(3, due=due))
    assert stub.keys == ["Bearer secret"] * 4
    assert {body["model"] for body in stub.bodies} == {"mine"}
    assert [record.arrival for record in trial.records] == due
    assert all((record.first_token or 0.0) > at for record, at in zip(trial.records, due, strict=True))


def test_a_job_comes_a_pause_after_those_it_waits_for() -> None:
    first, second, third = jobs(3, due=[0.0, 9.0, 9.0])
    asked = [first, replace(second, after=(0,), pause=0.1), replace(third, after=(0, 1), pause=0.05)]
    with connected(Stub()) as runner:
        one, two, last = runner.run(asked).records
    assert one.finish is not None and two.finish is not None
    assert one.finish + 0.1 <= two.arrival < 9.0 and two.finish + 0.05 <= last.arrival < 9.0


def test_redundancy_is_counted_from_what_was_sent_and_what_was_reported() -> None:
    with connected(Stub()) as runner:
        found = measure_scenario(
            runner, scenarios.token_rotations_scenario(runner.vocab_size, Random(1), count=4, length=33, passes=1)
        )
    assert found.problems == [] and not found.was_reset
    # a token that two rotations begin with is shared, but no server shares less than a block
    assert found["cold"].computed_prompt_tokens == 4 * 33 and 4 * 33 - 4 <= found["cold"].ideal <= 4 * 33
    assert (found["warm"].computed_prompt_tokens, found["warm"].redundancy_factor) == (4, 1.0)


@pytest.mark.parametrize(("fault", "probes"), [("silent", 2), ("silent when none", 2)])
def test_silence_about_cached_tokens_is_not_zero_cached_tokens(fault: str, probes: int) -> None:
    stub = Stub(fault, probes=probes)
    with connected(stub) as runner:
        assert len(stub.bodies) == probes, "a silent first answer is asked for again"
        assert runner.reports_cached is (fault == "silent when none")
        found = measure_scenario(
            runner, scenarios.shared_burst_scenario(runner.vocab_size, Random(1), requests=3, shape=SHAPE)
        )["cold"]
    assert found.problems == []
    if fault == "silent":
        assert found.redundancy_factor is None and found.computed_prompt_tokens is None
    else:
        assert found.redundancy_factor is not None and found.redundancy_factor >= 1.0


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {}}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 7}}, 7),
        ({"prompt_cache_hit_tokens": 5, "prompt_cache_miss_tokens": 6}, 5),
    ],
)
def test_cached_tokens_are_read_in_every_form_and_never_made_up(usage: dict, expected: int | None) -> None:
    assert cached_tokens_in_usage(usage) == expected


def test_a_server_that_claims_more_than_can_be_cached_is_found_out() -> None:
    with connected(Stub("all cached")) as runner:
        found = measure_scenario(
            runner, scenarios.shared_burst_scenario(runner.vocab_size, Random(1), requests=3, shape=SHAPE)
        )
    assert "are needed: the prompts were known already" in found.problems[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", "HTTP 429.*no room"),
        ("error in mid stream", "broken"),
        ("torn stream", r"without \[DONE\]"),
        ("wrong usage", r"usage says \(40, 3\).*sent were \(40, 4\).*ignore_eos"),
    ],
)
def test_every_failure_is_in_the_records(fault: str, message: str) -> None:
    with connected(Stub(fault)) as runner:
        trial = runner.run(jobs())
    assert len(trial.errors) == 6 and not any(record.ok for record in trial.records)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(trial.errors[0])


def test_giving_up_ends_what_is_under_way_and_the_runner_goes_on() -> None:
    stub = Stub(seconds_per_token=0.01)
    seen: list[RequestRecord] = []

    def give_up(record: RequestRecord) -> bool:
        seen.append(record)
        return len(seen) == 2

    with connected(stub) as runner:
        long_jobs = [*jobs(2, output=1), *jobs(2, output=6000)]
        trial = runner.run(long_jobs, give_up=give_up)
        assert trial.is_cut and [record.output_tokens for record in trial.records] == [1, 1]
        after = runner.run(jobs(2))
    assert isinstance(after, JobsResult) and not after.is_cut and after.errors == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loading", r"HTTP 503.*still loading"),
        ("no models", "--model"),
        ("key", "HTTP 401.*--api-key"),
        ("no completions", "HTTP 404.*this path"),
        ("no token ids", "does not take prompts of token ids"),
        ("no ignore_eos", "does not take ignore_eos"),
        ("small vocabulary", r"lower --vocab-size \(100\)"),
        ("crash", "HTTP 500.*it broke"),
        ("no usage", "no usage"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_clear_error(fault: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), connected(Stub(fault)):
        pass


@pytest.mark.parametrize("url", ["ftp://example", "nonsense"])
def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not an http"):
        EndpointRunner.connect(EndpointTarget(url), 100, Random(0))


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot reach"):
        EndpointRunner.connect(EndpointTarget("http://127.0.0.1:9"), 100, Random(0))


def test_what_the_server_says_of_itself_is_in_the_report() -> None:
    with connected(Stub()) as runner:
        assert runner.about["model"] == "stub" and runner.about["max_model_len"] == 2048
        assert runner.run([Job(array("i", [1]), 1)]).records[0].ok
