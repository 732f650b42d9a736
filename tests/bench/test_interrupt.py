"""Ctrl-C in the middle of a measurement, in a real process: exit code 130, one word, and nothing left at work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.stub_endpoint import Stub, serving

# As from a terminal: what runs in the background of a shell, tests included, inherits that SIGINT is ignored.
HEADSTART = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from headstart.cli.main import main
sys.exit(main())
"""
LONG = ("--groups", "2", "--prompts", "2", "--prefix-tokens", "32", "--output-tokens", "1900")


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def interrupted(arguments: tuple[str, ...], is_measuring: Callable[[Path], bool], folder: Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a verb that gets SIGINT once it measures."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", HEADSTART, "bench", *arguments], env=environment, stdout=stdout, stderr=stderr
        )
        try:
            assert wait_until(lambda: is_measuring(err) or process.poll() is not None), err.read_text()
            process.send_signal(signal.SIGINT)
            code = process.wait(120)
        finally:
            process.kill()
    return code, out.read_text(), err.read_text()


def test_against_a_server_all_streams_are_closed(tmp_path: Path) -> None:
    stub = Stub(seconds_per_token=0.1)
    with serving(stub) as url:
        arguments = ("shared-prefix", "--against", url, *LONG)
        code, out, err = interrupted(arguments, lambda _: stub.now == 4, tmp_path)
        assert (code, out) == (130, "") and err.splitlines()[-1] == "interrupted" and "Traceback" not in err
        assert wait_until(lambda: stub.now == 0) and stub.gone == 4


def test_in_this_process_too(tmp_path: Path, tiny: str) -> None:
    arguments = ("shared-prefix", "--model", tiny, "--runs", "1000000", "--threads", "1")
    code, out, err = interrupted(arguments, lambda err: "cold" in err.read_text().rpartition("\n")[0], tmp_path)
    assert (code, out) == (130, "") and err.splitlines()[-1] == "interrupted" and "Traceback" not in err
