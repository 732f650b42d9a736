"""Coding agents as released, run against a scripted model in a network namespace of their own: docs/agents.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clients.agent_run import RUN_SECONDS, WORD
from clients.environments import AGENTS, Program, UnreachableError, environment

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
ISOLATED = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_runs_a_tool_and_answers_with_its_output(agent: Program, tmp_path: Path) -> None:
    if subprocess.run([*ISOLATED, "true"], capture_output=True).returncode:
        pytest.skip("needs network namespaces: no agent may reach a network")
    try:
        [binary] = environment(agent).glob(agent.binary)
    except UnreachableError as error:
        pytest.skip(str(error))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [*ISOLATED, sys.executable, "-m", "clients.agent_run", agent.name, str(binary), str(tmp_path)]
    options = {"capture_output": True, "text": True, "timeout": RUN_SECONDS + 300}
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, **options)
    assert done.stdout, done.stderr
    ran = json.loads(done.stdout.splitlines()[-1])
    assert ran["code"] == 0 and "The note says: " in ran["out"] and WORD in ran["out"], ran
    assert set(ran["skipped"]) == set(agent.skipped), ran


def test_the_page_names_the_versions() -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    versions = {agent.name: agent.requirements[0].replace("==", "@").rpartition("@")[2] for agent in AGENTS}
    assert [name for name, version in versions.items() if version not in page] == []
