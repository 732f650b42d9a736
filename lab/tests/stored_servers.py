"""Real servers on one folder whose lab waits for their blocks instead of some seconds, and that load what is stored.

What such a lab measures depends on how busy the machine is, but what tests claim of it must not.
"""

import http.client
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from server import patient
from server.harness import ROOT, wait_for

from headstart_lab.runners.served_replica import Launch, Replica, replica

BLOCK_SIZE = 16
ADMIN = "root"
"""The key that may see the store; a server without any keys shows it to everybody."""


def wait_for_blocks(monkeypatch: pytest.MonkeyPatch, lab: ModuleType, settle: float) -> None:
    """Where `lab` sleeps `settle` seconds, all blocks of the prompts made so far are waited for; its other sleeps end
    at once.
    """
    servers, made, plain = list[Replica](), list[int](), lab.random_tokens

    def random_tokens(num: int, *rest: object) -> object:
        made.append(num // BLOCK_SIZE)
        return plain(num, *rest)

    @contextmanager
    def noted(launch: Launch, store: Path) -> Generator[Replica]:
        flags = ("--admin-api-key", ADMIN) if launch.api_keys else ()
        with replica(replace(launch, flags=(*launch.flags, *flags)), store) as server:
            servers.append(server)
            yield server
            servers.remove(server)

    def sleep(seconds: float) -> None:
        for server in servers if seconds == settle else ():
            wait_for(lambda server=server: num_blocks(server) >= sum(made))

    clock = ModuleType("time")
    clock.sleep = sleep  # type: ignore[attr-defined]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(Launch, "command", patient_command(Launch.command))
    count = Replica.prompt_tokens
    monkeypatch.setattr(Replica, "prompt_tokens", lambda self, *, key="": count(self, key=key and ADMIN))
    monkeypatch.setattr(lab, "replica", noted)
    monkeypatch.setattr(lab, "random_tokens", random_tokens)
    monkeypatch.setattr(lab, "time", clock)


def patient_command(plain: Callable[[Launch, Path | None], list[str]]) -> Callable[[Launch, Path | None], list[str]]:
    """The same command line of the patient server."""

    def command(launch: Launch, store: Path | None) -> list[str]:
        python, flag, module, *rest = plain(launch, store)
        assert (flag, module) == ("-m", "headstart"), python
        return [*patient.COMMAND, *rest]

    return command


def num_blocks(server: Replica) -> float:
    """Blocks in the store as this server sees it."""
    connection: http.client.HTTPConnection = server._connection
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {ADMIN}"})
    text = connection.getresponse().read().decode()
    lines = [line for line in text.splitlines() if line.startswith("headstart:kv_store_blocks{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
