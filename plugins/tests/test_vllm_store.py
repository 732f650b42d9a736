"""The store connector and the tier in vLLM's own managers, with KV whose content is known; see the scripts."""

import re
from functools import lru_cache
from pathlib import Path

import pytest
from vllm_environment import SCRIPTS, run_script

pytestmark = pytest.mark.long
CHECKS = [
    (script, check)
    for script in ("use_store.py", "use_tier.py")
    for check in re.findall(r"^def (check_\w+)", (SCRIPTS / script).read_text(encoding="utf-8"), re.MULTILINE)
]


@lru_cache
def outcome(script: str, folder: Path) -> dict[str, str | None]:
    """The error of each check; all of a script run in one process, since importing vLLM takes long."""
    found = run_script(script, str(folder))
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize(("script", "check"), CHECKS)
def test_store(script: str, check: str, folder: Path) -> None:
    error = outcome(script, folder)[check]
    if error is not None:
        pytest.fail(error, pytrace=False)
