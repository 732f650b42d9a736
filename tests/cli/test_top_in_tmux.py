"""`headstart top` in a terminal, compared by text, while its server is busy, dies and returns."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.harness import ROOT, quiet_port, spawn, wait_for

from headstart.cli.live.top_verb import _patient
from headstart.model.weights.init_model import write_random_model

COLUMNS, ROWS = 110, 28

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Terminal:
    """A tmux server of its own with one window in which a command runs."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        path = os.pathsep.join(str(ROOT / name) for name in ("src", "lab/src"))
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        start = ("new-session", "-d", *size, "-e", f"PYTHONPATH={path}", "-e", "TERM=screen-256color")
        words = [*self._tmux, *start, *command, ";", "set", "remain-on-exit", "on"]
        sizes = ("COLUMNS", "LINES", "TMUX")  # of the terminal of the tests
        subprocess.run(words, check=True, env={name: os.environ[name] for name in os.environ if name not in sizes})

    def lines(self) -> list[str]:
        """Return what is on the screen, without blanks at the ends of lines and empty lines at its end."""
        done = subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True)
        return [line.rstrip() for line in done.stdout.rstrip().split("\n")]

    def press(self, key: str) -> None:
        subprocess.run([*self._tmux, "send-keys", key], check=True)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


@pytest.fixture
def url() -> str:
    return f"http://127.0.0.1:{quiet_port()}"


@pytest.fixture
def terminal(tmp_path: Path, url: str) -> Iterator[Terminal]:
    words = [sys.executable, "-m", "headstart", "top", "--interval", "0.2", "--url", url]
    terminal = Terminal(tmp_path, words)
    yield terminal
    terminal.close()


def expected(url: str) -> list[str]:
    return [line.rstrip() for line in "\n".join(_patient(url, COLUMNS, ROWS)).rstrip().split("\n")]


def timeless(lines: list[str]) -> list[str]:
    """Return the lines without the age of the window, which grows while one looks."""
    return [re.sub(r"in the last \d+ s", "in the last", line) for line in lines]


def test_the_screen_is_that_of_the_text_and_survives_a_server_that_dies_and_returns(
    tmp_path: Path, url: str, terminal: Terminal
) -> None:
    wait_for(lambda: terminal.lines() == expected(url) and "no server answers" in terminal.lines()[0])
    model = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    words = [sys.executable, "-m", "headstart", "serve", str(model), "--port", url.rpartition(":")[2]]
    command = [*words, "--num-blocks", "64", "--heartbeat-timeout", "600"]
    for life in ("first", "second"):
        with spawn(command, tmp_path / f"log of the {life}") as server:
            server.wait_ready()
            text = f"the {life} life of a server and of its cache " * 6
            for end in ("one", "two"):
                server.post("/v1/completions", json={"prompt": text + end, "max_tokens": 1})
            wait_for(lambda: timeless(terminal.lines()) == timeless(expected(url)))
            shown = terminal.lines()
            assert shown[0] == f"Headstart  tiny  {url}" and any(f"the {life} life" in line for line in shown)
            assert len(shown) > 10
            server.kill()
        wait_for(lambda: terminal.lines() == expected(url) and "no server answers" in terminal.lines()[0])
    terminal.press("C-c")
    wait_for(lambda: "Pane is dead" in terminal.lines()[-1] or "Pane is dead" in "".join(terminal.lines()))
    assert not any("Traceback" in line for line in terminal.lines())
