"""Replicas as child processes of this one: real servers around a fake engine, killed, replaced and orphaned."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import tokenizer_folders
from server import fork_server
from server.fake_engine import Gate
from server.harness import PATIENCE, ROOT, Server, spawn, until, wait_for

from headstart.config.options import EngineOptions, ServerOptions
from headstart.core.errors import ConfigError
from headstart.gateway.replicas import replica_child
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.gateway.replicas.replica_child import ReplicaLaunch, ReplicaOptions, encode_replica_options
from headstart.gateway.replicas.subprocesses import MAX_BACKOFF, STEADY_SECONDS, LocalReplicas, _Slot
from headstart.http.logs import ServerLog

_FAKE = (
    "import sys; from headstart.cli.replica_process import read_options_from_stdin; "
    "from headstart.server.run_server import serve; "
    "from server.fake_engine import build_fake; sys.exit(serve(build_fake, *read_options_from_stdin()[:2]))"
)


def launch(model: str, **options: Any) -> ReplicaLaunch:
    """A server around a fake engine, as LocalReplicas starts it."""
    server = ServerOptions(**{"port": 0, "access_log": "none", "stats_interval": 0.0, **options})
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    return ReplicaLaunch(
        (sys.executable, "-c", _FAKE),
        encode_replica_options(ReplicaOptions(EngineOptions(model=model), server)),
        environment,
    )


def fleet_of(model: str, replicas: int, told: StringIO, **options: Any) -> LocalReplicas:
    one = launch(model, **options)
    return LocalReplicas(lambda *_: one, replicas, drain_seconds=PATIENCE, log=ServerLog(told), backoff=0.01)


class Watched:
    """A fleet that is watched: the lists it has told."""

    def __init__(self, fleet: LocalReplicas) -> None:
        self.fleet = fleet
        self.lists: list[list[str]] = []

    def changed(self, addresses: Sequence[ReplicaAddress]) -> None:
        self.lists.append([address.url for address in addresses])


@asynccontextmanager
async def watching(fleet: LocalReplicas) -> AsyncIterator[Watched]:
    watched = Watched(fleet)
    task = asyncio.create_task(fleet.watch_replicas(watched.changed))
    try:
        await until(lambda: watched.lists or task.done())
        if task.done():
            await task
        yield watched
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tokenizer_folders.write(tmp_path_factory.mktemp("fake") / "model", tokenizer_folders.BYTE_LEVEL))


@pytest.fixture
def told() -> StringIO:
    return StringIO()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are forked from a process that has their modules, where no test is of the start itself."""

    def popen(command: Sequence[str], env: dict[str, str], **others: Any) -> Any:
        forked = fork_server.fork_piped([*command[1:]], env, fork_server.FAKE)
        return forked or subprocess.Popen(command, env=env, **others)

    monkeypatch.setattr(replica_child, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))


def family(pids: Sequence[int]) -> list[psutil.Process]:
    """Fronts, engines and the processes that render chat templates."""
    found: list[psutil.Process] = []
    for pid in pids:
        front = psutil.Process(pid)
        found += [front, *front.children(recursive=True)]
    return found


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def complete(url: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 2}, headers=headers, timeout=300)


def test_replicas_answer_and_none_is_left_when_the_fleet_is_closed(folder: str, told: StringIO) -> None:
    async def run() -> list[psutil.Process]:
        async with watching(fleet) as watched:
            (urls,) = watched.lists
            assert len(set(urls)) == 2 and sorted(fleet.pids_by_url) == sorted(urls)
            for url in urls:
                assert (await asyncio.to_thread(complete, url, "secret")).status_code == 200
                assert (await asyncio.to_thread(complete, url)).status_code == 401
            arguments = [part for one in family(list(fleet.pids_by_url.values())) for part in one.cmdline()]
            assert not any("secret" in part for part in arguments)
            return family(list(fleet.pids_by_url.values()))

    with fleet_of(folder, 2, told, api_key=("secret",)) as fleet:
        processes = asyncio.run(run())
        assert len(processes) == 6 and not any(map(is_gone, processes))
    assert all(map(is_gone, processes))
    text = told.getvalue()
    assert "[r0] Headstart " in text and "[r1] Headstart " in text and "secret" not in text
    assert "[r0] the fake engine was closed" in text  # gently, and heard to the end
    assert "  try " not in text and "  keys " not in text
    assert "http://" not in text, "clients are to ask the router, so the only address printed is the router's"
    assert re.search(r"\[r1\] Headstart \S+ serves .*, behind the router at port \d+$", text, re.MULTILINE)
    assert fleet.describe() == "2 replicas on this machine"


@pytest.mark.usefixtures("forked")
def test_a_replica_that_dies_is_started_again_elsewhere(folder: str, told: StringIO) -> None:
    async def run() -> None:
        async with watching(fleet) as watched:
            (first,) = watched.lists
            victim, other = first
            os.kill(fleet.pids_by_url[victim], signal.SIGKILL)
            await until(lambda: len(watched.lists) == 3)
            assert watched.lists[1] == [other]
            assert len(watched.lists[2]) == 2 and other in watched.lists[2]
            for url in watched.lists[2]:
                assert (await asyncio.to_thread(complete, url)).status_code == 200

    with fleet_of(folder, 2, told) as fleet:
        asyncio.run(run())
    assert told.getvalue().count("ended with code -9; starting it again in 0.01 s") == 1


@pytest.mark.usefixtures("forked")
def test_what_cannot_start_is_said_once_and_leaves_nothing(folder: str, told: StringIO) -> None:
    async def run() -> None:
        async with watching(fleet):
            pass

    with fleet_of(f"{folder}?config=1", 3, told) as fleet:
        with pytest.raises(ConfigError, match=r"^there is no such model; name another$"):
            asyncio.run(run())
        assert fleet.pids_by_url == {}
    assert "no such model" not in told.getvalue()  # the caller that catches the error prints it
    assert "[r1]" not in told.getvalue()


@pytest.mark.usefixtures("forked")
def test_a_replica_that_breaks_while_loading_is_tried_again(folder: str, told: StringIO) -> None:
    async def run() -> None:
        task = asyncio.create_task(fleet.watch_replicas(lambda _: None))
        await until(lambda: told.getvalue().count("starting it again") >= 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with fleet_of(f"{folder}?broken=1", 1, told) as fleet:
        asyncio.run(run())
    assert "replica r0 ended with code 1; starting it again in 0.01 s" in told.getvalue()
    assert "starting it again in 0.02 s" in told.getvalue()  # the more often it fails the longer
    assert "[r0] headstart: " in told.getvalue()  # and why


@pytest.mark.usefixtures("forked")
def test_on_sighup_every_replica_is_replaced_and_requests_always_find_one(folder: str, told: StringIO) -> None:
    async def run() -> None:
        async with watching(fleet) as watched:
            (first,) = watched.lists
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: "all replicas were started again" in told.getvalue())
            last = watched.lists[-1]
            assert len(last) == 2 and not set(last) & set(first)
            assert [len(urls) for urls in watched.lists] == [2, 3, 2, 3, 2]
            for url in last:
                assert (await asyncio.to_thread(complete, url)).status_code == 200
            assert sorted(fleet.pids_by_url) == sorted(last)

    with fleet_of(folder, 2, told) as fleet:
        asyncio.run(run())
    assert "starting it again in" not in told.getvalue()  # no replica was missing


@pytest.mark.usefixtures("forked")
def test_where_two_do_not_fit_the_old_replica_ends_before_the_new_one_starts(folder: str, told: StringIO) -> None:
    started: list[tuple[int, list[str]]] = []

    def make_launch(name: str, slot: int) -> ReplicaLaunch:
        started.append((slot, list(fleet.pids_by_url)))
        return launch(folder)

    async def run() -> None:
        async with watching(fleet) as watched:
            (first,) = watched.lists
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: "all replicas were started again" in told.getvalue())
            assert [len(urls) for urls in watched.lists] == [2, 1, 2, 1, 2]
            assert not set(watched.lists[-1]) & set(first)
            assert [slot for slot, _ in started] == [0, 1, 0, 1]
            assert [len(running) for _, running in started[2:]] == [1, 1]

    fleet = LocalReplicas(make_launch, 2, drain_seconds=PATIENCE, log=ServerLog(told), overlaps=False)
    with fleet:
        asyncio.run(run())
    assert "starting it again in" not in told.getvalue()


@pytest.mark.usefixtures("forked")
def test_a_replacement_that_fails_after_the_old_one_has_ended_is_tried_again(folder: str, told: StringIO) -> None:
    launches = [launch(folder), launch(f"{folder}?config=1"), launch(folder)]

    async def run() -> None:
        async with watching(fleet) as watched:
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: len(watched.lists) == 3)
            assert [len(urls) for urls in watched.lists] == [1, 0, 1]

    fleet = LocalReplicas(
        lambda name, _: launches[int(name[-1]) - 1],
        1,
        drain_seconds=PATIENCE,
        log=ServerLog(told),
        backoff=0.01,
        overlaps=False,
    )
    with fleet:
        asyncio.run(run())
    assert "a new r0 ended with code 2" in told.getvalue() and "replica r0 ended with code 2" in told.getvalue()


@pytest.mark.usefixtures("forked")
def test_a_replacement_that_fails_leaves_the_replicas_there_are(folder: str, told: StringIO) -> None:
    launches = [launch(folder), launch(folder), launch(f"{folder}?config=1")]

    async def run() -> None:
        async with watching(fleet) as watched:
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: "the running replicas continue" in told.getvalue())
            assert len(watched.lists) == 1
            for url in watched.lists[0]:
                assert (await asyncio.to_thread(complete, url)).status_code == 200

    fleet = LocalReplicas(lambda name, _: launches[int(name[-1]) - 1], 2, drain_seconds=PATIENCE, log=ServerLog(told))
    with fleet:
        asyncio.run(run())
    assert "a new r0 ended with code 2 (there is no such model; name another)" in told.getvalue()


@pytest.mark.usefixtures("forked")
def test_the_address_says_where_events_come_from(folder: str, told: StringIO) -> None:
    one = launch(folder)
    with_events = ReplicaLaunch(one.command, one.options, one.environment, "ipc:///tmp/e", "ipc:///tmp/r")
    found: list[ReplicaAddress] = []

    async def run() -> None:
        task = asyncio.create_task(fleet.watch_replicas(found.extend))
        await until(lambda: found)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with LocalReplicas(lambda *_: with_events, 1, drain_seconds=PATIENCE, log=ServerLog(told)) as fleet:
        asyncio.run(run())
    assert (found[0].events, found[0].replay) == ("ipc:///tmp/e", "ipc:///tmp/r")


def parent_of(model: str, end: str) -> list[str]:
    """The command of a process that starts two replicas, prints "pids" and theirs, and then does `end`."""
    script = (
        "import asyncio, os, signal, sys; from gateway.test_subprocesses import fleet_of\n"
        f"fleet = fleet_of({model!r}, 2, sys.stderr)\n"
        "def changed(found):\n"
        "    line = ' '.join(map(str, ['pids', *fleet.pids_by_url.values(), *fleet.pids_by_url]))\n"
        "    sys.stderr.write(line + '\\n')\n"  # at once: replicas' lines come from other threads
        f"    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, {end})\n"
        "with fleet:\n"
        "    asyncio.run(fleet.watch_replicas(changed))\n"
    )
    return [sys.executable, "-c", script]


def replicas_of(parent: Server) -> tuple[list[psutil.Process], list[str]]:
    """Its replicas' processes and URLs, once they are ready."""
    line = wait_for(lambda: [line for line in parent.log.splitlines() if line.startswith("pids ")])[0]
    pids = [int(pid) for pid in line.split()[1:3]]
    wait_for(lambda: len(family(pids)) == 6)  # those that render chats may start later than their servers are ready
    return family(pids), line.split()[3:]


def test_replicas_end_when_their_parent_is_killed(folder: str, tmp_path: Path) -> None:
    with spawn(parent_of(folder, "print"), tmp_path / "log") as parent:
        processes, _ = replicas_of(parent)
        parent.stop(signal.SIGKILL)
        wait_for(lambda: all(map(is_gone, processes)))


def test_ctrl_c_while_replicas_drain_kills_them(folder: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with spawn(parent_of(gate.holds(folder, 1), "sys.exit"), tmp_path / "log") as parent:
        processes, urls = replicas_of(parent)
        body = {"prompt": "abc", "max_tokens": 9, "stream": True}
        with httpx.stream("POST", f"{urls[0]}/v1/completions", json=body, timeout=PATIENCE) as held:
            assert held.status_code == 200
            parent.process.send_signal(signal.SIGUSR1)
            wait_for(lambda: "[r0] headstart: SIGTERM: 1 requests under way" in parent.log)
            assert not is_gone(processes[0])
            parent.stop(signal.SIGINT)
            wait_for(lambda: all(map(is_gone, processes)))
            with contextlib.suppress(httpx.HTTPError):  # cut off, or told by its front if the engine went first
                assert b'"error"' in held.read()
    assert "headstart: stopping at once" in parent.log


def test_a_replica_that_is_started_by_hand_says_what_is_missing() -> None:
    command = [sys.executable, "-m", "headstart.cli.replica_process"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=PATIENCE)
    assert ended.returncode == 1 and b"started by headstart serve --replicas" in ended.stderr


def test_the_backoff_doubles_up_to_a_bound_and_begins_anew_for_the_steady() -> None:
    class Lived:
        def __init__(self, seconds: float) -> None:
            self.uptime_seconds = seconds

    slot = _Slot(0, 1.0)
    delays = [slot.next_delay(Lived(0.0)) for _ in range(7)]  # type: ignore[arg-type]
    assert delays == [1, 2, 4, 8, 16, MAX_BACKOFF, MAX_BACKOFF]
    assert slot.next_delay(Lived(STEADY_SECONDS)) == 1  # type: ignore[arg-type]
