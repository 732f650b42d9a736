"""Every planted bug is caught by the suite of laws; a law that no bug can break would prove nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plant import BUGS

HERE = Path(__file__).parent
BY_HAND = ("laws_by_hand", "promises", "order", "isolation", "tenants_apart")
CORE = HERE.parent / "core"
QUICK = [*(HERE / f"test_{name}.py" for name in BY_HAND), CORE / "test_transfers.py", CORE / "test_trust.py"]
SLOW = [HERE / "test_laws.py", *sorted(file for file in CORE.glob("test_*.py") if file not in QUICK)]
SUITE = [*QUICK, *SLOW]  # a run ends with the first failure; files, since pytest puts a folder before files inside it


def run_suite(bug: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HEADSTART_PLANT": bug, "PYTHONPATH": os.pathsep.join(str(p) for p in (HERE, *sys.path) if p)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "plant", "-p", "no:cacheprovider", "--no-header"]
    return subprocess.run([*command, *map(str, SUITE)], env=env, capture_output=True, text=True, timeout=850)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug: str) -> None:
    result = run_suite(bug)
    assert result.returncode == 1, f"{bug} was not caught:\n{result.stdout[-2000:]}"
    assert "FAILED" in result.stdout, result.stdout[-2000:]


def test_suite_passes_without_a_bug() -> None:
    result = run_suite("")
    assert result.returncode == 0, result.stdout[-2000:]
