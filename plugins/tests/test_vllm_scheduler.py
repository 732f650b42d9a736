"""The scheduler plug-in in vLLM: its own scheduler stepped without a model, beside vLLM's."""

import re

import pytest
from vllm_environment import SCRIPTS, run_script

pytestmark = pytest.mark.long
SCRIPT = "use_scheduler.py"
CHECKS = re.findall(r"^def (check_\w+)", (SCRIPTS / SCRIPT).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def outcome() -> dict[str, str | None]:
    """The error of each check; all run in one process, since importing vLLM takes long."""
    found = run_script(SCRIPT)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_scheduler(check: str, outcome: dict[str, str | None]) -> None:
    if outcome[check] is not None:
        pytest.fail(str(outcome[check]), pytrace=False)
