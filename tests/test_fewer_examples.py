"""The share of examples that property tests run in `make test` (fewer_examples.py), in runs on a file of this test."""

import subprocess
import sys
from pathlib import Path

import fewer_examples
import pytest

TESTS = """
import pytest
from hypothesis import given, settings, strategies as st
COUNTS = {}

@pytest.fixture(scope="module", autouse=True)
def counts():
    yield
    print("COUNTS", sorted(COUNTS.items()))

@settings(database=None, derandomize=True)
@given(st.integers())
def test_default(number):
    COUNTS["default"] = COUNTS.get("default", 0) + 1

@pytest.mark.parametrize("case", [1, 2])
@settings(max_examples=500, database=None, derandomize=True)
@given(number=st.integers())
def test_many(case, number):
    COUNTS[str(case)] = COUNTS.get(str(case), 0) + 1

class TestMethods:
    @settings(max_examples=12, database=None, derandomize=True)
    @given(st.integers())
    def test_few(self, number):
        COUNTS["few"] = COUNTS.get("few", 0) + 1
"""


@pytest.mark.parametrize(
    ("share", "counts"),
    [
        ("0.4", [("1", 200), ("2", 200), ("default", 40), ("few", 10)]),
        ("1", [("1", 500), ("2", 500), ("default", 100), ("few", 12)]),
    ],
)
def test_each_property_runs_its_share_of_examples(share: str, counts: list[tuple[str, int]], tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    path = str(Path(fewer_examples.__file__).parent)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-p",
        "fewer_examples",
        "-p",
        "no:cacheprovider",
        "--examples",
        share,
    ]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == 0 and f"COUNTS {counts}" in ended.stdout, ended.stdout
