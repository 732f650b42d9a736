"""A consumer before a publisher that does as it is told: what it asks for, how it shares the loop, what it says."""

import asyncio
import re
import tempfile
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio
from gateway.kv_event_harness import listening, look_often, run, until

from headstart.core.cache.events import BlockStored
from headstart.core.cache.hashing import BlockHash
from headstart.engine.kv_event_encoding import KVEventEncoder
from headstart.gateway.kv_events import kv_event_consumer as kv_events
from headstart.gateway.kv_events import kv_event_intake
from headstart.gateway.kv_events.kv_event_consumer import END_OF_REPLAY, KVEventConsumer
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.router.index.event_sequencer import DueBatches
from headstart.router.index.kv_event_index import SILENCE, ReplicaKVEventIndex
from headstart.router.routing_request import RoutingPrompt, router_root


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)


def consumer_at(events: str, *, block_size: int = 4, replay: str | None = None) -> KVEventConsumer:
    index = ReplicaKVEventIndex(block_size, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain))
    return KVEventConsumer(ReplicaAddress("http://replica", events, replay), index, kind="headstart")


def batch(*events: BlockStored) -> bytes:
    return KVEventEncoder("CPU").encode(1.5, list(events))


def stored(number: int, count: int = 1, parent: int | None = None, block_size: int = 4) -> BlockStored:
    handles = tuple(BlockHash((number + i).to_bytes(32, "big")) for i in range(count))
    before = None if parent is None else BlockHash(parent.to_bytes(32, "big"))
    return BlockStored(handles, before, array("i", [number] * (count * block_size)), block_size)


class Publisher:
    """Its sockets at two addresses in `folder`; it knows when it is listened to, and keeps what the test says."""

    def __init__(self, folder: str) -> None:
        self.context = zmq.asyncio.Context()
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        self.pub.bind(f"ipc://{folder}/pub")
        self.router.bind(f"ipc://{folder}/replay")

    async def subscribed(self) -> None:
        assert await self.pub.recv() == b"\x01"

    async def publish(self, number: int, event: BlockStored) -> None:
        await self.pub.send_multipart((b"", number.to_bytes(8, "big"), batch(event)))

    async def asked(self) -> tuple[bytes, int]:
        """Return the next request for a replay: its sender, and from where on."""
        client, _, start = await self.router.recv_multipart()
        return client, int.from_bytes(start, "big")

    async def answer(self, client: bytes, events: dict[int, BlockStored], *, whole: bool = True) -> None:
        """As SGLang: without the topic; `whole`: with the mark of its end."""
        for number, event in events.items():
            await self.router.send_multipart((client, b"", number.to_bytes(8, "big"), batch(event)))
        if whole:
            await self.router.send_multipart((client, b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_what_is_lost_at_the_very_end_is_asked_for_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "CHECK_SECONDS", 1e9)

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            publisher = Publisher(folder)
            consumer = consumer_at(f"ipc://{folder}/pub", replay=f"ipc://{folder}/replay")
            async with listening(consumer):
                await publisher.subscribed()
                for _ in range(2):  # as it comes, and once it is quiet after that
                    client, start = await publisher.asked()
                    assert start == 0
                    await publisher.answer(client, {})
                await publisher.publish(0, stored(10))
                client, start = await publisher.asked()
                await publisher.answer(client, {0: stored(10), 1: stored(11)})
                await until(lambda: len(consumer.index) == 2)
            publisher.close()

    run(test())


def test_a_replay_that_was_cut_is_asked_for_again_from_where_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ drops what does not fit into the publisher's queue, the mark of the end, too."""
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 0.2)

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            publisher = Publisher(folder)
            consumer = consumer_at(f"ipc://{folder}/pub", replay=f"ipc://{folder}/replay")
            async with listening(consumer):
                client, start = await publisher.asked()
                await publisher.answer(client, {number: stored(number) for number in range(3)}, whole=False)
                await until(lambda: consumer.next_batch_number == 3)
                while start != 2:
                    client, start = await publisher.asked()
                await publisher.answer(client, {number: stored(number) for number in range(2, 5)})
                await until(lambda: len(consumer.index) == 5)
                assert consumer.counts["lost"] == consumer.counts["restarts"] == 0
            publisher.close()

    run(test())


def test_without_replay_numbers_that_go_on_do_not_prove_that_the_publisher_is_the_same() -> None:
    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            consumer = consumer_at(f"ipc://{folder}/pub")
            async with listening(consumer):
                first = Publisher(folder)
                await first.subscribed()
                await first.publish(0, stored(10))
                await until(lambda: len(consumer.index) == 1)
                first.close()
                second = Publisher(folder)
                await second.subscribed()
                await second.publish(1, stored(11))  # its batch 0 came too early for us
                await until(lambda: consumer.counts["heard"] == 2)
                await until(lambda: consumer.next_batch_number == 2)
                old = RoutingPrompt([10] * 4, router_root("m")).block_hashes(4)
                assert consumer.index.num_cached_prefix_blocks(old, 0.0) == 0 and consumer.counts["voids"] >= 1
                second.close()

    run(test())


# --- the loop, and what is said


def test_others_have_their_turn_while_a_long_batch_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_intake, "SLICE_SECONDS", 0.0)
    turns: list[int] = []

    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/unused")

        async def other() -> None:
            while True:
                turns.append(len(consumer.index))
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await consumer._take(DueBatches(False, [batch(stored(1, 4096))]))
        task.cancel()
        assert len(consumer.index) == 4096
        names = RoutingPrompt([1] * 4096 * 4, router_root("m")).block_hashes(4)
        assert consumer.index.num_cached_prefix_blocks(names, 0.0) == 4096

    run(test())
    assert len(set(turns)) > 10  # it saw the index grow


def test_a_batch_under_way_is_left_when_the_contents_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_intake, "SLICE_SECONDS", 0.0)

    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/unused")
        others = consumer_at("ipc:///tmp/unused").index
        taking = asyncio.create_task(consumer._take(DueBatches(False, [batch(stored(1, 4096))])))
        while not len(consumer.index):
            await asyncio.sleep(0)
        consumer.index = others
        await taking
        assert len(others) == 0

    run(test())


@asynccontextmanager
async def published(*payloads: bytes) -> AsyncGenerator[tuple[KVEventConsumer, Callable[[], None]]]:
    """A consumer of what a plain PUB socket says, and the way to have requests end there."""
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.Context()
        pub = context.socket(zmq.PUB)
        pub.bind(f"ipc://{folder}/pub")
        consumer = consumer_at(f"ipc://{folder}/pub")

        def end_requests() -> None:
            for number in range(SILENCE):
                names = RoutingPrompt([number] * 8, router_root("m")).block_hashes(4)
                consumer.index.record_finished(consumer.index.record_sent(names, 0.0), names, 0.0)

        try:
            async with listening(consumer):
                number = 0
                while payloads and consumer.counts["heard"] < len(payloads):
                    for payload in payloads:
                        pub.send_multipart((b"topic", number.to_bytes(8, "big"), payload))
                        number += 1
                    await asyncio.sleep(0.01)
                await until(lambda: consumer.is_connected)
                yield consumer, end_requests
        finally:
            context.destroy(linger=0)


@pytest.mark.parametrize(
    ("payloads", "cause"),
    [
        ((), "not one batch came"),
        ((msgspec.msgpack.encode([1.0, [["BlockStored", 7]]]),), "cannot be read"),
        ((batch(stored(1, block_size=8)),), "not of 4 tokens"),
        ((batch(stored(5, parent=4)),), "stored before the router connected.*replay endpoint"),
        ((msgspec.msgpack.encode([1.0, []]),), "no events of layers"),
    ],
)
def test_a_replica_that_tells_nothing_of_use_is_reported_once(
    payloads: tuple[bytes, ...], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[str] = []

    async def test() -> None:
        async with published(*payloads) as (consumer, end_requests):
            end_requests()
            await until(lambda: reported.extend(capsys.readouterr().err.splitlines()) or reported)
            assert consumer.lacks_usable_events
            end_requests()
            await asyncio.sleep(5 * kv_events.POLL_SECONDS)

    run(test())
    reported.extend(capsys.readouterr().err.splitlines())
    assert len(reported) == 1, reported
    assert "KV events of http://replica: 16 requests ended" in reported[0]
    assert re.search(cause, reported[0]), reported[0]


def test_an_unreachable_publisher_is_reported_too(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/no-publisher-here")
        async with listening(consumer):
            for number in range(SILENCE):
                names = RoutingPrompt([number] * 8, router_root("m")).block_hashes(4)
                consumer.index.record_finished(consumer.index.record_sent(names, 0.0), names, 0.0)
            await until(lambda: "nothing listens at ipc:///tmp/no-publisher-here" in capsys.readouterr().err)

    run(test())


def test_an_address_that_is_none_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_events, "RETRY_SECONDS", 0.0)
    reported: list[str] = []

    async def test() -> None:
        async with listening(consumer_at("tcp://no port")):
            await until(lambda: reported.extend(capsys.readouterr().err.splitlines()) or len(reported) > 1)

    run(test())
    assert "cannot listen at tcp://no port" in reported[0]


def test_frames_that_are_no_message_are_counted_and_others_go_on() -> None:
    async def test() -> None:
        async with published(batch(stored(1))) as (consumer, _):
            assert consumer.counts["stored"] >= 1
            for frames in ([b"x"], [b"topic", b"1", b"short number"]):
                await consumer._offer(frames, replayed=False)
            assert consumer.counts["undecodable"] == 2

    run(test())
