"""`make serve` as a user runs it: in a terminal, ended by Ctrl-C."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
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


@pytest.mark.parametrize("command", [["serve"], ["serve", "--replicas", "2"], ["generate", "Hi"]])
def test_a_terminal_shows_a_line_before_torch_is_imported(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    slow = "import sys, time\nprint('TORCH', file=sys.stderr, flush=True)\nwhile True: time.sleep(0.05)\n"
    (tmp_path / "torch" / "__init__.py").write_text(slow, encoding="utf-8")
    python = ["env", f"PYTHONPATH={tmp_path}:{ROOT / 'src'}", "HEADSTART_PORT=0", sys.executable]
    _, shown = in_terminal([*python, "-m", "headstart", *command], [b"TORCH"])
    first, _, rest = shown.partition("\n")
    assert re.fullmatch(r"Headstart \S+ is starting\s*", first) and "TORCH" in rest, shown


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


class Index(BaseHTTPRequestHandler):
    """A package index that has everything."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def index() -> Iterator[str]:
    """The address of a package index that answers."""
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def installed(
    room: Path, torch_index: str, *, has_wheel: bool = False, has_gpu: bool = False, uv: str = ""
) -> list[str]:
    """The output of `make install` on Linux, with a pip that only says what it was asked for, and such a uv if any."""
    tools, bin = room / "tools", room / "venv" / "bin"
    tools.mkdir()
    bin.mkdir(parents=True)
    (bin / "python").symlink_to(sys.executable)
    script(bin / "pip", f'case "$*" in *--no-index*) exit {0 if has_wheel else 1};; esac; echo "pip $*"')
    if uv:
        script(bin / "uv", uv)
    script(tools / "uname", "echo Linux")
    (tools / "touch").symlink_to(str(shutil.which("touch")))
    if has_gpu:
        script(tools / "nvidia-smi", "exit 0")
    make = [str(shutil.which("make")), "install", f"VENV={room / 'venv'}", f"TORCH_INDEX={torch_index}"]
    environment = {"PATH": str(tools), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def taken(lines: list[str]) -> str:
    """The installation of torch, with what was said before it."""
    return "\n".join(lines[: 1 + next(i for i, line in enumerate(lines) if line.startswith("pip install"))])


@pytest.mark.parametrize("torch_index", ["", "http://127.0.0.1:9"])
def test_make_says_that_cuda_packages_come_before_it_takes_them(torch_index: str, tmp_path: Path) -> None:
    said = taken(installed(tmp_path, torch_index))
    reason = f"{torch_index} does not answer" if torch_index else "TORCH_INDEX is empty"
    assert reason in said and "CUDA packages" in said and "make TORCH_INDEX=URL" in said
    assert said.splitlines()[-1].startswith("pip install torch==")


def test_make_takes_the_cpu_build_where_its_index_answers_and_warns_of_nothing(tmp_path: Path) -> None:
    with index() as url:
        said = taken(installed(tmp_path, url))
    assert "CUDA" not in said and f"pip install --no-deps --index-url {url} torch==" in said


@pytest.mark.parametrize("found", [{"has_wheel": True}, {"has_gpu": True}])
def test_make_warns_of_nothing_where_a_wheel_or_a_gpu_is_there(found: dict[str, bool], tmp_path: Path) -> None:
    assert "CUDA" not in "".join(installed(tmp_path, "http://127.0.0.1:9", **found))


@pytest.mark.parametrize("fails", [False, True])
def test_make_installs_with_uv_from_the_index_of_pip_and_with_pip_if_it_fails(fails: bool, tmp_path: Path) -> None:
    said = installed(tmp_path, "", has_wheel=True, uv=f'echo "uv $* from $UV_DEFAULT_INDEX"; exit {int(fails)}')
    python = tmp_path / "venv" / "bin" / "python"
    assert f"uv pip install --quiet --python {python} -e .[engine] from pip config get global.index-url" in said
    assert ("pip install --quiet -e .[engine]" in said) == fails


@pytest.mark.parametrize(("types", "tests"), [(0, 0), (1, 0), (0, 1)])
def test_make_test_checks_types_beside_the_tests_and_fails_with_either(types: int, tests: int, tmp_path: Path) -> None:
    bin = tmp_path / "venv" / "bin"
    bin.mkdir(parents=True)
    for stamp in (".installed", ".installed-dev"):
        (tmp_path / "venv" / stamp).touch()
    script(bin / "ruff", "exit 0")
    script(bin / "pyrefly", f"echo a report; exit {types}")
    script(bin / "python", f'case "$*" in *pytest*) echo 12 passed; exit {tests};; esac')
    make = ["make", "test", f"VENV={tmp_path / 'venv'}", f"PYTHON={bin / 'python'}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == (2 if types or tests else 0), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == ("a report" if types else "12 passed")
