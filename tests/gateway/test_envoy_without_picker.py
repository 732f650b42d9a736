"""An Envoy whose picker is killed and started again: what passes, what is refused, and that nothing hangs."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from gateway.envoy_harness import envoy_binary, unused_port
from gateway.harness import Replica, chunk, run, streaming, two, usage
from server.harness import PATIENCE, spawn, until, wait_for

from headstart.gateway.picker.envoy_config import MESSAGE_SECONDS
from headstart.gateway.picker.ext_proc_messages import DESTINATION


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

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.answers: Counter[Any] = Counter()
        self._url = url
        self._headers = headers
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        self._tasks = [asyncio.create_task(self._send(number)) for number in range(count)]

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _send(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE, headers=self._headers) as client:
            while not self._is_over:
                body = {"prompt": f"client {number}", "stream": number % 2 == 0}
                try:
                    response = await client.post("/v1/completions", json=body)
                except httpx.TransportError as error:
                    self.answers[type(error).__name__] += 1
                    continue
                if response.status_code != 200:
                    self.answers[(response.status_code, response.json()["error"]["code"])] += 1
                    await asyncio.sleep(0.01)
                    continue
                is_whole = number % 2 or response.text.endswith("data: [DONE]\n\n")
                self.answers[200 if is_whole else "cut"] += 1


def picker_is_up(port: int) -> bool:
    """Whether requests are answered by the router: a replica has no such path."""
    with httpx.Client(timeout=PATIENCE, headers={"authorization": "Bearer root"}) as client:
        return client.get(f"http://127.0.0.1:{port}/v1/fleet").status_code == 200


async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An answer that takes 50 ms, so that some are under way when a router is killed."""
    if not body["stream"]:
        await asyncio.sleep(0.05)
        return web.json_response({"choices": [{"index": 0, "text": "abc"}], "usage": usage(3, 0)})
    response = await streaming(request)
    for _ in range(5):
        await response.write(chunk("a"))
        await asyncio.sleep(0.01)
    await response.write(b"data: [DONE]\n\n")
    return response


def test_killed_and_started_again_under_load(tmp_path: Path) -> None:
    assert set(killed(1, tmp_path)) == {200}, "Envoy keeps the bodies until the picker has replied"


@pytest.mark.long
def test_killed_five_times_under_load(tmp_path: Path) -> None:
    assert set(killed(5, tmp_path)) == {200}


@pytest.mark.long
def test_with_keys_every_request_without_a_picker_gets_a_typed_503_and_no_answer_is_cut(tmp_path: Path) -> None:
    answers = killed(5, tmp_path, with_keys=True)
    assert set(answers) == {200, (503, "no_router")} and answers[(503, "no_router")]


def killed(times: int, tmp_path: Path, *, with_keys: bool = False) -> "Counter[Any]":
    """The answers of clients that send requests while a router is killed and started again, some times."""

    async def test() -> "Counter[Any]":
        replicas, port, folder = two(), unused_port(), tmp_path / "envoy"
        for replica in replicas:
            await replica.start()
            replica.script = slowly
        keys = ("--api-key", "secret", "--admin-api-key", "root") if with_keys else ()
        command = route_command(folder, port, replicas, *keys)
        clients = Clients(f"http://127.0.0.1:{port}", {"authorization": "Bearer secret"} if with_keys else {})
        with ExitStack() as stack:
            router = stack.enter_context(spawn(command, tmp_path / "0"))
            await asyncio.to_thread(router.wait_ready)
            stack.enter_context(external_envoy(folder))
            await asyncio.to_thread(wait_for, lambda: _is_answered(port))
            await asyncio.to_thread(wait_for, lambda: picker_is_up(port))
            clients.start(6)
            await until(lambda: clients.answers[200] >= 30)
            assert set(clients.answers) == {200}
            for number in range(1, times + 1):
                router.process.kill()
                router.process.wait()
                await asyncio.to_thread(wait_for, lambda: not picker_is_up(port))
                served = clients.answers.total()
                await until(lambda served=served: clients.answers.total() >= served + 60)
                router = stack.enter_context(spawn(command, tmp_path / str(number)))
                await asyncio.to_thread(router.wait_ready)
                await asyncio.to_thread(wait_for, lambda: picker_is_up(port))
                served = clients.answers[200]
                await until(lambda served=served: clients.answers[200] >= served + 30)
            await clients.stop()
        assert all(replica.bodies for replica in replicas), "without a picker: in turn"
        for replica in replicas:
            await replica.stop()
        print("answers", dict(clients.answers))
        return clients.answers

    return run(test())


def test_a_picker_that_is_stopped_and_not_dead_is_noticed(tmp_path: Path) -> None:
    """Its sockets accept everything, as those of a process that hangs."""

    async def test() -> None:
        replica, port, folder = Replica(), unused_port(), tmp_path / "envoy"
        await replica.start()
        with spawn(route_command(folder, port, [replica]), tmp_path / "route") as router:
            await asyncio.to_thread(router.wait_ready)
            with external_envoy(folder):
                await asyncio.to_thread(wait_for, lambda: _is_answered(port))
                await asyncio.to_thread(wait_for, lambda: picker_is_up(port))
                router.process.send_signal(signal.SIGSTOP)
                try:
                    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                        sent = [client.post("/v1/completions", json={"prompt": f"{n}"}) for n in range(4)]
                        answers = await asyncio.gather(*sent)
                        held = [response.elapsed.total_seconds() for response in answers]
                finally:
                    router.process.send_signal(signal.SIGCONT)
                assert [response.status_code for response in answers] == [200] * 4 and len(replica.bodies) == 4
                assert max(held) < MESSAGE_SECONDS, "the limit for a picker that answers"
                await asyncio.to_thread(wait_for, lambda: picker_is_up(port))
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
                    head = {"authorization": "Bearer secret", DESTINATION: replica.url.removeprefix("http://")}
                    response = await client.post("/v1/completions", json={"prompt": "x"}, headers=head)
                assert response.status_code == 503 and not replica.bodies
                assert response.json()["error"]["code"] == "no_router" and response.headers["retry-after"] == "1"
        await replica.stop()

    run(test())
