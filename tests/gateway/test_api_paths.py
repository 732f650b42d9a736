"""Every path of the table in docs/api.md, asked of a real server and of a router in front of it."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from gateway.harness import RealReplica, Replica, front, run
from server.harness import ROOT, Server, spawn

from headstart.gateway import cache_stats

API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
METHOD = r"(?:GET|POST|DELETE)"
SENTENCE = "turn on the light in the kitchen and play some quiet music in the living room, please. " * 3
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SENTENCE, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SENTENCE}], "max_tokens": 2},
    "/v1/responses": {"input": SENTENCE, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": SENTENCE}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": SENTENCE}]},
    "/api/chat": {"messages": [{"role": "user", "content": SENTENCE}], "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": SENTENCE, "options": {"num_predict": 2}},
    "/api/show": {"model": "null"},
    "/tokenize": {"prompt": "light"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/cache/explain": {"prompt": SENTENCE},
    "/reset_prefix_cache": {},
    "/v1/prefixes": {"name": "p", "text": SENTENCE * 3, "wait": True},
}
ELSEWHERE = {
    "/v1/cache/stats": {"store"},
    "/v1/cache/explain": {"findings", "reused_tokens", "sources", "now", "eviction", "status"},
}
"""Fields that a router leaves out, or has others for."""
KEPT_BODIES = ("GET", "/v1/cache/requests")
"""Shows prompts: off by default, and never at a router, whose clients are one tenant to its replicas."""


def documented() -> list[tuple[str, str]]:
    """Methods and paths of the table of docs/api.md, in its order; what deletes comes last."""
    found: list[tuple[str, str]] = []
    for cell in re.findall(rf"^\| ({METHOD}\b[^|]*)\|", API, re.MULTILINE):
        for methods, rest in re.findall(rf"({METHOD}(?:, {METHOD})*)((?:(?!{METHOD}).)*)", cell):
            paths = re.findall(r"`(/[^`]+)`", rest)
            found += [(method, path) for path in paths for method in methods.split(", ")]
    return sorted(found, key=lambda pair: pair[0] == "DELETE")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two real servers of one model that computes nothing."""
    room = tmp_path_factory.mktemp("api")
    code = "import sys; from headstart_lab.runners.null_replica import main; sys.exit(main())"
    with spawn([sys.executable, "-c", code], room / "one") as one, spawn([sys.executable, "-c", code], room / "b") as b:
        yield [one.wait_ready(), b.wait_ready()]


async def ask(
    client: httpx.AsyncClient, method: str, path: str, answer_id: str, response_id: str = ""
) -> httpx.Response:
    target = path.replace("{id}", "null").replace("{name}", "p").replace("{response_id}", response_id)
    target = target.replace("*", "page.css")
    params = {"/v1/cache/explain": {"request_id": answer_id}, "/v1/cache/live": {"frames": 1}}.get(path, {})
    params = params if method == "GET" else {}
    body = BODIES.get(path) if method == "POST" else None
    return await client.request(method, target, params=params, json=body)


def test_every_documented_path_answers_behind_a_router_as_at_a_server(servers: list[Server]) -> None:
    table = documented()
    assert ("GET", "/readyz") in table and ("DELETE", "/v1/prefixes/{name}") in table and len(table) >= 24

    async def answers(client: httpx.AsyncClient) -> dict[tuple[str, str], httpx.Response]:
        found: dict[tuple[str, str], httpx.Response] = {}
        answer_id = response_id = ""
        for method, path in table:
            found[method, path] = answer = await ask(client, method, path, answer_id, response_id)
            if (method, path) == ("POST", "/v1/responses"):
                response_id = answer.json()["id"]
            if path == "/v1/completions":
                answer_id = answer.json()["id"]
        return found

    async def go() -> None:
        async with httpx.AsyncClient(base_url=servers[0].url, timeout=300) as client:
            alone = await answers(client)
        async with front(*(RealReplica(server.url) for server in servers), tokenizer="auto") as router:
            await router.up(2)
            behind = await answers(router.client)
        for (method, path), answer in alone.items():
            ours = behind[method, path]
            if (method, path) == KEPT_BODIES:
                assert ours.status_code == answer.status_code == 404
                continue
            assert answer.is_success, (method, path, answer.text)
            assert ours.status_code == answer.status_code, (method, path, ours.text)
            if answer.headers["content-type"] == "application/json":
                missing = answer.json().keys() - ours.json().keys()
                assert missing <= ELSEWHERE.get(path, set()), (method, path, missing)

    run(go())


def test_kept_bodies_are_not_shown_through_a_router(tmp_path: Path) -> None:
    code = "import sys; from headstart_lab.runners.null_replica import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--prompt-log-size", "1000000"]

    async def through_a_router(server: Server) -> httpx.Response:
        async with front(RealReplica(server.url)) as router:
            await router.up(1)
            return await router.client.get(KEPT_BODIES[1])

    with spawn(command, tmp_path / "one") as server:
        server.wait_ready()
        assert server.post("/v1/completions", json={"prompt": SENTENCE, "max_tokens": 2}).status_code == 200
        assert [one["body"]["prompt"] for one in server.get(KEPT_BODIES[1]).json()["data"]] == [SENTENCE]
        assert run(through_a_router(server)).status_code == 404


def test_the_statistics_of_a_fleet_are_the_sums_of_its_replicas(servers: list[Server]) -> None:
    async def go() -> None:
        async with front(*(RealReplica(server.url) for server in servers)) as router:
            await router.up(2)
            for number in range(6):
                assert (await router.complete([number + 3] * 40, max_tokens=2)).status_code == 200
            each = [server.get("/v1/cache/stats").json() for server in servers]
            answer = (await router.client.get("/v1/cache/stats")).json()
        assert (answer["object"], answer["num_replicas"], answer["num_reporting"]) == ("fleet.cache.stats", 2, 2)
        assert (answer["model"], answer["block_size"]) == ("null", each[0]["block_size"])
        for name in ("prefill_tokens", "ideal_tokens", "steps", "generation_tokens"):
            assert answer[name] == sum(one[name] for one in each), name
        for group in ("prompt_tokens", "blocks", "evictions", "requests"):
            assert answer[group] == {key: sum(one[group][key] for one in each) for key in each[0][group]}
        assert answer["prompt_tokens"]["total"] >= 6 * 40
        assert answer["prefill_redundancy"] == answer["prefill_tokens"] / answer["ideal_tokens"]
        assert answer["hit_rate"] == answer["prompt_tokens"]["cached"] / answer["prompt_tokens"]["total"]
        assert [one["url"] for one in answer["replicas"]] == [server.url for server in servers]
        assert [one["stats"]["steps"] for one in answer["replicas"]] == [one["steps"] for one in each]
        assert all(one["error"] is None for one in answer["replicas"])

    run(go())


# ------------------------------------------------------------------------------------------ who sees it, and what fails

STATS: dict[str, Any] = {
    "object": "cache.stats",
    "model": "m",
    "block_size": 16,
    "prompt_tokens": {"total": 10, "cached": 4},
    "prefill_tokens": 6,
    "ideal_tokens": 3,
    "blocks": {"total": 100},
    "evictions": {"capacity": 1},
    "requests": {"running": 0},
    "tenants": {"acme": {"cached": 4}},
    "losses": {"evicted_tokens": 1, "examined_tokens": 8, "avoidable_tokens": 2, "causes": {"uuid": 2}},
    "store": {"blocks": 1},
}


class StatsReplica(Replica):
    """One that tells its statistics, or what it is given instead."""

    def __init__(self, told: Any = None, status: int = 200) -> None:
        super().__init__()
        self.told = STATS if told is None else told
        self.status = status
        self.keys: list[str | None] = []
        self.middleware = self._told

    async def _told(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/v1/cache/stats":
            return await handler(request)
        self.keys.append(request.headers.get("authorization"))
        if isinstance(self.told, bytes):
            return web.Response(body=self.told, status=self.status, content_type="application/json")
        return web.json_response(self.told, status=self.status)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("keys", "caller", "status", "sees_replicas"),
    [
        ({}, {}, 200, True),
        ({}, {"x-forwarded-for": "10.0.0.1"}, 403, False),
        ({"api_key": ("user",)}, {}, 401, False),
        ({"api_key": ("user",)}, bearer("user"), 200, False),
        ({"api_key": ("user",), "admin_api_key": ("root",)}, bearer("user"), 403, False),
        ({"api_key": ("user",), "admin_api_key": ("root",)}, bearer("root"), 200, True),
    ],
)
def test_statistics_are_for_whom_metrics_are(
    keys: dict[str, Any], caller: dict[str, str], status: int, sees_replicas: bool
) -> None:
    async def go() -> None:
        replica = StatsReplica()
        async with front(replica, server=keys) as router:
            await router.up(1)
            answer = await router.client.get("/v1/cache/stats", headers=caller)
            assert answer.status_code == status, answer.text
            assert (replica.url in answer.text) is sees_replicas
            if status == 200:
                assert replica.keys == [caller.get("authorization")]
            else:
                assert not replica.keys

    run(go())


def test_behind_one_replica_key_no_tenant_sees_rows_of_others() -> None:
    async def go() -> None:
        replica = StatsReplica()
        keys = {"api_key": ("user", "other")}
        async with front(replica, server=keys, replica_api_key="inner") as router:
            await router.up(1)
            answer = (await router.client.get("/v1/cache/stats", headers=bearer("user"))).json()
            assert replica.keys == ["Bearer inner"]
            assert answer["tenants"] == {} and "store" not in answer and answer["prompt_tokens"]["total"] == 10

    run(go())


def test_replicas_that_do_not_tell_are_listed_and_not_summed() -> None:
    async def go() -> None:
        nested = b'{"model": ' + b"[" * 100_000
        replicas = [
            StatsReplica(),
            StatsReplica({"error": {"message": "no such route"}}, 404),
            StatsReplica({**STATS, "blocks": {"total": "many"}}),
            StatsReplica(nested),
            StatsReplica(b"x" * (cache_stats.MAX_BYTES + 1)),
            StatsReplica({**STATS, "model": "other", "tenants": {"acme": {"cached": 1}, "b": {"cached": 2}}}),
        ]
        async with front(*replicas) as router:
            await router.up(len(replicas))
            answer = (await router.client.get("/v1/cache/stats")).json()
        assert (answer["num_replicas"], answer["num_reporting"], answer["model"]) == (6, 2, None)
        assert answer["blocks"] == {"total": 200} and answer["tenants"] == {"acme": {"cached": 5}, "b": {"cached": 2}}
        losses = answer["losses"]
        assert (losses["evicted_tokens"], losses["avoidable_share"], losses["causes"]) == (2, 0.25, {"uuid": 4})
        errors = [None, "answered 404", "not readable", "not readable", "no answer", None]
        assert [one["error"] for one in answer["replicas"]] == errors

    run(go())


@pytest.mark.parametrize(("told", "status", "code"), [(404, 404, "not_reported"), (401, 401, "permission_denied")])
def test_where_no_replica_tells_the_reason_is_said(told: int, status: int, code: str) -> None:
    async def go() -> None:
        async with front(StatsReplica({}, told), StatsReplica({}, told)) as router:
            await router.up(2)
            answer = await router.client.get("/v1/cache/stats")
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
            posted = await router.client.post("/v1/cache/stats", json={})
            assert (posted.status_code, posted.headers["allow"]) == (405, "GET")
        async with front() as router:
            assert (await router.client.get("/v1/cache/stats")).json()["error"]["code"] == "no_replicas"

    run(go())


def test_a_replica_that_hangs_is_waited_for_no_longer_than_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_stats, "ANSWER_SECONDS", 0.1)

    async def hang(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/v1/cache/stats":
            await asyncio.Event().wait()
        return await handler(request)

    async def go() -> None:
        silent = Replica()
        silent.middleware = hang
        async with front(StatsReplica(), silent) as router:
            await router.up(2)
            answer = (await router.client.get("/v1/cache/stats")).json()
            assert [one["error"] for one in answer["replicas"]] == [None, "no answer"]

    run(go())
