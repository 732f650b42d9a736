"""Sandboxes: time limits of setup and of each request, and the environment of their processes."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart.openai.sandbox import sandbox_pool
from headstart.openai.sandbox.sandbox_pool import SandboxLostError, SandboxPool, SandboxSpec

pytestmark = pytest.mark.usefixtures("true_processes")


def pool(*, setup: float, max_setup_seconds: float, max_seconds: float) -> SandboxPool:
    return SandboxPool(
        SandboxSpec(
            module="server.busy_process",
            setup=setup,
            subject="the sum",
            requests="sums",
            max_setup_seconds=max_setup_seconds,
            max_seconds=max_seconds,
            max_bytes=64 << 20,
            max_answer_bytes=4096,
        )
    )


def test_a_setup_may_take_longer_than_a_request() -> None:
    """On a busy machine a vocabulary is read in seconds; a request was refused for that before."""
    processes = pool(setup=1.0, max_setup_seconds=60.0, max_seconds=0.2)
    assert processes.ask(0.0) == "computed 0.0"
    with pytest.raises(SandboxLostError, match="takes too long"):
        processes.ask(30.0)
    processes.close()


def test_time_that_a_process_waits_for_the_processor_does_not_count() -> None:
    processes = pool(setup=0.0, max_setup_seconds=60.0, max_seconds=0.2)
    processes.prestart_process()
    (process,) = processes._all
    os.kill(process._process.pid, signal.SIGSTOP)
    timer = threading.Timer(2.0, os.kill, (process._process.pid, signal.SIGCONT))
    timer.start()
    began = time.monotonic()
    assert processes.ask(0.1) == "computed 0.1" and time.monotonic() - began > 1.5
    timer.join()
    processes.close()


def test_a_process_that_does_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = pool(setup=0.0, max_setup_seconds=60.0, max_seconds=60.0)
    processes.prestart_process()
    monkeypatch.setattr(sandbox_pool, "STALL_SECONDS", 0.5)
    (process,) = processes._all
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(SandboxLostError, match="takes too long"):
        processes.ask(0.0)
    assert not processes._all
    processes.close()


def test_a_setup_that_exceeds_its_limit_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="the sum does not compile: its process takes too long"):
        pool(setup=30.0, max_setup_seconds=0.1, max_seconds=60.0).prestart_process()


def test_a_process_inherits_no_variable_that_may_be_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HEADSTART_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "PYTHONSTARTUP",
        "https_proxy",
    ):
        monkeypatch.setenv(name, "secret")
    processes = pool(setup=0.0, max_setup_seconds=60.0, max_seconds=60.0)
    processes.prestart_process()
    (process,) = processes._all
    found = Path(f"/proc/{process._process.pid}/environ").read_bytes()
    processes.close()
    assert b"secret" not in found and f"PATH={os.environ['PATH']}".encode() in found.split(b"\0")
