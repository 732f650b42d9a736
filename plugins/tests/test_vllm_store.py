"""The store connector in vLLM's scheduler, with KV whose content is known; see vllm_scripts/use_store.py."""

import re
from pathlib import Path

import pytest
from vllm_environment import SCRIPTS, run_script

pytestmark = pytest.mark.long
SCRIPT = "use_store.py"
CHECKS = re.findall(r"^def (check_\w+)", (SCRIPTS / SCRIPT).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The error of each check; all run in one process, since importing vLLM takes long."""
    folder: Path = tmp_path_factory.mktemp("store")
    found = run_script(SCRIPT, str(folder))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_store(check: str, outcome: dict[str, str | None]) -> None:
    if outcome[check] is not None:
        pytest.fail(str(outcome[check]), pytrace=False)
