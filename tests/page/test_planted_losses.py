"""The losses that readers look for (benchmarks/readers): the page names the client that loses, and the cause."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clients.environments import PLAYWRIGHT, UnreachableError, environment
from server.harness import ROOT, wait_for

READERS = ROOT / "benchmarks" / "readers"
ROW = re.compile(r'row "(?P<client>\w+) [\d,]+ \d+ % (?P<computed>[\d,]+) (?P<evicted>[\d,]+) (?P<cause>.+) [\d,]+"')

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="Debian's chromium is not installed"),
]


def page_text(url: str, key: str, folder: Path) -> str:
    try:
        python = environment(PLAYWRIGHT) / "bin" / "python"
    except UnreachableError as error:
        pytest.skip(str(error))
    words = [str(python), str(READERS / "look.py"), url, "--key", key, "--picture", str(folder / "page.png")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("loss", "role"), [("A", "clock"), ("B", "many_handbooks")])
def test_the_page_names_who_loses_and_why(loss: str, role: str, tmp_path: Path) -> None:
    source = os.pathsep.join(str(ROOT / name) for name in ("src", "lab/src"))
    words = [sys.executable, str(READERS / "planted.py"), loss, "--seed", "1", "--folder", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source})
    try:
        assert process.stdout is not None
        told: dict[str, Any] = json.loads(process.stdout.readline())
        answers = Path(told["answers"])
        wait_for(lambda: len(answers.read_text().splitlines()) > 120)
        rows = [found.groupdict() for found in ROW.finditer(page_text(told["url"], told["admin_key"], tmp_path))]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    (loser,) = (name for name, drawn in json.loads((tmp_path / "solution.json").read_text()).items() if drawn == role)
    assert len(rows) == 3
    if loss == "A":
        assert {row["client"]: row["cause"] for row in rows if row["cause"] != "-"} == {loser: "timestamp"}
    else:
        assert max(rows, key=lambda row: int(row["evicted"].replace(",", "")))["client"] == loser
