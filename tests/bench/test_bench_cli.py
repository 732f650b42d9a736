"""The contract of every verb: the last line of stdout is one JSON document, and an invalid run does not exit with 0."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.stub_endpoint import Stub, serving
from typer.testing import CliRunner

from headstart.bench import rate_report, rotations
from headstart.bench.cli import cli_run
from headstart.bench.cli.bench_cli import app
from headstart.bench.endpoint_runner import EndpointRunner
from headstart.bench.rate_report import Load, RateSearchConfig, RateSearchResult, measure_rate
from headstart.measurement.progress_bar import ProgressBar
from headstart.measurement.report import BenchmarkReport
from headstart.measurement.runner import EngineSetup, JobRunner
from headstart.workload.slo import Slo
from headstart_lab.runners.null_executor import NullExecutor

MakeSetup = Callable[..., EngineSetup]
Bench = Callable[[EngineSetup, ProgressBar], BenchmarkReport]
COMMON = {
    "bench",
    "valid",
    "problems",
    "model",
    "seed",
    "runs",
    "spread",
    "threads",
    "gomp_spincount",
    "machine",
    "versions",
}
INTENT_KEYS = {
    "ttft_off_ms",
    "ttft_on_ms",
    "ttft_ratio",
    "tpot_p90_off_ms",
    "tpot_p90_on_ms",
    "qps_off",
    "qps_on",
    "qps_ratio",
}
ROTATION_KEYS = {
    *("cold_s", "warm_s", "ratio", "warm_steps", "warm_tokens_computed"),
    *("unaware_warm_s", "unaware_warm_steps", "one_token_over_decode"),
}


def run_verb(monkeypatch: pytest.MonkeyPatch, setup: EngineSetup, *arguments: str) -> tuple[int, dict]:
    """(exit code, JSON document) of a verb on the given engines."""

    def on_setup(bench: Bench, *rest: object) -> None:
        cli_run.run_and_exit(lambda bar: bench(setup, bar), None)

    monkeypatch.setattr(cli_run, "run_model_bench_and_exit", on_setup)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("rotations", "--quick"), ROTATION_KEYS),
        (("twins", "--quick"), {"prefill_computed", "ideal", "redundancy", "total_s"}),
        (("shared-prefix", "--groups", "2", "--runs", "1"), {"redundancy", "ttft_ms", "phases"}),
        (("decode", "--streams", "3", "--runs", "1"), {"decode_tokens_per_s", "phases"}),
        (
            ("decode", "--streams", "3", "--runs", "1", "--temperature", "1", "--top-p", "0.9", "--top-k", "5"),
            {"decode_tokens_per_s", "phases"},
        ),
        (("prefill", "--lengths", "20,40", "--runs", "1"), {"redundancy", "ttft_ms", "phases"}),
        (("lab", "repeat"), {"tokens_computed"}),
        (
            ("lab", "fairness", "--quick", "--requests", "200"),
            {"max_displacement_over_bound", "cold_p99_over_fcfs", "mean_ttft_over_fcfs"},
        ),
        (("lab", "stall", "--quick"), {"tpot_p99_over_unloaded", "tpot_p99_over_unloaded_no_bound"}),
        (("lab", "order", "--quick", "--waiting", "100"), {"order_us_per_step"}),
        (("lab", "pinned"), {"cached_tokens", "cached_tokens_after_flood", "first_ttft_ms", "cold_ttft_ms"}),
        (("lab", "scheduler", "--runs", "1"), {"step_256_decodes_us", "admit_4096_cached_us", "hash_1k_tokens_us"}),
    ],
)
def test_every_verb_ends_with_its_keys_and_exit_code_zero(
    monkeypatch: pytest.MonkeyPatch, make_setup: MakeSetup, arguments: tuple[str, ...], keys: set[str]
) -> None:
    code, document = run_verb(monkeypatch, make_setup(), *arguments)
    assert code == 0
    assert keys | COMMON <= document.keys()


def test_intent_ends_with_its_keys(monkeypatch: pytest.MonkeyPatch, make_setup: MakeSetup) -> None:
    tiny = "headstart.bench.intent_report.QUICK"
    from headstart.bench.intent_report import IntentConfig

    monkeypatch.setattr(tiny, IntentConfig(runs=1, requests=2, seconds=0.01, min_requests=3, precision=8.0))
    code, document = run_verb(monkeypatch, make_setup(), "intent", "--model", "null", "--quick")
    assert code == 0
    assert document.keys() >= INTENT_KEYS | COMMON


@pytest.mark.parametrize(
    "arguments",
    [("rotations", "--quick"), ("twins", "--quick"), ("lab", "repeat"), ("intent", "--model", "x", "--quick")],
)
def test_an_invalid_run_exits_with_one_and_says_why(
    monkeypatch: pytest.MonkeyPatch, make_setup: MakeSetup, failing: type[NullExecutor], arguments: tuple[str, ...]
) -> None:
    code, document = run_verb(monkeypatch, make_setup(failing), *arguments)
    assert code == 1
    assert document["valid"] is False and "failed" in document["problems"][0]


def test_a_wrong_number_of_warm_steps_invalidates_the_run(
    monkeypatch: pytest.MonkeyPatch, make_setup: MakeSetup
) -> None:
    monkeypatch.setattr(rotations, "BUDGET", 1100)
    monkeypatch.setattr(EngineSetup, "options", _few_seqs(EngineSetup.options))
    code, document = run_verb(monkeypatch, make_setup(), "rotations", "--quick")
    assert code == 1 and "2 steps" in document["problems"][0]


def _few_seqs(options: Callable) -> Callable:
    from dataclasses import replace

    return lambda self, **sizes: replace(options(self, **sizes), max_num_seqs=40)


@pytest.mark.parametrize(
    ("arguments", "phases"),
    [
        (("rotations",), ["cold", "warm"]),
        (("twins", "--requests", "3", "--prefix-tokens", "64"), ["cold"]),
        (("twins", "--tree", "2x2", "--prefix-tokens", "64"), ["cold"]),
        (("shared-prefix", "--groups", "2", "--prompts", "2", "--rate", "200", "--slo-ttft", "60000"), ["cold"]),
        (("decode", "--streams", "3", "--prefix-tokens", "64", "--output-tokens", "4"), ["shared", "distinct"]),
        (("decode", "--streams", "3", "--prefixes", "distinct", "--output-tokens", "4"), ["distinct"]),
        (("prefill", "--lengths", "20,40"), ["cold 20", "warm 20", "cold 40", "warm 40"]),
    ],
)
@pytest.mark.parametrize("fault", ["", "silent"])
def test_every_workload_measures_a_server(arguments: tuple[str, ...], phases: list[str], fault: str) -> None:
    code, document, _ = against(Stub(fault), *arguments, "--runs", "1")
    assert code == 0, document["problems"]
    assert list(document["phases"]) == phases and document.keys() >= COMMON | {"redundancy", "ttft_ms"}
    for found in document["phases"].values():
        assert found["errors"] == 0 and found["ideal"] > 0
        assert (found["redundancy"] is None) is (fault == "silent")
        assert (found["cached_tokens"] is None) is (fault == "silent")


@pytest.mark.parametrize("arguments", [("intent", "--quick"), ("shared-prefix", "--rate", "search", "--groups", "2")])
def test_a_search_ends_with_a_rate_and_its_redundancy(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(rate_report, "measure_rates_until_highest", one_point)
    code, document, shown = against(Stub(), *arguments, "--slo-e2e", "60000")
    assert code == 0, document["problems"]
    assert document["highest_rate"] == 400 and document["slo_ms"] == {"e2e": 60000}
    assert document["redundancy"] >= 1.0 and document["goodput"] > 0
    assert [point["holds"] for point in document["points"]] == [True] and "highest rate" in shown


@pytest.mark.parametrize("arguments", [("intent", "--quick"), ("shared-prefix", "--rate", "search", "--groups", "2")])
def test_a_search_says_zero_at_once_where_requests_alone_miss_the_limit(arguments: tuple[str, ...]) -> None:
    code, document, shown = against(Stub(), *arguments, "--slo-e2e", "0.0001")
    assert code == 0, document["problems"]
    assert document["highest_rate"] == 0 and document["points"] == [] and document["goodput"] == 0.0
    assert "requests alone miss that" in " ".join(shown.split())


def one_point(runner: JobRunner, load: Load, slo: Slo, *_: object) -> RateSearchResult:
    """A search that tries one rate only."""
    point = measure_rate(runner, load, slo, 400.0, RateSearchConfig(seconds=0.05, min_requests=8))
    return RateSearchResult(point.rate, (point,), slo)


def test_a_trace_is_replayed_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 20 * t, "input_length": 1024, "output_length": 2, "hash_ids": [0, t]} for t in (1, 2, 3)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    code, document, _ = against(Stub(), "trace", "--trace", str(path), "--limit", "2", "--max-prompt-tokens", "512")
    assert code == 0 and document["requests"] == 2
    assert (document["setup"]["kind"], document["setup"]["factor"]) == ("mooncake", 0.5)
    assert document["prompt_tokens"] == 1024 and document["ideal"] == 512 + 256


def test_sessions_of_agents_are_replayed_with_their_pauses_and_stated(tmp_path: Path) -> None:
    calls = [
        {"t": 0.1 * turn, "in": 64 * (4 + turn), "out": 64, "hash_ids": list(range(4 + turn)), "api_time": 0.05}
        for turn in range(3)
    ]
    for name in ("x", "y"):
        session = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": calls}
        (tmp_path / f"{name}.json").write_text(json.dumps(session), encoding="utf-8")
    code, document, shown = against(Stub(), "trace", "--trace", str(tmp_path), "--divide-lengths", "4")
    assert code == 0, shown
    setup = document["setup"]
    assert (setup["kind"], setup["tokens_per_id"], setup["divisor"], setup["dropped_requests"]) == (
        "sessions",
        16,
        4,
        0,
    )
    assert setup["loop"] == "closed, each request a recorded pause after the answers that it needs"
    assert document["prompt_tokens"] == 2 * 16 * (4 + 5 + 6) and document["ideal"] == 2 * 16 * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trace", "--trace", "no-such-file"), "--trace no-such-file: "),
        (("shared-prefix", "--rate", "fast"), "--rate 'fast'"),
        (("prefill", "--lengths", "10,x"), "--lengths '10,x'"),
        (("decode", "--prefixes", "none"), "--prefixes 'none'"),
        (("decode", "--top-p", "0.9"), "do nothing at temperature 0"),
        (("decode", "--temperature", "1", "--top-p", "0"), "outside (0, 1]"),
        (("twins", "--abort"), "need an engine in this process"),
        (("twins", "--prefix-tokens", "20"), "not a multiple of the block size"),
        (("prefill", "--lengths", "4000"), "context of 2048"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_two(arguments: tuple[str, ...], message: str) -> None:
    code, document, shown = against(Stub(), *arguments)
    assert code == 2 and document is None
    assert message in shown


def test_a_server_that_fails_invalidates_the_run() -> None:
    code, document, _ = against(Stub("torn stream"), "twins", "--requests", "2", "--prefix-tokens", "16")
    assert code == 1 and document["errors"] == 6 and "requests failed" in document["problems"][0]


def test_a_server_that_knows_the_prompts_already_is_not_called_perfect() -> None:
    stub = Stub()
    with serving(stub) as url:
        sizes = ("--requests", "3", "--prefix-tokens", "64", "--runs", "1", "--seed", "5")
        first, again = (CliRunner().invoke(app, ["twins", "--against", url, *sizes]) for _ in range(2))
        fresh = [CliRunner().invoke(app, ["twins", "--against", url, *sizes[:-2]]) for _ in range(2)]
    assert (first.exit_code, again.exit_code, [result.exit_code for result in fresh]) == (0, 1, [0, 0])
    assert "another --seed" in json.loads(again.stdout.splitlines()[-1])["problems"][0]


def against(stub: Stub, *arguments: str) -> tuple[int, dict, str]:
    """(exit code, JSON document, stderr) of a verb against a stub."""
    with serving(stub) as url:
        result = CliRunner().invoke(app, [arguments[0], "--against", url, *arguments[1:]])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]) if result.stdout else None, result.stderr


def test_what_cannot_run_is_one_line_and_exit_code_two() -> None:
    result = CliRunner().invoke(app, ["shared-prefix", "--against", "nonsense"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: --against 'nonsense'")


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EndpointRunner, "connect", interrupt)
    assert CliRunner().invoke(app, ["shared-prefix", "--against", "http://127.0.0.1:1"]).exit_code == 130


def test_importing_the_cli_imports_no_torch() -> None:
    code = "import sys, headstart.bench.cli.bench_cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
