"""The front in precise mode: a replica that publishes its KV events, and what the router believes because of them."""

import asyncio
import json
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Replica, front, usage
from server.harness import until

from headstart.bundled import bundled_intent_model_folder
from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from headstart.core.cache.hashing import BlockHash
from headstart.engine.kv_event_publisher import KVEventPublisher, KVEventsConfig
from headstart.gateway.kv_events import kv_event_intake as kv_event_trust
from headstart.gateway.kv_events.kv_event_decoding import KVEventDecoder
from headstart.gateway.proxy.request_reader import RequestParser, SenderRoutingInfo
from headstart.gateway.replicas.kv_event_subscriptions import MAX_INDEX_BLOCKS, SLACK_BLOCKS, TIERS, index_capacity
from headstart.gateway.replicas.probes import ScrapedMetrics
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.gateway.replicas.replica_monitor import MonitoredReplica
from headstart.openai.engine_requests import salted_domain
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.router.index import kv_event_index as told
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.kv_event_index import MAX_BLOCKS, SILENCE, ReplicaKVEventIndex

BLOCK = 16
NAMES = tuple(BlockHash(bytes([number]) * 32) for number in range(8))


@contextmanager
def publishing(replica: Replica) -> Iterator[KVEventPublisher]:
    """A publisher for a replica, which tells the router of it."""
    with tempfile.TemporaryDirectory() as folder:  # socket paths must be short
        config = KVEventsConfig(True, endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay")
        publisher = KVEventPublisher(config, medium="CPU")
        replica.events, replica.replay = publisher.endpoint, publisher.replay_endpoint
        try:
            yield publisher
        finally:
            publisher.close()


def stored(count: int, **fields: Any) -> BlockStored:
    """Blocks of a prompt of ones."""
    return BlockStored(NAMES[:count], None, array("i", [1] * (BLOCK * count)), BLOCK, **fields)


def test_what_replicas_publish_is_where_prompts_go() -> None:
    async def go() -> None:
        one, other = Replica(), Replica()
        with publishing(one) as first, publishing(other) as second:
            async with front(one, other) as router:
                await router.up(2)
                heard = [router.state.router.endpoints[replica.url].index for replica in (one, other)]
                assert all(isinstance(index, ReplicaKVEventIndex) for index in heard)
                prompt = [1] * (4 * BLOCK) + [2]
                for publisher, index, replica in ((first, heard[0], one), (second, heard[1], other)):
                    publisher.publish([stored(4)])
                    await until(lambda index=index: len(index) == 4)
                    answer = await router.complete(prompt, headers={"x-headstart-explain": "1"})
                    assert answer.headers["x-headstart-replica"] == replica.url
                    assert '"cached_tokens":64' in answer.headers["x-headstart-route"]
                    publisher.publish([BlockRemoved(NAMES[1:4]), AllBlocksCleared()])
                    await until(lambda index=index: len(index) == 0)
                counts = (await router.client.get("/metrics")).text
                assert f'headstart:router_kv_events_total{{kind="stored",replica="{one.url}"}} 4.0' in counts
                described = (await router.client.get("/v1/fleet")).json()["replicas"][0]["cache"]
                assert described["mode"] == "events" and described["counts"]["cleared"] == 1

    asyncio.run(go())


def test_salted_blocks_are_found_by_salted_prompts_alone() -> None:
    async def go() -> None:
        replica = Replica()
        replica.engine = "headstart"
        with publishing(replica) as publisher:
            async with front(replica) as router:
                await router.up(1)
                index = router.state.router.endpoints[replica.url].index
                assert isinstance(index, ReplicaKVEventIndex)
                publisher.publish([stored(4, domain=salted_domain(b"", "s"))])
                await until(lambda: len(index) == 4)
                read = router.state.reader.read
                body = b'{"model": "m", "prompt": [%s]%s}'
                ones = b", ".join([b"1"] * (4 * BLOCK))
                plain = read("/v1/completions", body % (ones, b""), SenderRoutingInfo())
                with_salt = read("/v1/completions", body % (ones, b', "cache_salt": "s"'), SenderRoutingInfo())
                assert index.num_cached_prefix_blocks(plain.request.prompt.block_hashes(BLOCK), 0.0) == 0
                assert index.num_cached_prefix_blocks(with_salt.request.prompt.block_hashes(BLOCK), 0.0) == 4

    asyncio.run(go())


TOOLS = [{"type": "function", "function": {"name": "light", "parameters": {"type": "object"}}}]


def test_a_chat_with_tools_is_found_again_where_events_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template here has no tools, so the router cannot render the prompt, and no event names what it names."""
    monkeypatch.setattr(told, "SPECULATION", 0.0)
    monkeypatch.setattr(told, "SPECULATION_COMPUTED", 0.0)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [{"index": 0}], "usage": usage(600, 590 * (len(replica.bodies) > 1))})

    async def go() -> None:
        with publishing(replica) as publisher:
            reader = RequestParser(Tokenizer.from_folder(bundled_intent_model_folder()))
            async with front(replica, reader=reader) as router:
                await router.up(1)
                index = router.state.router.endpoints[replica.url].index
                assert isinstance(index, ReplicaKVEventIndex)
                system = {"role": "system", "content": "You name intents. " * 120}
                body = {"messages": [system, {"role": "user", "content": "light"}], "tools": TOOLS}
                for turn in range(2):
                    publisher.publish([stored(4)])  # events are of use: the router never gives up listening
                    await until(lambda: len(index) == 4)
                    response = await router.client.post(
                        "/v1/chat/completions", json=body, headers={"x-headstart-explain": "1"}
                    )
                    (candidate,) = json.loads(response.headers["x-headstart-route"])["candidates"]
                    assert (candidate["cached_tokens"] > 500) is (turn == 1)
                assert router.state.router.endpoints[replica.url].index is index

    replica = Replica()
    replica.script = answer
    asyncio.run(go())


def test_a_replica_that_publishes_nothing_is_guessed_at_until_it_is_heard() -> None:
    async def go() -> None:
        replica = Replica()
        with publishing(replica) as publisher:
            async with front(replica) as router:
                await router.up(1)
                endpoint = router.state.router.endpoints[replica.url]
                for number in range(SILENCE):
                    await router.complete([number + 5] * (2 * BLOCK))
                assert isinstance(endpoint.index, ApproximateIndex) and router.state.router.num_blind == 1
                publisher.publish([stored(4)])
                await until(lambda: isinstance(endpoint.index, ReplicaKVEventIndex))
                assert len(endpoint.index) == 4  # type: ignore[arg-type]  # one that was waited for

    asyncio.run(go())


def test_while_a_publisher_is_suspended_its_replica_is_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_trust, "FIRST_SUSPENSION", 1.0)

    async def go() -> None:
        replica = Replica()
        with publishing(replica) as publisher:
            async with front(replica) as router:
                await router.up(1)
                endpoint = router.state.router.endpoints[replica.url]
                publisher.publish([stored(4)])
                await until(lambda: isinstance(endpoint.index, ReplicaKVEventIndex) and len(endpoint.index) == 4)
                monkeypatch.setattr(KVEventDecoder, "split_batch", failing)
                publisher.publish([stored(1)])
                await until(lambda: isinstance(endpoint.index, ApproximateIndex))
                replica.block_size = 32  # what is believed begins anew meanwhile
                await until(lambda: endpoint.block_size == 32)
                assert isinstance(endpoint.index, ApproximateIndex)
                replica.block_size = BLOCK
                monkeypatch.undo()
                await until(lambda: isinstance(endpoint.index, ReplicaKVEventIndex) and len(endpoint.index) == 4)
                counts = (await router.client.get("/metrics")).text
                assert f'headstart:router_kv_events_total{{kind="failures",replica="{replica.url}"}} 1.0' in counts

    def failing(self: KVEventDecoder, payload: bytes) -> None:
        raise ZeroDivisionError

    asyncio.run(go())


def test_the_index_of_a_replica_is_bounded_by_the_pool_it_reports() -> None:
    async def go() -> None:
        replica = Replica(num_blocks=100)
        with publishing(replica):
            async with front(replica) as router:
                await router.up(1)
                index = router.state.router.endpoints[replica.url].index
                assert isinstance(index, ReplicaKVEventIndex)
                assert index.max_blocks == TIERS * 100 + SLACK_BLOCKS

    asyncio.run(go())


@pytest.mark.parametrize(
    ("num_blocks", "reported_size", "block_size", "expected"),
    [
        (0, 16, 16, MAX_BLOCKS),
        (1_000, 16, 16, TIERS * 1_000 + SLACK_BLOCKS),
        (1_000, 16, 1, TIERS * 16_000 + SLACK_BLOCKS),
        (10**7, 16, 16, MAX_INDEX_BLOCKS),
    ],
)
def test_capacity_counts_the_tokens_of_the_pool(
    num_blocks: int, reported_size: int, block_size: int, expected: int
) -> None:
    member = MonitoredReplica(ReplicaAddress("http://replica"))
    member.metrics = ScrapedMetrics(num_blocks=num_blocks, block_size=reported_size)
    assert index_capacity(member, block_size) == expected


def test_while_prompts_are_counted_in_bytes_events_are_not_listened_to() -> None:
    async def go() -> None:
        replica = Replica()
        with publishing(replica):
            async with front(replica, tokenizer="auto") as router:
                await router.up(1)
                endpoint = router.state.router.endpoints[replica.url]
                assert isinstance(endpoint.index, ApproximateIndex) and not router.state.listening.event_counts()
                router.state.reader.tokenizer = Tokenizer.from_folder(bundled_intent_model_folder())
                await until(lambda: isinstance(endpoint.index, ReplicaKVEventIndex))

    asyncio.run(go())


def test_who_is_removed_is_not_listened_to_any_more() -> None:
    async def go() -> None:
        replica = Replica()
        with publishing(replica):
            async with front(replica) as router:
                await router.up(1)
                assert list(router.state.listening.event_counts()) == [replica.url]
                router.state.members.on_replicas_changed([])
                assert not router.state.listening.event_counts()

    asyncio.run(go())
