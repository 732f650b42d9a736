"""Looks at replicas that answer with absurd bodies: they are read up to a bound, and the router goes on."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Replica, front, run
from server.harness import until

from headstart.gateway.replicas import replica_monitor
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.router.index.approximate_index import ApproximateIndex

ENDLESS = 1_000  # chunks of 64 KiB
HEAD = b'vllm:cache_config_info{block_size="32",num_gpu_blocks="77"} 1.0\n'


class Odd:
    """A replica whose looks are answered by `paths`: a body, or None for one without an end."""

    def __init__(self, **paths: bytes | None) -> None:
        self.paths = {f"/{name}": body for name, body in paths.items()}
        self.num_sent = 0
        self.looks: dict[str, int] = {}

    async def start(self) -> ReplicaAddress:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return ReplicaAddress(f"http://127.0.0.1:{self._runner.addresses[0][1]}")

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = "/" + request.path.rpartition("/")[2]
        self.looks[name] = self.looks.get(name, 0) + 1
        body = self.paths.get(name, b"")
        if body is not None:
            return web.Response(body=body)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(HEAD)
        for _ in range(ENDLESS):
            await response.write(b"x" * 65_535 + b"\n")
            self.num_sent += 65_536
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": []})


def looking(odd: Odd, check: Any) -> None:
    async def go() -> None:
        good = Replica("m")
        address = await odd.start()
        async with front(good) as router:
            router.state.members.on_replicas_changed([good.address, address])
            await router.up(2)
            await check(router.state.router.endpoints[address.url], router)
            assert (await router.complete()).status_code == 200
        await odd.stop()

    run(go())


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"data":' * 100_000, b"\xff" * 10, b'{"data": [[]]}'])
def test_a_list_of_models_that_is_none_does_not_keep_a_replica_out(
    body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async def check(endpoint: Any, router: Any) -> None:
        assert endpoint.models == frozenset()

    looking(Odd(models=body), check)
    assert "replica_look_failed" not in capsys.readouterr().err


@pytest.mark.parametrize("path", ["health", "models", "metrics"])
def test_a_body_without_an_end_is_read_up_to_a_bound(path: str) -> None:
    odd = Odd(**{path: None})

    async def check(endpoint: Any, router: Any) -> None:
        await until(lambda: odd.looks[f"/{path}"] >= 1)
        await asyncio.sleep(0.2)
        assert odd.num_sent / odd.looks[f"/{path}"] < 32 * 2**20
        if path == "metrics":
            await until(lambda: endpoint.index.estimated_capacity == 77)

    looking(odd, check)


def test_a_pool_of_absurd_size_costs_no_memory() -> None:
    page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="' + b"9" * 30 + b'"} 1.0\n'

    async def check(endpoint: Any, router: Any) -> None:
        assert isinstance(endpoint.index, ApproximateIndex) and endpoint.index.estimated_capacity <= 2**22

    looking(Odd(metrics=page), check)


def test_replicas_that_do_not_answer_are_probed_a_few_at_once_and_live_ones_besides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_monitor, "MAX_PROBES", 4)
    monkeypatch.setattr(replica_monitor, "LOOK_SECONDS", 0.1)
    open_at_once = most = 0

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_at_once, most
        open_at_once += 1
        most = max(most, open_at_once)
        await reader.read()
        while await reader.read(1_000):
            pass
        open_at_once -= 1
        writer.close()

    async def go() -> None:
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        silent = [ReplicaAddress(f"http://127.0.0.1:{port}")]
        others = await asyncio.gather(*[asyncio.start_server(mute, f"127.0.0.{n}", port) for n in range(2, 40)])
        silent += [ReplicaAddress(f"http://127.0.0.{n}:{port}") for n in range(2, 40)]
        live = await Replica("m").start()
        async with front() as router:
            members = router.state.members
            members.seen.clear()
            members.on_replicas_changed([*silent[:20], live.address, *silent[20:]])
            await router.up(1)
            assert all(member.state == "new" for member in list(members.members.values())[-10:])
            assert (await router.complete()).status_code == 200
            await members.seen.wait()
            looks = members.members[live.url].num_probes
            await until(lambda: members.members[silent[0].url].num_probes >= 3)
            assert members.members[live.url].num_probes > looks and 0 < most <= 4
            members.on_replicas_changed([])
        await live.stop()
        for one in (server, *others):
            one.close()

    run(go())


@pytest.mark.parametrize(("count", "rate", "seconds"), [(1, 100, 0.5), (50, 100, 0.5), (4_000, 100, 40.0)])
def test_the_rate_of_probes_is_bounded_whatever_their_number(count: int, rate: float, seconds: float) -> None:
    assert replica_monitor.probe_interval(0.5, count, rate) == seconds
