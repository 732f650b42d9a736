"""The end of a server: nothing admitted is lost, nothing new is taken, and the exit code says how it went."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.harness import Server, fake_server, parse_events, wait_for


async def load(server: Server, number: int, max_tokens: int, signal_number: int) -> list[Any]:
    """Sends requests, a signal while they run, and returns their answers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

        async def one(i: int) -> httpx.Response:
            return await client.post(
                "/v1/completions", json={"prompt": [i, 1], "max_tokens": max_tokens, "stream": bool(i % 2)}
            )

        tasks = [asyncio.create_task(one(i)) for i in range(number)]
        await asyncio.to_thread(wait_for, lambda: server.metric("vllm:num_requests_running") == number, 30)
        server.process.send_signal(signal_number)
        await asyncio.to_thread(wait_for, lambda: "under way" in server.log, 10)
        refused = await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        return await asyncio.gather(*tasks, return_exceptions=True)


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
def test_everything_admitted_is_answered_and_the_exit_code_is_0(folder: str, tmp_path, signal_number: int) -> None:
    with fake_server(f"{folder}?step=0.02", tmp_path / "log") as server:
        (engine,) = engine_pids(server)
        answers = asyncio.run(load(server, 50, 100, signal_number))
        assert all(complete(answer, 100) for answer in answers) and len(answers) == 50
        assert server.process.wait(20) == 0
        assert not os.path.exists(f"/proc/{engine}")
        if signal_number == signal.SIGINT:
            assert "Ctrl-C again stops at once" in server.log
        assert "Traceback" not in server.log


def test_a_drain_that_takes_too_long_cuts_off_with_an_error_and_code_1(folder: str, tmp_path) -> None:
    with fake_server(f"{folder}?step=0.1", tmp_path / "log", drain_timeout=1.0) as server:
        answers = asyncio.run(load(server, 4, 400, signal.SIGTERM))
        for answer in answers:
            error = answer.json() if answer.status_code == 503 else parse_events(answer.text)[-2]
            assert error["error"]["code"] == "draining"
            assert answer.status_code == 503 or answer.text.endswith("data: [DONE]\n\n")
        assert server.process.wait(20) == 1 and "4 requests were cut off" in server.log


def test_ctrl_c_twice_stops_at_once(folder: str, tmp_path) -> None:
    with fake_server(f"{folder}?step=0.1", tmp_path / "log") as server:
        (engine,) = engine_pids(server)

        async def run() -> Any:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                task = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1], "max_tokens": 400}))
                await asyncio.to_thread(wait_for, lambda: server.metric("vllm:num_requests_running") == 1, 30)
                server.process.send_signal(signal.SIGINT)
                await asyncio.to_thread(wait_for, lambda: "Ctrl-C again" in server.log, 10)
                server.process.send_signal(signal.SIGINT)
                return await task

        assert asyncio.run(run()).status_code == 503
        assert server.process.wait(20) == 130 and "stopping at once" in server.log
        wait_for(lambda: not os.path.exists(f"/proc/{engine}"), 10)


@pytest.mark.parametrize("is_in_a_hurry", [False, True])
def test_what_waits_for_the_store_is_written_unless_somebody_is_in_a_hurry(
    folder: str, tmp_path, is_in_a_hurry: bool
) -> None:
    with fake_server(f"{folder}?store=1&close=2", tmp_path / "log") as server:
        wait_for(lambda: server.metric("headstart:kv_store_pending_blocks") == 6, 10)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "writing 6 blocks to the store" in server.log, 10)
        if is_in_a_hurry:
            server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert ("the fake engine was closed" in server.log) is not is_in_a_hurry


def test_ctrl_c_of_a_terminal_reaches_the_engine_only_through_its_parent(folder: str, tmp_path) -> None:
    with fake_server(folder, tmp_path / "log") as server:
        (engine,) = engine_pids(server)
        assert os.getpgid(engine) != os.getpgid(server.process.pid)


def test_an_idle_server_stops_at_once_and_frees_its_port(folder: str, tmp_path) -> None:
    with fake_server(folder, tmp_path / "log") as server:
        client = server.client()
        assert client.get("/health").status_code == 200  # and its connection stays open
        assert server.stop() == 0
        with pytest.raises(httpx.HTTPError):
            client.get("/health")
        port = int(server.url.rsplit(":", 1)[1])
    with fake_server(folder, tmp_path / "log2", port=port) as again:
        assert again.url == server.url


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_a_broken_engine_is_told_to_everyone_and_ends_the_server_with_code_1(folder: str, tmp_path, how: str) -> None:
    with fake_server(f"{folder}?step=0.02&crash=66", tmp_path / "log") as server:
        (engine,) = engine_pids(server)

        async def run() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                bodies = [{"prompt": [1], "max_tokens": 400, "stream": stream} for stream in (True, False)]
                tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
                await asyncio.to_thread(wait_for, lambda: server.metric("vllm:num_requests_running") == 2, 30)
                if how == "crash":
                    answer = await client.post("/v1/completions", json={"prompt": [66]})
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
                else:
                    os.kill(engine, signal.SIGKILL)
                    await asyncio.to_thread(wait_for, lambda: "the engine has stopped" in server.log, 10)
                for path in ("/health", "/livez"):
                    assert (await client.get(path)).status_code == 503
                late = await client.post("/v1/completions", json={"prompt": [1]})
                assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
                return await asyncio.gather(*tasks)

        streamed, whole = asyncio.run(run())
        assert "event: error" in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        assert whole.status_code == 503 and "Traceback" not in whole.text
        assert server.process.wait(20) == 1
        assert "so does the server" in server.log


def test_a_stopped_engine_process_is_noticed_by_livez(folder: str, tmp_path) -> None:
    with fake_server(folder, tmp_path / "log", heartbeat_timeout=2.0) as server:
        (engine,) = engine_pids(server)
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_for(lambda: httpx.get(f"{server.url}/livez").status_code == 503, 15)
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for(lambda: httpx.get(f"{server.url}/livez").status_code == 200, 15)


def test_a_killed_server_leaves_no_engine_and_the_port_can_be_taken_again(folder: str, tmp_path) -> None:
    with fake_server(folder, tmp_path / "log") as server:
        (engine,) = engine_pids(server)
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not os.path.exists(f"/proc/{engine}") or _is_zombie(engine), 10)
        port = int(server.url.rsplit(":", 1)[1])
    with fake_server(folder, tmp_path / "log2", port=port) as again:
        assert httpx.get(f"{again.url}/health").status_code == 200


def _is_zombie(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.startswith("Z") or not state.strip()
