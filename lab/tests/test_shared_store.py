"""Two servers that agree on a folder: real ones once, and made-up ones for exact figures and planted faults."""

from dataclasses import replace
from pathlib import Path

import pytest
from made_up import replicas_with, setup_for
from stored_servers import wait_for_blocks

from headstart_lab.store import shared_store as lab_siblings
from headstart_lab.store.shared_store import QUICK, SiblingsConfig, run_siblings

CONFIG = SiblingsConfig(
    prompts=4, tokens=32, runs=2, settle=0.0, delays=(0.0, 0.01), prompts_per_delay=2, tenant_prompts=2
)


def test_what_a_computed_costs_b_one_token_per_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_siblings, "replica", replicas_with(""))
    report = run_siblings(setup_for(""), CONFIG)
    values = report.values
    assert report.problems == [] and (report.model, report.runs) == ("a label", 2)
    assert values["computed_by_b"] == values["least_possible"] == 1 / 32
    assert values["computed_by_b_after_s"] == {"0": 1 / 32, "0.01": 1 / 32}
    assert values["tokens_loaded_of_another_tenant"] == values["answers_differ"] == 0
    assert values["tokens_loaded_by_their_owner"] == 2 * 2 * 31  # runs, prompts, tokens


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("leak", "B loaded 124 tokens of another tenant"),
        ("blind", "the tenant test proves nothing"),
        ("wrong", "16 answers of B differ in float32"),
        ("miscount", "run 1 of 2: B's /metrics count 16 computed tokens, its answers 8"),
        ("failing", "run 1 of 2: 16 requests failed, the first with: HTTP 500"),
    ],
)
def test_a_fault_of_the_servers_invalidates_the_report(
    monkeypatch: pytest.MonkeyPatch, fault: str, complaint: str
) -> None:
    monkeypatch.setattr(lab_siblings, "replica", replicas_with(fault))
    problems = run_siblings(setup_for(""), CONFIG).problems
    assert any(complaint in problem for problem in problems), problems


@pytest.mark.long
def test_real_siblings_share_a_folder_and_keep_tenants_apart(
    monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    wait_for_blocks(monkeypatch, lab_siblings, QUICK.settle)
    report = run_siblings(setup_for(tiny), replace(QUICK, folder=tmp_path))
    assert report.problems == [] and list(tmp_path.iterdir()) == []
    assert report.values["computed_by_b"] == 1 / QUICK.tokens and report.values["tokens_loaded_of_another_tenant"] == 0
