"""Runs tests with planted bugs: reads {bug: [tests]} as JSON and prints {bug: [exit code, last output]}.

Each run is a fork of this process, which has imported what the tests need: that takes longer than most runs. The bug
"" plants nothing. Every run ends with its first failure.
"""

import gc
import json
import os
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import hypothesis.stateful  # noqa: F401
import pytest

import headstart.core.engine
import headstart.store.disk  # noqa: F401

KEPT = 20_000  # characters of output; with CI=true pytest prints whole comparisons at the end


def run(bug: str, tests: list[str]) -> tuple[int, str]:
    """Return pytest's exit code and the end of its output."""
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ["HEADSTART_PLANT"] = bug
            code = pytest.main(["-x", "-p", "plant", "-p", "no:cacheprovider", "--no-header", *tests])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return code, output.read().decode(errors="replace")[-KEPT:]


def main() -> None:
    """Run all of them, one after the other."""
    asked: dict[str, list[str]] = json.load(sys.stdin)
    os.chdir(Path(__file__).parents[2])
    for plugin in entry_points(group="pytest11"):  # what each run would import
        if plugin.name != "schemathesis":
            plugin.load()
    gc.collect()
    gc.freeze()
    print(json.dumps({bug: run(bug, tests) for bug, tests in asked.items()}))


if __name__ == "__main__":
    main()
