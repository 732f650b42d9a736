"""A small run of benchmarks/fuzz on `headstart serve`: no 5xx, bounded memory, nothing left running."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_fuzz(*arguments: str) -> None:
    command = [sys.executable, "-m", "headstart_lab.fuzz.fuzz", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["valid"] and report["server_errors"] == 0 and report["polls"] > 0
    assert all(sum(counts.values()) > 0 for counts in report["statuses"].values())


def test_some_hundred_hostile_requests_leave_a_server_as_it_was() -> None:
    run_fuzz("--requests", "200", "--at-once", "8")


@pytest.mark.long
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_twenty_thousand_hostile_requests_leave_a_server_as_it_was(replicas: str) -> None:
    run_fuzz("--requests", "20000", "--replicas", replicas)
