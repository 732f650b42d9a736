"""The end of a server: nothing admitted is lost, nothing new is taken, and the exit code says how it went."""

import asyncio
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.fake_engine import Gate
from server.harness import PATIENCE, Server, fake_server, parse_events, quiet_port, wait_for

PATIENT = {
    "http.lifecycle.INTERRUPT_SECONDS": PATIENCE,
    "http.lifecycle.CUT_SECONDS": 30.0,
    "server.run_server.CUT_SECONDS": 30.0,
    "engine.engine_client.STOP_SECONDS": PATIENCE,
}
"""Servers that are not to cut anything off because the machine is busy."""


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None))


async def started(
    client: httpx.AsyncClient, server: Server, number: int, max_tokens: int
) -> "list[asyncio.Task[httpx.Response]]":
    """Sends requests, every second one streamed, and returns their answers to come when all of them run."""

    async def one(i: int) -> httpx.Response:
        body = {"prompt": [i, 1], "max_tokens": max_tokens, "stream": bool(i % 2)}
        return await client.post("/v1/completions", json=body)

    tasks = [asyncio.create_task(one(i)) for i in range(number)]
    await said(lambda: server.metric("vllm:num_requests_running") == number)
    return tasks


async def said(probe: Any) -> None:
    """Waits until `probe()` is true."""
    await asyncio.to_thread(wait_for, probe)


def complete(answer: Any, num_tokens: int) -> bool:
    """Whether a client got all it asked for, streamed or not."""
    assert isinstance(answer, httpx.Response) and answer.status_code == 200, answer
    if answer.text.startswith("data:"):
        *chunks, done = parse_events(answer.text)
        return done == "[DONE]" and len(chunks) == num_tokens and chunks[-1]["choices"][0]["finish_reason"] == "length"
    return answer.json()["usage"]["completion_tokens"] == num_tokens


def engine_pids(server: Server) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_everything_admitted_is_answered_and_the_exit_code_is_0(
    folder: str, tmp_path: Path, gate: Gate, signal_number: int
) -> None:
    async def run(server: Server) -> list[Any]:
        async with client_of(server) as client:
            tasks = await started(client, server, 50, 100)
            server.process.send_signal(signal_number)
            await said(lambda: "under way" in server.log)
            refused = await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/livez")).status_code == 200
            gate.open()
            return await asyncio.gather(*tasks, return_exceptions=True)

    with fake_server(gate.holds(folder, 20), tmp_path / "log", constants=PATIENT) as server:
        (engine,) = engine_pids(server)
        answers = asyncio.run(run(server))
        assert all(complete(answer, 100) for answer in answers) and len(answers) == 50
        assert server.wait() == 0
        assert not os.path.exists(f"/proc/{engine}")
        if signal_number == signal.SIGINT:
            assert "Ctrl-C again stops at once" in server.log
        assert "Traceback" not in server.log


def test_a_drain_that_takes_too_long_cuts_off_with_an_error_and_code_1(folder: str, tmp_path: Path, gate: Gate) -> None:
    async def run(server: Server) -> list[httpx.Response]:
        async with client_of(server) as client:
            tasks = await started(client, server, 4, 400)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

    with fake_server(gate.holds(folder, 20), tmp_path / "log", drain_timeout=1.0, constants=PATIENT) as server:
        for answer in asyncio.run(run(server)):
            error = answer.json() if answer.status_code == 503 else parse_events(answer.text)[-2]
            assert error["error"]["code"] == "draining"
            assert answer.status_code == 503 or answer.text.endswith("data: [DONE]\n\n")
        assert server.wait() == 1 and "4 requests were cut off" in server.log


def test_ctrl_c_twice_stops_at_once(folder: str, tmp_path: Path, gate: Gate) -> None:
    async def run(server: Server) -> httpx.Response:
        async with client_of(server) as client:
            (task,) = await started(client, server, 1, 400)
            server.process.send_signal(signal.SIGINT)
            await said(lambda: "Ctrl-C again" in server.log)
            server.process.send_signal(signal.SIGINT)
            return await task

    with fake_server(gate.holds(folder, 20), tmp_path / "log", constants=PATIENT) as server:
        (engine,) = engine_pids(server)
        assert asyncio.run(run(server)).status_code == 503
        assert server.wait() == 130 and "stopping at once" in server.log
        wait_for(lambda: not os.path.exists(f"/proc/{engine}"))


@pytest.mark.parametrize("is_in_a_hurry", [False, True])
def test_pending_blocks_are_written_at_exit_unless_it_must_be_fast(
    folder: str, tmp_path: Path, is_in_a_hurry: bool
) -> None:
    seconds = 10 * PATIENCE if is_in_a_hurry else 0.2  # that an engine left alone would take to end
    client = "engine.engine_client"
    constants = {**PATIENT, f"{client}.STOP_SECONDS": 0.0, f"{client}.WRITING_SECONDS": 20 * PATIENCE}
    with fake_server(f"{folder}?store=1&close={seconds}", tmp_path / "log", constants=constants) as server:
        wait_for(lambda: server.metric("headstart:kv_store_pending_blocks") == 6)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "writing 6 blocks to the store" in server.log)
        if is_in_a_hurry:
            server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        assert ("the fake engine was closed" in server.log) is not is_in_a_hurry


def test_ctrl_c_of_a_terminal_reaches_the_engine_only_through_its_parent(folder: str, tmp_path) -> None:
    with fake_server(folder, tmp_path / "log") as server:
        (engine,) = engine_pids(server)
        assert os.getpgid(engine) != os.getpgid(server.process.pid)


def test_an_idle_server_stops_at_once_and_frees_its_port(folder: str, tmp_path: Path) -> None:
    port = quiet_port()
    with fake_server(folder, tmp_path / "log", port=port) as server:
        client = server.client()
        assert client.get("/health").status_code == 200  # and its connection stays open
        assert server.stop() == 0
        with pytest.raises(httpx.HTTPError):
            client.get("/health")
    with fake_server(folder, tmp_path / "log2", port=port) as again:
        assert again.url == server.url


async def broken(server: Server, engine: int, how: str) -> tuple[httpx.Response, httpx.Response]:
    """Breaks the engine while two requests run: what becomes of them, the streamed one first."""
    async with client_of(server) as client:
        whole, streamed = await started(client, server, 2, 400)
        if how == "crash":
            answer = await client.post("/v1/completions", json={"prompt": [66]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            for path in ("/health", "/livez"):
                assert (await client.get(path)).status_code == 503
            late = await client.post("/v1/completions", json={"prompt": [1]})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
        else:
            os.kill(engine, signal.SIGKILL)
        return await streamed, await whole


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_a_broken_engine_is_told_to_everyone_and_ends_the_server_with_code_1(
    folder: str, tmp_path: Path, gate: Gate, how: str
) -> None:
    # A crashed one's server stays long enough for all questions; a killed one's ends as soon as it does by itself.
    constants = {"server.run_server.DEAD_SECONDS": 10 * PATIENCE} if how == "crash" else {}
    with fake_server(gate.holds(folder, 20, "crash=66"), tmp_path / "log", constants=constants) as server:
        (engine,) = engine_pids(server)
        streamed, whole = asyncio.run(broken(server, engine, how))
        assert "event: error" in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        assert whole.status_code == 503 and "Traceback" not in whole.text
        if how == "crash":
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: "Ctrl-C again" in server.log)
            server.process.send_signal(signal.SIGINT)
        assert server.wait() == 1
        assert "so does the server" in server.log


def test_a_stopped_engine_process_is_noticed_by_livez(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "log", heartbeat_timeout=2.0) as server:
        (engine,) = engine_pids(server)
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_for(lambda: server.get("/livez").status_code == 503)
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for(lambda: server.get("/livez").status_code == 200)


def admitted(server: Server, body: dict[str, Any]) -> httpx.Response:
    """The answer, once the engine has a processor: one that had none for a second counts as silent too."""

    def ask() -> httpx.Response | None:
        answer = server.post("/v1/completions", json=body)
        is_silent = answer.status_code == 503 and answer.json()["error"]["code"] == "engine_silent"
        return None if is_silent else answer

    return wait_for(ask)


@pytest.mark.parametrize("announced", [True, False])
def test_a_long_step_makes_the_server_unready_only_if_not_announced(
    announced: bool, folder: str, tmp_path: Path
) -> None:
    model = f"{folder}?step=5" + ("&announce=5" if announced else "")
    with fake_server(model, tmp_path / "log", heartbeat_timeout=2.5) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", json={"prompt": [7], "max_tokens": 1})
        found: set[int] = set()
        while not running.done():
            found.add(server.get("/health").status_code)
        assert running.result().status_code == 200
        assert found == ({200} if announced else {200, 503})


def test_a_silent_engine_makes_the_server_unready_until_it_is_heard_again(
    folder: str, gate: Gate, tmp_path: Path
) -> None:
    with fake_server(gate.holds(folder, 2), tmp_path / "log", heartbeat_timeout=1.0) as server:
        (engine,) = engine_pids(server)
        with ThreadPoolExecutor(1) as pool, server.client() as client:
            running = pool.submit(admitted, server, {"prompt": [7], "max_tokens": 5})
            wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
            os.kill(engine, signal.SIGSTOP)
            try:
                for path in ("/health", "/readyz"):
                    wait_for(lambda path=path: client.get(path).status_code == 503)
                    assert client.get(path).json()["error"]["code"] == "engine_silent"
                for path, body in {
                    "/v1/completions": {"prompt": [7]},
                    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
                    "/v1/cache/explain": {"prompt": [7]},
                }.items():
                    refused = client.post(path, json=body)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_silent")
                    assert refused.headers["retry-after"]
                assert client.get("/v1/cache/stats").status_code == 503
                assert not running.done()
            finally:
                os.kill(engine, signal.SIGCONT)
            for path in ("/health", "/readyz", "/livez"):
                wait_for(lambda path=path: client.get(path).status_code == 200)
            gate.open()
            assert running.result().status_code == 200
            assert admitted(server, {"prompt": [7], "max_tokens": 2}).status_code == 200


def test_a_killed_server_leaves_no_engine_and_the_port_can_be_taken_again(folder: str, tmp_path: Path) -> None:
    port = quiet_port()
    with fake_server(folder, tmp_path / "log", port=port) as server:
        (engine,) = engine_pids(server)
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not os.path.exists(f"/proc/{engine}") or _is_zombie(engine))
    with fake_server(folder, tmp_path / "log2", port=port) as again:
        assert again.get("/health").status_code == 200


def _is_zombie(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.startswith("Z") or not state.strip()
