"""A consumer of garbage: it goes on listening, its index stays bounded, others have their turn."""

import asyncio
import json
import tempfile
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from gateway.kv_event_harness import listening, look_often, run, until
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.cache.events import BlockStored
from headstart.core.cache.hashing import BlockHash
from headstart.engine.kv_event_encoding import KVEventEncoder
from headstart.gateway.kv_events import kv_event_consumer, kv_event_intake
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.router.index.kv_event_index import ReplicaKVEventIndex
from headstart.router.routing_request import RoutingPrompt, router_root

SAMPLES = json.loads((Path(__file__).parent / "kv_event_samples.json").read_text())
REAL = [bytes.fromhex(line) for line in (*SAMPLES["captured"], *SAMPLES["made"].values())]
NESTED = b"\x91" * 100_000 + b"\xc0"
CAPACITY = 50


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)
    monkeypatch.setattr(kv_event_intake, "FIRST_SUSPENSION", 0.05)


def consumer_at(events: str, *, max_blocks: int = 2**20) -> KVEventConsumer:
    index = ReplicaKVEventIndex(
        4, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain), max_blocks=max_blocks
    )
    return KVEventConsumer(ReplicaAddress("http://replica", events), index, kind="headstart")


def stored(number: int) -> bytes:
    """A batch of one block."""
    event = BlockStored((BlockHash(number.to_bytes(32, "big")),), None, array("i", [number] * 4), 4)
    return KVEventEncoder("CPU").encode(1.5, [event])


def is_known(consumer: KVEventConsumer, number: int) -> bool:
    return (
        consumer.index.num_cached_prefix_blocks(RoutingPrompt([number] * 4, router_root("m")).block_hashes(4), 0.0) == 1
    )


@asynccontextmanager
async def published(**options: Any) -> AsyncGenerator[tuple[KVEventConsumer, Callable[..., None]]]:
    """A consumer, and the way to send it messages."""
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.Context()
        pub = context.socket(zmq.PUB)
        pub.bind(f"ipc://{folder}/pub")
        consumer = consumer_at(f"ipc://{folder}/pub", **options)

        def send(*frames: bytes) -> None:
            pub.send_multipart(frames)

        try:
            async with listening(consumer):
                number = 0
                while not consumer.counts["heard"]:  # until it has subscribed
                    send(b"", number.to_bytes(8, "big"), stored(1))
                    number += 1
                    await asyncio.sleep(0.01)
                yield consumer, send
        finally:
            context.destroy(linger=0)


async def taken_in(consumer: KVEventConsumer, send: Callable[..., None], first: int) -> None:
    """Sends well-formed batches until one is taken in: those before it subscribes again are lost."""
    for number in range(first, first + 3_000):
        send(b"", number.to_bytes(8, "big"), stored(7))
        await asyncio.sleep(0.01)
        if is_known(consumer, 7):
            return
    raise AssertionError(consumer.counts)


@pytest.mark.parametrize(
    "frames",
    [
        (b"", (1000).to_bytes(8, "big"), NESTED),
        (b"", (1000).to_bytes(8, "big"), b"\x92\x01" + NESTED),
        (b"", (1000).to_bytes(8, "big"), b"\xdd\xff\xff\xff\xff"),
        (b"", (1000).to_bytes(8, "big"), b""),
        (b"only a topic",),
        (b"", b"short", b"batch"),
        (b"", b"\xff" * 8, stored(2)),  # the mark of a replay's end
        (b"", b"\x80" + bytes(7), stored(2)),
        (b"", b"\x7f" + b"\xff" * 7, stored(2)),
        (b"", b"\x7f" + b"\xff" * 7, NESTED),
        tuple(b"%d" % number for number in range(1_000)),
        (b"",) * 100 + ((1000).to_bytes(8, "big"), stored(2)),
    ],
)
def test_no_message_ends_the_listener(frames: tuple[bytes, ...]) -> None:
    async def test() -> None:
        async with published() as (consumer, send):
            heard = consumer.counts["heard"]
            send(*frames)
            await until(lambda: consumer.counts["heard"] > heard)
            await taken_in(consumer, send, 1001)
            consumer.index.check()

    run(test())


def test_a_message_of_absurd_size_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq closes the connection, and the batch is a gap."""
    monkeypatch.setattr(kv_event_consumer, "MAX_MESSAGE_BYTES", 100_000)

    async def test() -> None:
        async with published() as (consumer, send):
            send(b"", (1000).to_bytes(8, "big"), bytes(100_001))
            await taken_in(consumer, send, 1001)
            assert consumer.counts["connections"] > 1 and consumer.counts["undecodable"] == 0

    run(test())


def test_a_batch_that_cannot_be_read_empties_the_index_and_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It may have removed anything."""

    async def test() -> None:
        async with published() as (consumer, send):
            await until(lambda: is_known(consumer, 1))
            for number in range(1000, 1003):
                send(b"", number.to_bytes(8, "big"), b"\xc1")
            await until(lambda: consumer.counts["undecodable"] == 3)
            await until(lambda: not is_known(consumer, 1))
            await taken_in(consumer, send, 1003)

    run(test())
    assert capsys.readouterr().err.count("it sent what cannot be read") == 1


def test_a_removal_that_cannot_be_read_empties_the_index() -> None:
    async def test() -> None:
        async with published() as (consumer, send):
            await until(lambda: is_known(consumer, 1))
            send(b"", (1000).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [["BlockRemoved", [[1]]]]]))
            await until(lambda: consumer.counts["malformed"] == 1)
            assert not is_known(consumer, 1)

    run(test())


def test_many_bad_batches_suspend_the_publisher_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with published() as (consumer, send):
            for number in range(1000, 1000 + kv_event_intake.MAX_STRIKES):
                send(b"", number.to_bytes(8, "big"), NESTED)
            await until(lambda: consumer.counts["suspensions"] == 1)
            assert len(consumer.index) == 0
            await taken_in(consumer, send, 2000)
            assert not consumer.is_suspended and consumer.counts["failures"] == 0

    run(test())
    assert "its cache is approximated" in capsys.readouterr().err


def test_a_listener_that_fails_is_logged_and_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = iter([ZeroDivisionError("a fault of ours")])
    apply = ReplicaKVEventIndex.apply

    def failing(self: ReplicaKVEventIndex, events: Any) -> None:
        for error in failures:
            raise error
        apply(self, events)

    async def test() -> None:
        async with published() as (consumer, send):
            await until(lambda: consumer.counts["failures"] == 1)
            await taken_in(consumer, send, 1000)

    monkeypatch.setattr(ReplicaKVEventIndex, "apply", failing)
    run(test())
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "kv_event_listener_failed" in line]
    assert "ZeroDivisionError: a fault of ours" in line and "Traceback" in line and "http://replica" in line


def test_an_index_that_outgrows_its_bound_starts_anew() -> None:
    async def test() -> None:
        async with published(max_blocks=CAPACITY) as (consumer, send):
            for number in range(1000, 1000 + 2 * CAPACITY):
                send(b"", number.to_bytes(8, "big"), stored(number))
                await asyncio.sleep(0)
                assert len(consumer.index) <= CAPACITY
            await until(lambda: consumer.counts["over_capacity"])
            await taken_in(consumer, send, 2000)

    run(test())


# --- turns of others


async def turns_during(work: Any) -> int:
    """Return how often another task ran while `work` did."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await work
    task.cancel()
    return turns


@pytest.mark.parametrize(
    "event",
    [["BlockRemoved", [1]], ["BlockStored", "nonsense"], ["NobodyKnowsThis", 1], ["BlockStored", [1], 7, [1, 2], 2]],
)
def test_others_have_their_turn_during_a_batch_of_many_events(event: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while not one of them is of use."""
    monkeypatch.setattr(kv_event_intake, "SLICE_SECONDS", 0.0)
    payload = msgspec.msgpack.encode([1.0, [event] * 1_000])

    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/unused")
        offered = consumer._offer([b"", bytes(8), payload], replayed=False)
        assert await turns_during(offered) > 900

    run(test())


def test_others_have_their_turn_during_a_long_removal_and_a_flood_of_old_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_event_intake, "SLICE_SECONDS", 0.0)
    removal = msgspec.msgpack.encode([1.0, [["BlockRemoved", list(range(100 * 256))]]])

    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/unused")
        offered = consumer._offer([b"", bytes(8), removal], replayed=False)
        assert await turns_during(offered) > 90

        async def flood() -> None:
            for _ in range(100):
                await consumer._offer([b"", bytes(8), removal], replayed=True)

        assert await turns_during(flood()) > 90

    run(test())


# --- the law


def mutated(rng: Random) -> bytes:
    payload = bytearray(rng.choice(REAL))
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(payload))
        payload[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(payload)


@given(st.integers(0, 2**32), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_garbage_never_ends_the_listener_nor_outgrows_the_index_and_what_follows_is_taken_in(
    seed: int, count: int
) -> None:
    rng = Random(seed)

    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/unused", max_blocks=CAPACITY)
        offer = consumer._offer
        for _ in range(count):
            number = rng.choice([rng.randrange(5), rng.randrange(2**63), 2**63 - 1]).to_bytes(8, "big")
            payload = rng.choice([mutated(rng), rng.choice(REAL), rng.randbytes(rng.randrange(50)), NESTED])
            frames = [b"", number, payload][rng.randrange(2) :] if rng.randrange(10) else [number]
            try:
                await offer(frames, replayed=rng.randrange(2) == 1)
            except kv_event_intake.UntrustedPublisherError:
                consumer._trust.suspend_publisher(0.0)
            assert len(consumer.index) <= CAPACITY
            consumer.index.check()
        await consumer._take(consumer._feed.reset())
        consumer._trust.suspend_publisher(0.0)
        await offer([b"", (2**40).to_bytes(8, "big"), stored(7)], replayed=False)
        assert is_known(consumer, 7)

    run(test())
