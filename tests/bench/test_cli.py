"""The contract of every verb: the last line of stdout is one JSON document, and an invalid run does not exit with 0."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headstart
from headstart.bench import cli_run, load, rotations
from headstart.bench.cli import app
from headstart.bench.engines import Setup
from headstart.bench.nullexec import NullExecutor
from headstart.bench.progress import Bar
from headstart.bench.report import Report
from headstart.workload.record import RequestRecord

MakeSetup = Callable[..., Setup]
Bench = Callable[[Setup, Bar], Report]
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


def run_verb(monkeypatch: pytest.MonkeyPatch, setup: Setup, *arguments: str) -> tuple[int, dict]:
    """(exit code, JSON document) of a verb on the given engines."""

    def on_setup(bench: Bench, *rest: object) -> None:
        cli_run.finish(lambda bar: bench(setup, bar), None)

    monkeypatch.setattr(cli_run, "run_on_model", on_setup)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("rotations", "--quick"), ROTATION_KEYS),
        (("twins", "--quick"), {"prefill_computed", "ideal", "redundancy", "total_s"}),
        (("lab", "repeat"), {"tokens_computed"}),
        (
            ("lab", "fairness", "--quick", "--requests", "200"),
            {"max_displacement_over_bound", "cold_p99_over_fcfs", "mean_ttft_over_fcfs"},
        ),
        (("lab", "stall", "--quick"), {"tpot_p99_over_unloaded", "tpot_p99_over_unloaded_no_cap"}),
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
    tiny = "headstart.bench.intent_load.QUICK"
    from headstart.bench.intent_load import IntentConfig

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
    monkeypatch.setattr(Setup, "options", _few_seqs(Setup.options))
    code, document = run_verb(monkeypatch, make_setup(), "rotations", "--quick")
    assert code == 1 and "2 steps" in document["problems"][0]


def _few_seqs(options: Callable) -> Callable:
    from dataclasses import replace

    return lambda self, **sizes: replace(options(self, **sizes), max_num_seqs=40)


def test_load_exits_with_one_when_a_request_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(*_: object) -> tuple[str, list[RequestRecord]]:
        return "m", [
            RequestRecord("a", 0.0, 1.0, 2.0, 4, 2, 2),
            RequestRecord("b", 0.0, None, None, 4, 0, 0, error="x"),
        ]

    monkeypatch.setattr(load, "_send_all", send)
    result = CliRunner().invoke(app, ["load", "--against", "http://127.0.0.1:1"])
    document = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 1 and document["errors"] == 1
    assert {"ttft_ms", "tpot_ms", "e2e_ms", "cached_share"} | COMMON <= document.keys()


def test_what_cannot_run_is_one_line_and_exit_code_two() -> None:
    result = CliRunner().invoke(app, ["load", "--against", "nonsense"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: --against 'nonsense'")


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "run_load", interrupt)
    assert CliRunner().invoke(app, ["load", "--against", "http://127.0.0.1:1"]).exit_code == 130


def test_importing_the_cli_imports_no_torch() -> None:
    code = "import sys, headstart.bench.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(headstart.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
