"""The clients that are in the tests' own environment, openai and anthropic: the scripts of test_clients.py."""

import re
import sys
from pathlib import Path

import pytest
from clients.client_runs import run_checks
from clients.environments import CLIENTS, Client

SDKS = [client for client in CLIENTS if client.name in ("openai", "anthropic")]


PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def test_the_page_lists_clients_versions_and_checks() -> None:
    rows = re.findall(r"^\| `(\S+)`(?: \(npm\))? \| (\S+) \|.*\| (.+) \| .+ \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    listed = {(name, version) for name, version, _ in rows}
    split = [
        requirement.replace("==", "@").rpartition("@") for client in CLIENTS for requirement in client.requirements
    ]
    needed = {(re.sub(r"\[.*]", "", name), version) for name, _, version in split}
    assert needed - listed <= {("zod", "4.6.7"), ("mcp", "2.3.0")} and listed <= needed
    counts = [checks for _, _, checks in rows if checks != "as above"]
    assert counts == [f"{len(client.checks())} of {len(client.checks())}" for client in CLIENTS]


@pytest.mark.parametrize("client", SDKS, ids=lambda client: client.name)
def test_all_checks_pass(client: Client, direct: tuple[str, str]) -> None:
    outcomes = run_checks(client, [sys.executable, str(client.path)], direct)
    assert len(outcomes) > 8
    errors = [f"{check}: {error}" for check, error in outcomes.items() if error is not None]
    assert not errors, "\n".join(errors)
