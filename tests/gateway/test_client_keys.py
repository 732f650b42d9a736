"""Clients whose keys only the replicas know: whose prompts the router believes to be cached for whom."""

import json
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Front, Replica, front, run
from gateway.test_kv_event_subscriptions import publishing, stored
from server.harness import until

from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.kv_event_index import ReplicaKVEventIndex

PROMPT = [1] * 64  # four blocks


class KeyedReplica(Replica):
    """A server with keys, or without any. As vLLM's, it guards what lies under /v1 and nothing else.

    It reports what its cache has of a prompt: of another key too, but for Headstart's.
    """

    def __init__(self, *keys: str, engine: str = "vllm", models_are_open: bool = False) -> None:
        super().__init__()
        self.engine = engine
        self.keys = keys
        self.models_are_open = models_are_open
        self.has: set[str] = set()  # prompts, with the key where keys are kept apart

    def refusal(self, request: web.Request) -> web.Response | None:
        if not self.keys or key_of(request) in self.keys or not request.path.startswith("/v1/"):
            return None
        return web.json_response({"error": {"message": "no", "code": "invalid_api_key"}}, status=401)

    async def _models(self, request: web.Request) -> web.Response:
        refusal = None if self.models_are_open else self.refusal(request)
        return refusal or await super()._models(request)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self.refusal(request)) is not None:
            return refusal
        prompt = str((await request.json())["prompt"]) + (key_of(request) if self.keys and self.is_ours else "")
        self.cached = 63 if prompt in self.has else 0
        self.has.add(prompt)
        return await super()._post(request)

    @property
    def is_ours(self) -> bool:
        return self.engine == "headstart"


def key_of(request: web.Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


async def predicted(router: Front, key: str | None, **fields: Any) -> int | None:
    """Tokens of the prompt that the router believed to be cached for a key; None if the answer does not tell."""
    headers = {"x-headstart-explain": "1"} | ({"authorization": f"Bearer {key}"} if key else {})
    answer = await router.complete(PROMPT, headers=headers, **fields)
    told = answer.headers.get("x-headstart-route")
    assert (told is None) == (answer.status_code == 401)
    return None if told is None else json.loads(told)["candidates"][0]["cached_tokens"]


def blocks(router: Front, *replicas: Replica) -> int:
    """Blocks that the router believes to be cached anywhere."""
    found = [router.state.router.endpoints[replica.url].index for replica in replicas]
    return sum(len(index) for index in found if isinstance(index, ApproximateIndex))


def test_keys_that_replicas_keep_apart_share_no_prediction() -> None:
    async def go() -> None:
        replica = KeyedReplica("a", "b", engine="headstart")
        async with front(replica) as router:
            await router.up(1)
            assert [await predicted(router, key) for key in ("a", "a", "b", "b", "a")] == [0, 63, 0, 63, 63]
            assert blocks(router, replica) == 2 * 4

    run(go())


@pytest.mark.parametrize("engine", ["headstart", "vllm", "tgi"])
def test_a_wrong_key_sees_no_prediction_and_leaves_no_trace(engine: str) -> None:
    async def go() -> None:
        replica = KeyedReplica("a", engine=engine)
        async with front(replica) as router:
            await router.up(1)
            assert [await predicted(router, "a"), await predicted(router, "wrong"), await predicted(router, None)] == [
                *(0, None, None)
            ]
            count = blocks(router, replica)
            sender = router.state.sender_of_request
            domains = [
                sender(router.state.auth.authorise({"path": "/v1/models", "headers": headers}), headers).domain
                for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"Bearer wrong2")])
            ]
            assert len({*domains, b""}) == 4, "each unknown key is a domain of its own"
            for _ in range(3):
                await router.complete([2] * 640, headers={"authorization": "Bearer wrong", "x-request-id": "r"})
            assert blocks(router, replica) == count == 4
            assert (await router.client.get("/v1/cache/explain?request_id=r")).status_code == 404

    run(go())


def test_where_replicas_check_no_key_all_clients_share_predictions_whatever_they_send() -> None:
    """They share the cache itself; so routing by prefix loses nothing by placeholder keys."""

    async def go() -> None:
        replicas = [KeyedReplica(engine="headstart") for _ in range(2)]
        async with front(*replicas) as router:
            await router.up(2)
            assert [await predicted(router, key) for key in ("none", None, "sk-1", "sk-2")] == [0, 63, 63, 63]
            assert sorted(len(replica.bodies) for replica in replicas) == [0, 4] and blocks(router, *replicas) == 4

    run(go())


def test_valid_keys_of_an_engine_with_one_cache_for_all_share_predictions_once_they_have_been_answered() -> None:
    async def go() -> None:
        replica = KeyedReplica("a", "b")
        async with front(replica) as router:
            await router.up(1)
            assert [await predicted(router, key) for key in ("a", "a", "a")] == [0, 0, 63]
            assert [await predicted(router, key) for key in ("b", "b")] == [0, 63]
            replica.keys = ("b",)
            assert await predicted(router, "a") is None, "it is refused"
            replica.keys = ("a", "b")
            assert [await predicted(router, key) for key in ("a", "a")] == [63, 63]

    run(go())


def test_a_valid_key_finds_what_such_an_engine_publishes_and_a_wrong_one_does_not() -> None:
    """Its KV events name blocks by tokens and salt alone (precise mode)."""

    async def go() -> None:
        replica = KeyedReplica("a")
        with publishing(replica) as publisher:
            async with front(replica) as router:
                await router.up(1)
                assert await predicted(router, "a") == 0
                index = router.state.router.endpoints[replica.url].index
                publisher.publish([stored(4)])
                await until(lambda: isinstance(index, ReplicaKVEventIndex) and len(index) == 4)
                assert await predicted(router, "a") == 63 and await predicted(router, "wrong") is None

    run(go())


def test_an_answer_that_needs_no_key_proves_none() -> None:
    """vLLM guards /v1 and leaves /tokenize open."""

    async def go() -> None:
        replica = KeyedReplica("a")
        wrong = {"authorization": "Bearer wrong"}
        async with front(replica) as router:
            await router.up(1)
            assert (await router.client.post("/tokenize", json={"prompt": "x"}, headers=wrong)).status_code == 200
            assert domain(router, "wrong") != b""
            await router.complete(PROMPT, headers={"authorization": "Bearer a"})
            assert domain(router, "a") == b"" != domain(router, "wrong")

    run(go())


def domain(router: Front, key: str) -> bytes:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    principal = router.state.auth.authorise({"path": "/v1/models", "headers": headers})
    return router.state.sender_of_request(principal, headers).domain


def test_one_replica_that_keeps_keys_apart_is_enough_to_keep_them_apart_for_all() -> None:
    async def go() -> None:
        keyed, shared, free = KeyedReplica("a", engine="headstart"), KeyedReplica("a"), Replica()
        async with front(shared, free) as router:
            await router.up(2)
            for _ in range(4):
                await router.complete(PROMPT, headers={"authorization": "Bearer a"})
            await keyed.start()
            router.state.members.on_replicas_changed([shared.address, free.address, keyed.address])
            await router.up(3)
            assert domain(router, "a") not in (b"", domain(router, "b"))
            router.state.members.on_replicas_changed([free.address])
            assert domain(router, "a") == domain(router, "b") == b""
        await keyed.stop()

    run(go())


def test_a_replica_that_refuses_a_key_is_known_to_check_keys_whatever_its_models_say() -> None:
    async def go() -> None:
        replica = KeyedReplica("a", engine="headstart", models_are_open=True)
        async with front(replica) as router:
            await router.up(1)
            assert domain(router, "a") == b"" and await predicted(router, "wrong") is None
            assert domain(router, "a") != domain(router, "wrong") != b""

    run(go())


def test_what_a_key_becomes_cannot_be_computed_and_every_spelling_of_credentials_counts() -> None:
    async def go() -> None:
        found = list[bytes]()
        for _ in range(2):
            replica = KeyedReplica("a", engine="headstart")
            async with front(replica) as router:
                await until(lambda: replica.url in router.state.router.endpoints)  # noqa: B023
                principal = router.state.auth.authorise({"path": "/v1/models", "headers": []})
                credentials = [
                    [(b"authorization", b"Bearer a")],
                    [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
                    [(b"authorization", b"Bearer aauthorizationBearer b")],
                    [(b"x-api-key", b"Bearer a")],
                    [(b"api-key", b"Bearer a")],
                    [],
                ]
                found += [router.state.sender_of_request(principal, headers).domain for headers in credentials]
        assert len(set(found)) == len(found) == 12 and all(len(one) == 32 for one in found)

    run(go())
