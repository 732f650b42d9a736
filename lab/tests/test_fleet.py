"""The benchmark of fleets: once on real replicas behind a real router, and its parts by made-up figures."""

from random import Random

import pytest
from made_up import setup_for
from tokenizers import Tokenizer

from headstart.core.errors import ConfigError
from headstart.workload.request_record import RequestRecord
from headstart.workload.synthetic import RequestShape
from headstart_lab.bootstrap import Interval
from headstart_lab.router.fleet_report import goals, make_report, run_fleet
from headstart_lab.router.fleet_trial import FleetConfig, Measured, Trial
from headstart_lab.router.fleet_workload import Words, decode_heavy, shared_prefix
from headstart_lab.runners.route_process import Entrant

SMALL = FleetConfig(
    replicas=2, policies=("cost",), groups=4, prompts=2, output=2, context=512, runs=1, high_rate=50.0, low_rate=50.0
)


def record(ttft: float, cached: int = 50, error: str | None = None) -> RequestRecord:
    return RequestRecord("r", 1.0, 1.0 + ttft, 2.0 + ttft if error is None else None, 100, cached, 2, error=error)


def trial(*ttfts: float, cached: int = 50, error: str | None = None) -> Trial:
    return Trial(tuple(record(ttft, cached, error) for ttft in ttfts), (0.75, 0.25), (0, 8), 0.1, "1.0")


def measured(**trials: list[Trial]) -> Measured:
    """The same at high and at low hit."""
    by_name = {name.replace("_", "-"): runs for name, runs in trials.items()}
    return Measured({"high": by_name, "low": dict(by_name)}, {"high": 5.0, "low": 3.0})


def test_every_word_is_one_token_wherever_it_stands(tiny: str) -> None:
    words = Words.of_model(tiny)
    drawn = words.draw(500, Random(1))
    tokenizer = Tokenizer.from_file(f"{tiny}/tokenizer.json")
    assert tokenizer.encode("".join(drawn)).ids == words.ids(drawn).tolist()
    assert len(set(drawn)) > 32


def test_a_model_without_a_tokenizer_file_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not there"):
        Words.of_model(str(tmp_path_factory.mktemp("empty")))


def test_questions_of_a_group_share_its_system_prompt_and_nothing_else(tiny: str) -> None:
    words = Words.of_model(tiny)
    questions = shared_prefix(words, 3, 4, RequestShape(40, 8, 2), [float(at) for at in range(12)], Random(0))
    assert [question.job.at for question in questions] == list(range(12))
    assert {len(question.job.prompt) for question in questions} == {48}
    beginnings = {(question.group, bytes(question.job.prompt[:40])) for question in questions}
    assert len(beginnings) == len({group for group, _ in beginnings}) == 3
    assert len({bytes(question.job.prompt) for question in questions}) == 12
    assert [question.group for question in questions] != sorted(question.group for question in questions)
    again = shared_prefix(words, 3, 4, RequestShape(40, 8, 2), [0.0] * 12, Random(0))
    assert [question.text for question in again] == [question.text for question in questions]


def test_decode_heavy_chats_have_popular_groups_and_long_outputs(tiny: str) -> None:
    words, due = Words.of_model(tiny), [float(at) for at in range(200)]
    chats = decode_heavy(words, 10, 20, RequestShape(40, 8, 50), due, Random(0))
    assert [chat.job.at for chat in chats] == due and {len(chat.job.prompt) for chat in chats} == {48}
    assert len({(chat.group, bytes(chat.job.prompt[:40])) for chat in chats}) == len({chat.group for chat in chats}) > 5
    assert len({bytes(chat.job.prompt) for chat in chats}) == 200
    sizes = [sum(chat.group == group for chat in chats) for group in range(10)]
    assert sizes[0] == max(sizes) > 2 * sizes[4]
    outputs = sorted(chat.job.output for chat in chats)
    assert outputs[0] >= 1 and 35 < outputs[100] < 70 and 150 < outputs[-1] <= 200
    assert [chat.text for chat in decode_heavy(words, 10, 20, RequestShape(40, 8, 50), due, Random(0))] == [
        chat.text for chat in chats
    ]


def test_decode_heavy_chats_must_fit_the_context() -> None:
    assert (
        FleetConfig(decode_output=128).shapes["decode"] == RequestShape(1536, 512, 128)
        and "decode" not in FleetConfig().shapes
    )
    FleetConfig(decode_output=512).check()
    with pytest.raises(ConfigError, match="--decode-output-tokens 513: the longest chat has 4100 tokens"):
        FleetConfig(decode_output=513).check()


def test_lengths_are_those_of_the_source_scaled_to_the_model() -> None:
    whole, half = FleetConfig(), FleetConfig(context=1580, output=16)
    assert (whole.scale, whole.shapes["high"], whole.shapes["low"]) == (
        1.0,
        RequestShape(3000, 128, 16),
        RequestShape(128, 3000, 16),
    )
    assert half.shapes["high"] == RequestShape(1500, 64, 16)
    assert whole.pool_blocks == 750 and half.pool_blocks == 375  # a third of 12 system prompts


def test_a_pool_that_holds_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="--groups 3: a third of their system prompts is 187 blocks"):
        FleetConfig(groups=3).check()
    FleetConfig(groups=4).check()


def test_who_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="routing policy 'random' is unknown"):
        FleetConfig(policies=("random",)).entrants()
    peer = Entrant("smg")
    assert [one.name for one in FleetConfig(policies=("cost",), peers=(peer,)).entrants()] == ["cost", "smg"]


def test_one_workload_can_be_measured_alone() -> None:
    assert FleetConfig(decode_output=64).kinds == ["high", "low", "decode"]
    assert FleetConfig(decode_output=64, workloads=("decode",)).kinds == ["decode"]
    with pytest.raises(ConfigError, match="--workload decode: use one of high, low, decode"):
        FleetConfig(workloads=("decode",)).check()


def test_figures_are_of_all_requests_and_intervals_hold_them() -> None:
    fast = [trial(0.01, 0.03), trial(0.02, 0.02)]
    slow = [trial(0.09, 0.11, cached=10), trial(0.1, 0.1, cached=10)]
    report = make_report(setup_for(""), SMALL, measured(cost=fast, round_robin=slow))
    values = report.values
    assert report.problems == []
    assert values["high.cost.ttft_mean_ms"] == pytest.approx(20.0)
    assert values["high.round-robin.ttft_p90_ms"] == pytest.approx(107.0)
    assert (values["low.cost.hit_rate"], values["low.round-robin.hit_rate"]) == pytest.approx((0.5, 0.1))
    assert values["high.cost.prediction_error_tokens"] == pytest.approx(4.0)
    low, high = values["intervals"]["high.cost.ttft_mean_ms"]
    assert 10.0 <= low <= 20.0 <= high <= 30.0
    assert values["round_robin_over_cost"] == pytest.approx(5.0)
    assert values["goal.high.three_times_better"] and values["goal.high.no_worse_than.round-robin"]
    assert report.spread["high.round-robin.ttft_mean_ms"] == pytest.approx([100.0, 100.0])


def test_a_failed_request_makes_the_report_invalid() -> None:
    runs = [trial(0.01), Trial((record(0.01), record(0.01, error="HTTP 502")), (1.0, 0.0))]
    report = make_report(setup_for(""), SMALL, measured(cost=runs))
    assert report.problems == [f"{kind}.cost: 1 requests failed, the first with: HTTP 502" for kind in ("high", "low")]
    assert report.values["high.cost.ttft_mean_ms"] == pytest.approx(10.0)


def test_goals_are_about_whom_was_measured_and_intervals_that_overlap_will_do() -> None:
    values = {"high.cost.ttft_mean_ms": 20.0, "high.smg.ttft_mean_ms": 19.0, "low.smg.ttft_mean_ms": 5.0}
    apart = {"high.cost.ttft_mean_ms": Interval(19.5, 21.0), "high.smg.ttft_mean_ms": Interval(18.5, 19.4)}
    near = apart | {"high.smg.ttft_mean_ms": Interval(18.5, 19.6)}
    assert goals(values, apart) == {"goal.high.no_worse_than.smg": False}
    assert goals(values, near) == {"goal.high.no_worse_than.smg": True}


@pytest.mark.long
def test_real_replicas_behind_a_real_router_serve_both_workloads(tiny: str) -> None:
    report = run_fleet(setup_for(tiny), SMALL)
    values = report.values
    assert report.problems == []
    assert values["high.cost.ttft_mean_ms"] > 0
    # groups of two questions: the second finds the system prompt, if it comes after the first has ended
    assert 0.0 <= values["high.cost.hit_rate"] <= 0.5
    assert values["low.cost.hit_rate"] < 0.1
    assert report.setup["pool_blocks"] == SMALL.pool_blocks
    assert values["high.cost.prediction_error_tokens"] >= 0.0
