"""The order of test files and their limit (file_seconds.py), in runs of pytest on files of this test."""

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import file_seconds
import httpx
import httpx2
import pytest

SPIN = (
    "import time\ndef test_it():\n    began = time.process_time()\n    while time.process_time() < began + {}: pass\n"
)
CHILD = "import subprocess, sys\ndef test_it():\n    subprocess.run([sys.executable, '-c', {!r}], check=True)\n"
OWN_RECORD = "import file_seconds\nfile_seconds.RECORD = file_seconds.Path(__file__).with_name('record.json')\n"


def run_pytest(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "pytest.ini").write_text("[pytest]\n")
    path = str(Path(file_seconds.__file__).parent)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "file_seconds",
        "-p",
        "forked_workers",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": path}, capture_output=True, text=True)


def test_a_file_that_takes_too_much_cpu_time_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_quick.py").write_text(SPIN.format(0.01))
    (tmp_path / "test_slow.py").write_text(SPIN.format(0.7))
    (tmp_path / "test_slow_child.py").write_text(CHILD.format(SPIN.format(0.7) + "test_it()"))
    for workers in ("0", "1"):
        ended = run_pytest(tmp_path, "--forks", workers, "--max-file-seconds", "0.6")
        assert ended.returncode == 1, ended.stdout
        assert re.findall(r"FAILED (\S+): 1 s of CPU time", ended.stdout) == ["test_slow.py", "test_slow_child.py"]
    assert run_pytest(tmp_path).returncode == 0
    assert run_pytest(tmp_path, "--max-file-seconds", "60").returncode == 0


def test_processes_begin_with_the_files_that_took_longest(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "conftest.py").write_text(OWN_RECORD)
    (tmp_path / "record.json").write_text(json.dumps({"test_b.py": 2.5, "test_d.py": 40.0}))
    ended = run_pytest(tmp_path, "-v", "--forks", "1")
    assert re.findall(r"test_(\w)\.py::test_one PASSED", ended.stdout) == ["d", "b", "a", "c"], ended.stdout
    alone = run_pytest(tmp_path, "-v")
    assert re.findall(r"test_(\w)\.py::test_one PASSED", alone.stdout) == ["a", "b", "c", "d"], alone.stdout


def test_a_run_records_the_seconds_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "test_quick.py").write_text(SPIN.format(0.01))
    (tmp_path / "test_slow.py").write_text(SPIN.format(1.1))
    (tmp_path / "conftest.py").write_text(OWN_RECORD)
    run_pytest(tmp_path, "--forks", "1", "--record-file-seconds")
    assert list(json.loads((tmp_path / "record.json").read_text())) == ["test_slow.py"]


def test_no_file_took_a_minute_when_they_were_recorded() -> None:
    record = json.loads(file_seconds.RECORD.read_text(encoding="utf-8"))
    assert record and max(record.values()) <= 60


def test_garbage_collections_leave_out_what_collecting_the_tests_has_left() -> None:
    assert gc.get_freeze_count() > 10 * len(sys.modules)


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_clients_share_the_certificates_that_are_read(library: Any) -> None:
    one, two = (client._transport._pool for client in (library.Client(), library.AsyncClient()))
    assert one._ssl_context is two._ssl_context
