"""The live page of a router: its files for all, its figures and the replicas' trees for administrators only."""

from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Replica, front, run
from server.harness import parse_events

from headstart.gateway.proxy import replies as error_responses

REMOTE = {"x-forwarded-for": "10.0.0.1"}
TREE: dict[str, Any] = {"object": "cache.tree", "runs": []}
LIVE = "/v1/cache/live?frames=1"


class WithTree(Replica):
    """A replica that answers /v1/cache/tree."""

    asked: list[str]

    async def start(self) -> Replica:
        self.asked = []
        self.middleware = self._tree
        return await super().start()

    async def _tree(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/v1/cache/tree":
            return await handler(request)
        self.asked.append(request.query_string)
        return web.json_response(TREE | {"model": self.name})


def test_a_frame_has_the_replicas_and_the_latest_decisions_with_every_price() -> None:
    async def go() -> None:
        async with front(Replica(), Replica()) as router:
            await router.up(2)
            await router.complete("before someone looks")
            (frame,) = parse_events((await router.client.get(LIVE)).text)
            assert (frame["object"], len(frame["replicas"]), frame["decisions"]) == ("fleet.figures", 2, [])
            await router.client.post("/tokenize", json={"prompt": "no prompt"})
            await router.complete("while someone looks")
            (frame,) = parse_events((await router.client.get(LIVE)).text)
            (decision,) = frame["decisions"]
            assert len(decision["candidates"]) == 2 and all(one["cost_ms"] >= 0 for one in decision["candidates"])
            assert frame["ttft_ms"]["p95"] >= frame["ttft_ms"]["p50"] > 0

    run(go())


def test_decisions_are_bounded_in_number_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with front(Replica()) as router:
            await router.up(1)
            decisions = router.state.proxy.decisions
            decisions.list_and_extend_watch(1e9)
            for _ in range(30):
                await router.complete()
            assert 1 <= len(decisions.list_and_extend_watch(0.0)) <= error_responses.MAX_WATCHED
            await router.complete()
            assert len(decisions.list_and_extend_watch(0.0)) <= error_responses.MAX_WATCHED

    monkeypatch.setattr(error_responses, "WATCH_INTERVAL", 0.0)
    run(go())


def test_the_tree_of_the_named_replica_is_passed_on_and_no_other_address_is_asked() -> None:
    async def go() -> None:
        one, two = WithTree("m"), WithTree("m")
        async with front(one, two) as router:
            await router.up(2)
            for replica in (one, two):
                found = await router.client.get("/v1/cache/tree", params={"replica": replica.url, "max_runs": 7})
                assert found.json() == TREE | {"model": "m"} and replica.asked.pop() == "max_runs=7"
            assert (await router.client.get("/v1/cache/tree")).status_code == 200
            refused = await router.client.get("/v1/cache/tree", params={"replica": "http://127.0.0.1:1"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "replica")

    run(go())


@pytest.mark.parametrize("path", ["/v1/cache/tree", LIVE])
def test_data_are_for_administrators(path: str) -> None:
    async def go() -> None:
        async with front(WithTree()) as router:
            await router.up(1)
            assert (await router.client.get(path)).status_code == 200
            assert (await router.client.get(path, headers=REMOTE)).status_code == 403
            found = await router.client.get(path, headers={"host": "evil.example"})
            assert (found.status_code, found.json()["error"]["code"]) == (403, "host_not_allowed")
        async with front(WithTree(), server={"api_key": ("user",), "admin_api_key": ("root",)}) as router:
            await router.up(1)
            for key, status in (("", 401), ("user", 403), ("root", 200)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                assert (await router.client.get(path, headers=headers)).status_code == status, key

    run(go())


def test_the_page_has_its_files_and_no_page_turns_it_off() -> None:
    async def go() -> None:
        async with front(Replica(), server={"api_key": ("user",)}) as router:
            for path in ("/", "/page/page.js", "/page/page.css"):
                found = await router.client.get(path, headers=REMOTE)
                assert found.status_code == 200 and "default-src 'none'" in found.headers["content-security-policy"]
            assert (await router.client.get("/page/other")).status_code == 404
            assert (await router.client.post("/")).status_code == 405
        async with front(Replica(), server={"page": False}) as router:
            assert [(await router.client.get(path)).status_code for path in ("/", "/page/page.js")] == [404, 404]

    run(go())
