"""A forked server is what a true start is: output, exit code, signals, process group, engine and environment."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from server import fork_server
from server.fork_server import CAN_FORK, Forked
from server.harness import (
    fake_command,
    fork_processes,
    inside,
    server_environment,
    spawn,
    start_processes_truly,
    wait_for,
)

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="no descriptors of processes here")


@pytest.fixture(autouse=True)
def usual_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that other tests have left is usual here."""
    monkeypatch.setattr(fork_server, "SURROUNDINGS", dict(os.environ))


@pytest.mark.parametrize("truly", [False, True])
def test_exit_code_and_output_are_those_of_the_command(truly: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headstart", "serve", str(tmp_path / "nope"), "--port", "0"]
    with spawn(command, tmp_path / "log", truly=truly) as server:
        assert isinstance(server.process, Forked) == (not truly)
        assert server.wait() == 2 and server.process.poll() == 2
    assert server.log.startswith("headstart: there is no folder") and server.log.count("\n") == 1


@pytest.mark.parametrize("truly", [False, True])
def test_a_failure_while_loading_is_shown_and_code_1(truly: bool, folder: str, tmp_path: Path) -> None:
    with spawn(fake_command(f"{folder}?broken=1"), tmp_path / "log", truly=truly) as server:
        assert server.wait() == 1
    assert "RuntimeError: a bug while loading" in server.log and "Traceback" in server.log


@pytest.mark.parametrize("truly", [False, True])
def test_signals_reach_the_server_alone_and_its_engine_goes_with_it(truly: bool, folder: str, tmp_path: Path) -> None:
    with spawn(fake_command(folder), tmp_path / "log", truly=truly) as server:
        engine = psutil.Process(server.wait_ready().process.pid).children()[0]
        assert len({os.getpgid(server.process.pid), os.getpgid(engine.pid), os.getpgid(server.process.pid)}) == 2
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    with spawn(fake_command(folder), tmp_path / "log", truly=truly) as server:
        assert server.wait_ready().stop(signal.SIGINT) == 0
        assert "the fake engine was closed" in server.log


@pytest.mark.parametrize("truly", [False, True])
@pytest.mark.parametrize("umask", [0, 0o077])
def test_the_umask_is_of_the_server_and_its_engine(truly: bool, umask: int, folder: str, tmp_path: Path) -> None:
    with spawn(fake_command(folder), tmp_path / "log", truly=truly, umask=umask) as server:
        front = psutil.Process(server.wait_ready().process.pid)
        for process in (front, front.children()[0]):
            assert f"Umask:\t{umask:04o}\n" in Path(f"/proc/{process.pid}/status").read_text()


def test_one_server_leaves_no_trace_in_the_next(folder: str, tmp_path: Path) -> None:
    command = fake_command(folder, constants={"server.run_server.DEAD_SECONDS": 0.25}, api_key=("k",))
    with spawn(command, tmp_path / "one") as one, spawn(fake_command(folder), tmp_path / "two") as two:
        one.wait_ready(), two.wait_ready()
        assert one.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 401
        assert two.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert (one.metric("headstart:steps_total"), two.metric("headstart:steps_total")) == (0, 1)
        assert one.stop() == two.stop() == 0


def test_unusual_surroundings_take_a_true_start(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_ANYTHING", "1")
    with spawn(fake_command(folder), tmp_path / "log") as server:
        assert not isinstance(server.process, Forked)
        assert server.wait_ready().stop() == 0


def test_a_server_ends_with_the_tests_that_started_it(folder: str, tmp_path: Path) -> None:
    with spawn(fake_command(folder), tmp_path / "log") as server:
        process = psutil.Process(server.wait_ready().process.pid)
        assert isinstance(server.process, Forked)
        server.process._channel.close()  # as the kernel does for a process that ends
        wait_for(lambda: not process.is_running())
        server.process.returncode = -signal.SIGKILL


def test_a_signal_to_a_process_whose_exit_code_is_on_the_way_is_no_error() -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        Forked(ended.pid, ours).kill()
        assert Forked(ended.pid, ours).poll() is None


def test_pipes_carry_input_and_its_end_to_the_process_and_its_output_back() -> None:
    words = ["-c", "import os; print(os.read(0, 9), flush=True); print(os.read(0, 9))"]
    forked = fork_server.fork_piped(words, server_environment(), fork_server.FAKE)
    assert forked is not None and forked.stdin is not None and forked.stdout is not None
    with forked.stdin as stdin, forked.stdout as stdout:
        stdin.write(b"abc")
        stdin.flush()
        assert stdout.readline() == b"b'abc'\n"
        stdin.close()
        assert stdout.read() == b"b''\n"
    assert forked.wait() == 0 and forked.poll() == 0


@pytest.mark.parametrize("truly", [False, True])
def test_a_server_in_this_process_has_a_forked_engine_and_sandbox(
    truly: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (start_processes_truly if truly else fork_processes)(monkeypatch.setattr)

    async def run() -> httpx.Response:
        async with inside(folder) as server:
            assert ("server.fork_server" in psutil.Process(server.engine.pid).cmdline()) == (not truly)
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            answer = await server.client.post("/v1/chat/completions", json=chat)
            server.engine.kill()
        assert server.engine.exit_code == -signal.SIGKILL
        return answer

    assert asyncio.run(run()).status_code == 200
