"""The live page of real servers in Debian's chromium, driven by Playwright in an environment of its own."""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from clients.environments import PLAYWRIGHT, UnreachableError, environment
from server.harness import spawn

from headstart.model.weights.init_model import write_random_model

CHECKS = Path(__file__).with_name("browser_checks.py")
SIZES = ["--port", "0", "--num-blocks", "512", "--max-model-len", "1024", "--heartbeat-timeout", "600"]
KEYS = ["--api-key", "a", "--api-key", "b", "--admin-api-key", "root"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed")
def test_every_check_passes_in_a_browser(tmp_path: Path) -> None:
    try:
        python = environment(PLAYWRIGHT) / "bin" / "python"
    except UnreachableError as error:
        pytest.skip(str(error))
    model = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    serve = [sys.executable, "-m", "headstart", "serve", str(model), *SIZES]
    with ExitStack() as stack:
        commands = ([*serve, "--root-path", "/llm"], [*serve, *KEYS], [*serve, "--replicas", "2"])
        started = [stack.enter_context(spawn(words, tmp_path / f"log-{i}")) for i, words in enumerate(commands)]
        urls = [server.wait_ready().url for server in started]
        words = [str(python), str(CHECKS), *urls, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    print(done.stderr)  # times: for benchmarks/readers/README.md
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == 7
    assert [outcome for outcome in outcomes if outcome["error"] is not None] == []
