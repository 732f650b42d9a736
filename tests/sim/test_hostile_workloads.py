"""Files and flags of `simulate` and `plan` that could take endless time or memory: one line, exit code 2."""

import json
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headstart.cli import main as cli
from headstart.router.decision_log import DecisionRecord
from headstart.sim.sim_request import requests_from_trace
from headstart.workload.recorded.trace_units import TraceUnits
from headstart.workload.traces import MAX_TOKENS, parse_trace

MOONCAKE: dict[str, Any] = {"timestamp": 0, "input_length": 1000, "output_length": 4, "hash_ids": [1, 2]}
AGENT: dict[str, Any] = {"timestamp": 1_700_000_000_000_000, "input": "some text", "output": "more", "session_id": "s"}
DECISION: dict[str, Any] = asdict(DecisionRecord(0.0, "r", "", {}, {}, 32, 16, "00" * 16, 4, 0, 1.0))
DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = cli.main(["simulate", "--replicas", "1", *arguments])
    *progress, told = capsys.readouterr().err.strip().split("\n")
    assert code == 2 and told.startswith(("headstart: ", "error: ")) and len(progress) < 3 and len(told) < 600, told
    return told


@pytest.mark.timeout(120)  # some of them never ended
@pytest.mark.parametrize(
    ("flag", "row", "changes"),
    [
        *(("--trace", MOONCAKE, {"timestamp": at}) for at in (1e300, float("nan"), float("inf"), "x", None, 10**400)),
        *(("--trace", MOONCAKE, {name: MAX_TOKENS + 1}) for name in ("input_length", "output_length")),
        *(("--trace", MOONCAKE, {name: float("nan")}) for name in ("input_length", "output_length")),
        *(("--trace", MOONCAKE, {"output_length": value}) for value in (-1, 1e300, 10**5000)),
        *(("--trace", MOONCAKE, {"hash_ids": value}) for value in ([1, float("inf")], [1, None], 5, "ab")),
        *(("--trace", AGENT, {"timestamp": at}) for at in (1e300, float("nan"))),
        *(("--decisions", DECISION, {"at": at}) for at in (1e300, float("nan"), None)),
        *(("--decisions", DECISION, {"block_size": size}) for size in (0, -1, 0.5, None)),
        *(("--decisions", DECISION, {"prompt_tokens": value}) for value in (0, 1 << 60, float("nan"), None)),
        *(("--decisions", DECISION, {"num_output": value}) for value in (1 << 60, float("inf"))),
        ("--decisions", DECISION, {"names": 5}),
    ],
)
def test_a_line_that_cannot_be_simulated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    path = tmp_path / "lines.jsonl"
    if changes == {"output_length": 10**5000}:
        text = json.dumps(row).replace('"output_length": 4', '"output_length": ' + "1" * 5000)
    else:
        text = json.dumps({**row, **changes})
    path.write_text(f"{json.dumps(row)}\n{text}\n", encoding="utf-8")
    failed(capsys, flag, str(path))


@pytest.mark.parametrize("flag", ["--trace", "--decisions", "--scenario"])
def test_what_is_nested_too_deeply_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    path = tmp_path / "deep.json"
    path.write_text(DEEP, encoding="utf-8")
    failed(capsys, flag, str(path), *(["--synthetic", "decode-heavy"] if flag == "--scenario" else []))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "flags",
    ["--speed nan", "--speed inf", "--speed 1e-300", "--rate nan", "--rate inf", "--blocks nan%", "--noise nan"],
)
def test_flags_that_are_no_number_to_simulate_with_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({**MOONCAKE, "timestamp": at}) + "\n" for at in (0, 500)), encoding="utf-8")
    source = ["--synthetic", "decode-heavy", "--requests", "2"] if "rate" in flags else ["--trace", str(path)]
    failed(capsys, *source, *flags.split())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "scenario",
    [
        {"event": [{"at": 1, "kind": "jump", "factors": [2], "every": 1e-9}]},
        {"event": [{"at": 1e300, "kind": "stop"}]},
        {"autoscale": {"min": 1, "max": 2, "high": 4, "low": 1, "interval": 1e-9}},
        {"autoscale": {"min": 1, "max": 1e9, "high": 4, "low": 1}},
        {"offload": {"blocks": 1e300, "tokens_per_s": 1}},
    ],
)
def test_a_scenario_that_never_ends_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: dict[str, Any]
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(scenario), encoding="utf-8")
    failed(capsys, "--synthetic", "decode-heavy", "--requests", "2", "--scenario", str(path))


def test_hash_ids_may_be_of_any_size_and_only_those_of_the_prompt_are_kept() -> None:
    rows = [{**MOONCAKE, "hash_ids": [2**70, 7, -5]}, {**MOONCAKE, "hash_ids": [2**70, 8]}]
    first, second = requests_from_trace(parse_trace(map(json.dumps, rows), TraceUnits(512)))
    assert (
        first.prompt_token_ids()[:512] == second.prompt_token_ids()[:512]
        and first.prompt_token_ids()[512:] != second.prompt_token_ids()[512:]
    )
    many = json.dumps({**MOONCAKE, "hash_ids": list(range(200_000))})
    parse_trace([many], TraceUnits(512))
    tracemalloc.start()
    (trace,) = requests_from_trace(parse_trace([many], TraceUnits(512)))
    assert len(trace.block_ids) == 2 and tracemalloc.get_traced_memory()[0] < 1 << 20
    tracemalloc.stop()
