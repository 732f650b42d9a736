"""`make serve` as a user runs it: in a terminal, ended by Ctrl-C."""

import os
import pty
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CTRL_C = b"\x03"
READY = b"max_tokens"  # in the last line of the banner

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An installed environment: its `headstart` is the command of this checkout, run by this Python."""
    bin = tmp_path / "venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python").symlink_to(sys.executable)
    (bin / "headstart").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headstart "$@"\n')
    (bin / "headstart").chmod(0o755)
    (tmp_path / "venv" / ".installed").touch()
    return tmp_path / "venv"


def in_terminal(command: list[str], press: list[bytes]) -> tuple[int, str]:
    """Runs a command in a terminal of its own and presses Ctrl-C after each text that comes; its end and its output."""
    outer = {
        "MAKEFLAGS",
        "MFLAGS",
        "MAKEOVERRIDES",
        "MAKELEVEL",
        "MAKE_TERMOUT",
        "MAKE_TERMERR",
    }  # of `make test` itself
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    environment = {**inherited, "PYTHONPATH": str(ROOT / "src"), "TERM": "dumb", "COLUMNS": "120"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, environment)
    shown, waiting = b"", list(press)
    for part in parts(terminal):
        shown += part
        while waiting and waiting[0] in shown:
            os.write(terminal, CTRL_C)
            waiting.pop(0)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert not waiting, shown
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


def parts(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux says so when the last process has ended
            return
        if not part:
            return
        yield part


@pytest.mark.parametrize("presses", [[READY], [b"SLOW"]])
def test_ctrl_c_under_make_ends_without_an_error_of_make(presses: list[bytes], venv: Path) -> None:
    command = ["make", "--no-print-directory", "serve", f"VENV={venv}", "ARGS=--port 0 --num-blocks 64"]
    if presses == [b"SLOW"]:  # the command line is still being imported
        (venv / "slow").mkdir()
        (venv / "slow" / "typer.py").write_text(
            "import time\nprint('SLOW', flush=True)\nwhile True: time.sleep(0.05)\n"
        )
        (venv / "bin" / "headstart").write_text(
            f'#!/bin/sh\nPYTHONPATH="{venv / "slow"}:$PYTHONPATH" exec "{sys.executable}" -m headstart "$@"\n'
        )
    code, shown = in_terminal(command, presses)
    assert code == -signal.SIGINT  # of make, as of every make that is interrupted
    assert "***" not in shown and "Traceback" not in shown and "Error" not in shown, shown


def test_a_second_ctrl_c_under_make_is_no_error_either_and_130_without_make(venv: Path) -> None:
    (venv / "slow").mkdir()
    (venv / "slow" / "sitecustomize.py").write_text(
        "import sys, types\ncli = types.ModuleType('headstart.cli.main')\ncli.main = lambda: print('SLOW') or 130\n"
        "sys.modules['headstart.cli.main'] = cli\n"
    )
    (venv / "bin" / "headstart").write_text(
        f'#!/bin/sh\nPYTHONPATH="{venv / "slow"}:$PYTHONPATH" exec "{sys.executable}" -m headstart "$@"\n'
    )
    code, shown = in_terminal(["make", "serve", f"VENV={venv}"], [])
    assert (code, shown.split()) == (0, ["SLOW"])
    code, shown = in_terminal([str(venv / "bin" / "headstart"), "serve"], [])
    assert (code, shown.split()) == (130, ["SLOW"])
