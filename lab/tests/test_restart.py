"""Killed and started again: a real server once, and made-up ones for exact figures and planted faults."""

from dataclasses import replace
from pathlib import Path

import pytest
from made_up import replicas_with, setup_for
from stored_servers import wait_for_blocks

from headstart_lab.store import restart as lab_restart
from headstart_lab.store.restart import QUICK, Form, RestartConfig, run_restart

CONFIG = RestartConfig(
    prompts=4, tokens=32, runs=2, forms=(Form("first"), Form("second", drop_pages=True)), openings=()
)


def test_a_store_that_kept_all_costs_one_token_per_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_restart, "replica", replicas_with(""))
    report = run_restart(setup_for(""), CONFIG)
    values = report.values
    assert report.problems == [] and list(values["forms"]) == ["first", "second"]
    assert values["redundancy_after_restart"] == 1.0 and values["store_token_share"] == 31 / 32
    assert values["ttft_cold_ms"] == values["ttft_warm_ms"] == pytest.approx(100.0)
    assert values["ttft_restart_over_cold"] == pytest.approx(1.0) and values["ready_restart_s"] == 0.5
    assert values["answers_differ"] == 0 and values["start_s"] is None


def test_a_store_that_lost_all_is_as_redundant_as_its_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_restart, "replica", replicas_with("blind"))
    report = run_restart(setup_for(""), CONFIG)
    assert report.problems == []  # bad, but measured
    assert report.values["redundancy_after_restart"] == 32.0 and report.values["store_token_share"] == 0.0


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("wrong", "16 answers after a restart differ in float32"),
        ("miscount", "/metrics counts 8 computed tokens, the answers 4"),
        ("failing", "first, restart: 4 requests failed, the first with: HTTP 500"),
    ],
)
def test_a_fault_of_the_server_invalidates_the_report(
    monkeypatch: pytest.MonkeyPatch, fault: str, complaint: str
) -> None:
    monkeypatch.setattr(lab_restart, "replica", replicas_with(fault))
    problems = run_restart(setup_for(""), CONFIG).problems
    assert any(complaint in problem for problem in problems), problems


@pytest.mark.long
def test_a_real_server_finds_after_kill_9_what_it_had_stored(
    monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    wait_for_blocks(monkeypatch, lab_restart, QUICK.forms[0].grace)
    report = run_restart(setup_for(tiny), replace(QUICK, folder=tmp_path))
    values = report.values
    assert report.problems == [] and list(tmp_path.iterdir()) == []
    assert values["store_token_share"] == 1 - 1 / QUICK.tokens and values["answers_differ"] == 0
    assert values["disk_bytes"] > 0 and values["start_s"] > 0
    assert values["openings"]["small"]["blocks_found"] == 100
