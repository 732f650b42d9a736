"""An Envoy whose picker is killed and started again: what passes, what is refused, and that nothing hangs."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.envoy_harness import envoy_binary, unused_port
from gateway.harness import Replica, run, two
from server.harness import PATIENCE, Server, spawn, until, wait_for


@contextmanager
def external_envoy(folder: Path) -> Iterator[None]:
    """An Envoy of the configuration in a folder."""
    words = [str(envoy_binary()), "--config-path", str(folder / "envoy.json"), "--disable-hot-restart"]
    words += ["--concurrency", "1", "--log-level", "error"]
    with (folder / "log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as envoy:
        try:
            yield
        finally:
            envoy.kill()


def route_command(folder: Path, port: int, replicas: list[Replica], *words: str) -> list[str]:
    command = [sys.executable, "-m", "headstart", "route", "--envoy", "external", "--envoy-folder", str(folder)]
    command += [word for replica in replicas for word in ("--replica", replica.url)]
    return [*command, "--port", str(port), "--no-access-log", "--health-interval", "0.1", "--tokenizer", "none", *words]


class Clients:
    """Clients that send one request after the other, until `stop`."""

    def __init__(self, url: str) -> None:
        self.answers: Counter[Any] = Counter()
        self._url = url
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        self._tasks = [asyncio.create_task(self._send(number)) for number in range(count)]

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _send(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE) as client:
            while not self._is_over:
                body = {"prompt": f"client {number}", "stream": number % 2 == 0}
                try:
                    response = await client.post("/v1/completions", json=body)
                except httpx.TransportError as error:
                    self.answers[type(error).__name__] += 1
                    continue
                is_whole = response.status_code != 200 or number % 2 or response.text.endswith("data: [DONE]\n\n")
                self.answers[response.status_code if is_whole else "cut"] += 1


def picker_is_up(router: Server, port: int) -> bool:
    """Whether requests are answered by the router: a replica has no such path."""
    with httpx.Client(timeout=PATIENCE) as client:
        return client.get(f"http://127.0.0.1:{port}/v1/fleet").status_code == 200


def test_killed_and_started_again_under_load(tmp_path: Path) -> None:
    async def test() -> None:
        replicas, port, folder = two(), unused_port(), tmp_path / "envoy"
        for replica in replicas:
            await replica.start()
        command = route_command(folder, port, replicas)
        clients = Clients(f"http://127.0.0.1:{port}")
        with spawn(command, tmp_path / "first") as first:
            await asyncio.to_thread(first.wait_ready)
            with external_envoy(folder):
                await asyncio.to_thread(wait_for, lambda: _is_answered(port))
                clients.start(6)
                await until(lambda: clients.answers[200] >= 30)
                assert set(clients.answers) == {200}
                first.process.kill()
                first.process.wait()
                await asyncio.to_thread(wait_for, lambda: not picker_is_up(first, port))
                served = clients.answers[200]
                await until(lambda: clients.answers[200] >= served + 30)
                failed = Counter(clients.answers)
                await until(lambda: clients.answers[200] >= served + 60)
                assert clients.answers - Counter({200: clients.answers[200]}) == failed - Counter({200: failed[200]})
                assert all(len(replica.bodies) > 0 for replica in replicas), "without a picker: in turn"
                with spawn(command, tmp_path / "second") as second:
                    await asyncio.to_thread(second.wait_ready)
                    await asyncio.to_thread(wait_for, lambda: picker_is_up(second, port))
                    served = clients.answers[200]
                    await until(lambda: clients.answers[200] >= served + 30)
                    await clients.stop()
        lost = {answer: count for answer, count in clients.answers.items() if answer != 200}
        assert all(isinstance(answer, int) and 500 <= answer < 600 for answer in lost), lost
        for replica in replicas:
            await replica.stop()

    run(test())


def _is_answered(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/livez", timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("words", [("--api-key", "secret"), ("--replica-api-key", "inner")])
def test_a_router_with_keys_lets_no_request_pass_while_it_is_down(words: tuple[str, ...], tmp_path: Path) -> None:
    async def test() -> None:
        replica, port, folder = Replica(), unused_port(), tmp_path / "envoy"
        await replica.start()
        with spawn(route_command(folder, port, [replica], *words), tmp_path / "route") as router:
            await asyncio.to_thread(router.wait_ready)
            with external_envoy(folder):
                await asyncio.to_thread(wait_for, lambda: _is_answered(port))
                router.process.kill()
                router.process.wait()
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                    head = {"authorization": "Bearer secret"}
                    response = await client.post("/v1/completions", json={"prompt": "x"}, headers=head)
                assert response.status_code >= 500 and not replica.bodies
        await replica.stop()

    run(test())
