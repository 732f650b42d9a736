"""Sandboxes: time limits of setup and of each request, and the environment of their processes."""

import os
from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart.openai.sandbox.sandbox_pool import SandboxLostError, SandboxPool, SandboxSpec

pytestmark = pytest.mark.usefixtures("true_processes")


def pool(*, setup: float, max_setup_seconds: float, max_seconds: float) -> SandboxPool:
    return SandboxPool(
        SandboxSpec(
            module="server.sleepy_process",
            setup=setup,
            subject="the sleeper",
            requests="naps",
            max_setup_seconds=max_setup_seconds,
            max_seconds=max_seconds,
            max_bytes=64 << 20,
            max_answer_bytes=4096,
        )
    )


def test_a_setup_may_take_longer_than_a_request() -> None:
    """On a busy machine a vocabulary is read in seconds; a request was refused for that before."""
    processes = pool(setup=1.0, max_setup_seconds=60.0, max_seconds=0.2)
    assert processes.ask(0.0) == "slept 0.0"
    with pytest.raises(SandboxLostError, match="takes too long"):
        processes.ask(30.0)
    processes.close()


def test_a_setup_that_exceeds_its_limit_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="the sleeper does not compile: its process takes too long"):
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
