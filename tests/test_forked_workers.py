"""Tests in forked processes (forked_workers.py), in runs of pytest on files of this test."""

import re
import subprocess
import sys
from pathlib import Path

import forked_workers
import pytest

COLLECTED = "import os\nPARENT = os.getppid()\nCOLLECTING = os.getpid()\n"
SESSION = """
import os, pathlib, pytest
@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    with open(os.environ["LOG"], "a") as log: log.write(f"begin {os.getpid()} {folder}\\n")
    yield folder
    with open(os.environ["LOG"], "a") as log: log.write(f"end {os.getpid()} {folder}\\n")
"""
USING = "import os\ndef test_it(shared, tmp_path): assert os.listdir(tmp_path) == []\n"


def run_pytest(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {"PYTHONPATH": str(Path(forked_workers.__file__).parent), "LOG": str(folder / "log")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "forked_workers", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_files_are_collected_once_and_a_failure_is_shown_with_what_it_printed(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(
            f"{COLLECTED}def test_it():\n    print('printed by {name}')\n"
            "    assert os.getppid() == COLLECTING\n"
            f"    assert {name!r} != 'c'\n"
        )
    ended = run_pytest(tmp_path, "--forks", "2")
    assert ended.returncode == 1 and "1 failed, 3 passed" in ended.stdout, ended.stdout
    assert "printed by c" in ended.stdout and not re.search("printed by [abd]", ended.stdout)
    assert "1 failed" in run_pytest(tmp_path, "--forks", "2", "-x").stdout
    assert re.search(r"^\.*F test_c.py::test_it$", ended.stdout, re.MULTILINE), ended.stdout  # at once


def test_every_process_has_fixtures_of_the_session_once_and_a_folder_of_its_own(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"test_{number}.py").write_text(USING)
    (tmp_path / "conftest.py").write_text(SESSION)
    ended = run_pytest(tmp_path, "--forks", "3")
    assert ended.returncode == 0 and "12 passed" in ended.stdout, ended.stdout
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    begun = [tuple(rest) for word, *rest in lines if word == "begin"]
    assert sorted(begun) == sorted(tuple(rest) for word, *rest in lines if word == "end")
    assert len(begun) == len({process for process, _ in begun}) == len({folder for _, folder in begun}) <= 3


@pytest.mark.parametrize(
    ("death", "code"), [("os.kill(os.getpid(), 9)", "-9"), ("os._exit(3)", "3"), ("os._exit(0)", "0")]
)
def test_tests_of_a_process_that_dies_fail_with_its_exit_code(tmp_path: Path, death: str, code: str) -> None:
    (tmp_path / "test_a.py").write_text(
        f"import os\ndef test_one(): pass\ndef test_two(): {death}\ndef test_three(): pass\n"
    )
    for name in "bcd":
        (tmp_path / f"test_{name}.py").write_text("import time\ndef test_it(): time.sleep(0.3)\n")
    ended = run_pytest(tmp_path, "--forks", "2")
    assert ended.returncode == 1, ended.stdout
    names = re.findall(r"^FAILED (\S+) - not run to its end", ended.stdout, re.MULTILINE)
    assert names[:2] == ["test_a.py::test_two", "test_a.py::test_three"] and len(names) <= 3, ended.stdout
    assert all(code in codes.split(", ") for codes in re.findall(r"with the exit codes \[(.*)\]", ended.stdout))


def test_warnings_are_told_and_a_test_that_does_not_import_ends_the_run(tmp_path: Path) -> None:
    warning = "import warnings\nclass Own(UserWarning): ...\ndef test_it(): warnings.warn('mind this', Own)\n"
    (tmp_path / "test_a.py").write_text(warning)
    (tmp_path / "test_c.py").write_text("import warnings\nwarnings.warn('collected')\ndef test_it(): pass\n")
    told = run_pytest(tmp_path, "--forks", "2").stdout
    assert "mind this" in told and "2 passed, 2 warnings" in told, told
    (tmp_path / "test_b.py").write_text("import no_such_module\n")
    ended = run_pytest(tmp_path, "--forks", "1")
    assert ended.returncode == 2 and "no_such_module" in ended.stdout
