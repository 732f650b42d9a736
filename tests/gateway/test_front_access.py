"""Access at a router: who reaches which path of the replicas, and who sees where they are."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Front, RealReplica, Replica, front, run
from server.harness import fake_server, until

from headstart.gateway.gateway_routes import PROXIED
from headstart.router.index.approximate_index import ApproximateIndex

REMOTE = {"x-forwarded-for": "10.0.0.1"}  # of a caller that is not on this machine
ADMINISTRATION = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/sleep", "/v1/wake_up", "/v1/responses/r1/cancel"),
    *("/v1/collective_rpc", "/v1/files", "/v1/fine_tuning/jobs"),
)
DISGUISES = (
    *("//v1/sleep", "/v1//sleep", "/v1/../sleep", "/v1/./sleep", "/v1/completions/../sleep", "/v1/%73leep"),
    *("/v1/completions/%2e%2e/sleep", "/v1/completions%2f..%2fsleep", "/v1/sleep/", "/v1/sleep?x=/v1/completions"),
    *("/V1/SLEEP", "/v1/completions/", "/v1/Completions", "/v1/completions;/v1/sleep", "/v1/completions%00/sleep"),
    *("/v1/sleep#", "/v1/sleep%3f", "/v1/completions%20", "/sleep", "/pause", "http://x/v1/sleep"),
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def post(router: Front, target: str, *lines: str) -> int:
    """The status of a POST with the target as it is: clients would tidy it."""
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = (f"POST {target} HTTP/1.1", "host: localhost", "content-length: 2", "connection: close", *lines)
    writer.write("\r\n".join([*head, "", "{}"]).encode())
    status = (await reader.read()).split()[1]
    writer.close()
    return int(status)


@pytest.mark.parametrize("keys", [{}, {"api_key": ("user",)}, {"api_key": ("user",), "admin_api_key": ("root",)}])
def test_only_an_administrator_reaches_paths_that_are_not_for_tenants(keys: dict[str, Any]) -> None:
    async def go() -> None:
        replica = Replica()
        who = ["authorization: Bearer user", "x-forwarded-for: 10.0.0.1"]
        async with front(replica, server=keys, replica_api_key="inner") as router:
            for path in (*ADMINISTRATION, *DISGUISES):
                assert await post(router, path, *who) in (400, 403, 404), path
            assert not replica.bodies
            if "admin_api_key" in keys:
                for path in ADMINISTRATION:
                    assert await post(router, path, "authorization: Bearer root") == 200, path
                assert len(replica.bodies) == len(ADMINISTRATION)

    run(go())


def test_without_keys_this_machine_reaches_all_paths_under_v1_that_are_written_plainly() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            for path in ADMINISTRATION:
                assert await post(router, path) == 200, path
            count = len(replica.bodies)
            for path in DISGUISES:
                if path not in (
                    "/v1/%73leep",
                    "/v1/sleep?x=/v1/completions",
                    "/v1/Completions",
                    "/v1/sleep#",
                    "http://x/v1/sleep",
                ):
                    assert await post(router, path) in (400, 404), path
            assert len(replica.bodies) == count

    run(go())


def test_tenants_reach_everything_that_answers_prompts() -> None:
    async def go() -> None:
        replica = Replica()
        paths: list[str] = []

        async def note(request: web.Request, body: dict[str, Any]) -> None:
            paths.append(request.path)

        replica.script = note
        async with front(replica, server={"api_key": ("user",)}) as router:
            for path in sorted(PROXIED):
                assert await post(router, f"{path}?x=/sleep", "authorization: Bearer user") == 200, path
                assert await post(router, path) == 401, path
            assert paths == sorted(PROXIED), "the path that was judged is the path that is asked"

    run(go())


async def _figures(router: Front, **headers: str) -> dict[str, int]:
    """The status of everything that tells about replicas, to one caller."""
    paths = ("/v1/fleet", "/metrics", "/v1/cache/explain?request_id=r")
    found = {path: (await router.client.get(path, headers=headers)).status_code for path in paths}
    posted = await router.client.post("/v1/cache/explain", json={"prompt": "x"}, headers=headers)
    return {**found, "POST": posted.status_code}


@pytest.mark.parametrize(
    ("keys", "caller", "expected"),
    [
        ({}, {}, [200, 200, 404, 200]),
        ({}, REMOTE, [403] * 4),
        ({}, {**REMOTE, **bearer("anything")}, [403] * 4),
        ({}, {"origin": "http://evil.example"}, [403] * 4),
        ({"admin_api_key": ("root",)}, {}, [401] * 4),
        ({"admin_api_key": ("root",)}, bearer("anything"), [401] * 4),
        ({"admin_api_key": ("root",)}, {**REMOTE, **bearer("root")}, [200, 200, 404, 200]),
        ({"api_key": ("user",), "admin_api_key": ("root",)}, bearer("user"), [403, 403, 404, 200]),
        ({"api_key": ("user",), "admin_api_key": ("root",)}, bearer("root"), [200, 200, 404, 200]),
        ({"api_key": ("user",)}, bearer("user"), [403, 200, 404, 200]),
        ({"api_key": ("user",)}, {}, [401] * 4),
    ],
)
def test_what_tells_about_replicas_is_for_administrators(
    keys: dict[str, Any], caller: dict[str, str], expected: list[int]
) -> None:
    async def go() -> None:
        async with front(Replica(), server=keys) as router:
            await router.up(1)
            assert list((await _figures(router, **caller)).values()) == expected

    run(go())


def test_a_tenant_without_an_administrator_sees_metrics_but_none_of_a_replica() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, server={"api_key": ("user",)}) as router:
            await router.up(1)
            assert (await router.complete(headers=bearer("user"))).status_code == 200
            text = (await router.client.get("/metrics", headers=bearer("user"))).text
            assert replica.url not in text and "replica=" not in text and "headstart:router_replicas" in text
        async with front(replica := Replica()) as router:
            await router.up(1)
            assert f'replica="{replica.url}"' in (await router.client.get("/metrics")).text

    run(go())


@pytest.mark.parametrize("keys", [{}, {"api_key": ("user",)}, {"api_key": ("user",), "admin_api_key": ("root",)}])
def test_an_ordinary_caller_sees_neither_addresses_nor_predictions(keys: dict[str, Any]) -> None:
    async def go() -> None:
        replica = Replica()
        caller = {**REMOTE, **bearer("user"), "x-headstart-explain": "1"}
        async with front(replica, server=keys) as router:
            for stream in (False, True):
                answer = await router.complete([1] * 64, headers=caller, stream=stream)
                assert answer.status_code == 200
                assert not [name for name in answer.headers if name.startswith("x-headstart")]
                assert replica.url not in str(answer.headers) + answer.text
            if keys:
                told = await router.client.post("/v1/cache/explain", json={"prompt": [1] * 64}, headers=caller)
                assert told.status_code == 200 and replica.url not in told.text
                request_id = answer.headers["x-request-id"]
                told = await router.client.get(f"/v1/cache/explain?request_id={request_id}", headers=caller)
                assert told.status_code == 200 and replica.url not in told.text, told.text
            if "admin_api_key" in keys:
                answer = await router.complete([1] * 64, headers={**caller, **bearer("root")})
                assert answer.headers["x-headstart-replica"] == replica.url
                assert json.loads(answer.headers["x-headstart-route"])["candidates"]

    run(go())


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_told_nothing_of_the_routing_not_even_on_this_machine(status: int) -> None:
    async def go() -> None:
        replica = Replica()

        async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
            return web.json_response({"error": {"message": "no", "code": "invalid_api_key"}}, status=status)

        replica.script = refuse
        async with front(replica) as router:
            for stream in (False, True):
                answer = await router.complete([1] * 64, headers={"x-headstart-explain": "1"}, stream=stream)
                assert answer.status_code == status
                assert not [name for name in answer.headers if name.startswith("x-headstart")]

    run(go())


class KeyedReplica(Replica):
    """One that remembers which key it is looked at with, by path."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: dict[str, set[str]] = {}

    def note(self, request: web.Request) -> None:
        self.looks.setdefault(request.path, set()).add(request.headers.get("authorization", ""))

    async def _health(self, request: web.Request) -> web.Response:
        self.note(request)
        return await super()._health(request)

    async def _models(self, request: web.Request) -> web.Response:
        self.note(request)
        return await super()._models(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.note(request)
        return await super()._metrics(request)


@pytest.mark.parametrize(
    ("keys", "replica_key", "expected"),
    [
        ({"admin_api_key": ("root",)}, None, ""),
        ({"admin_api_key": ("root",)}, "root", ""),
        ({"admin_api_key": ("root",), "api_key": ("user",)}, None, "Bearer user"),
        ({"admin_api_key": ("root",), "api_key": ("user",)}, "root", "Bearer user"),
        ({"admin_api_key": ("root",), "api_key": ("user",)}, "inner", "Bearer inner"),
        ({}, None, ""),
    ],
)
def test_no_look_at_a_replica_carries_an_administrators_key(
    keys: dict[str, Any], replica_key: str | None, expected: str
) -> None:
    async def go() -> None:
        replica = KeyedReplica()
        async with front(replica, server=keys, replica_api_key=replica_key):
            await until(lambda: len(replica.looks) == 3)
            assert replica.looks == {path: {expected} for path in ("/health", "/v1/models", "/metrics")}

    run(go())


def test_the_cache_of_a_replica_whose_metrics_are_refused_is_known_by_its_model(folder: str, tmp_path: Path) -> None:
    """A server with administrators' keys shows /metrics to these alone, and no look carries such a key."""
    keys: dict[str, Any] = {"api_key": ("user",), "admin_api_key": ("root",)}

    async def go(url: str, known: dict[str, int]) -> None:
        async with front(RealReplica(url), server=keys) as router:
            await router.up(1)
            endpoint = router.state.router.endpoints[url]
            assert isinstance(endpoint.index, ApproximateIndex)
            assert (endpoint.block_size, endpoint.index.estimated_capacity) == (
                known["block_size"],
                known["num_gpu_blocks"],
            )
            assert router.state.members.members[url].metrics.kind == "headstart"

    with fake_server(folder, tmp_path / "log", **keys) as server:
        with server.client() as client:
            assert client.get("/metrics", headers=bearer("user")).status_code == 403
            card = client.get("/v1/models", headers=bearer("user")).json()["data"][0]
        run(go(server.url, card))
