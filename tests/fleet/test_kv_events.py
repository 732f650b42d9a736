"""Precise mode over real sockets: the index of the consumer against the engine's own, whatever is lost on the way."""

import asyncio
import re
import tempfile
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
from server.harness import PATIENCE

from headstart.bench.precise_rig import Rig, Sizes
from headstart.core.events import BlockStored
from headstart.core.hashing import BlockHash
from headstart.fleet import kv_event_sockets, kv_events
from headstart.fleet.address import ReplicaAddress
from headstart.fleet.kv_events import KVEventConsumer
from headstart.router.ask import Prompt, router_root
from headstart.router.feed import Due
from headstart.router.told import SILENCE, ToldContents
from headstart.server.kv_event_encoding import BatchEncoder

SIZES = Sizes()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked after now and then is looked after often."""
    monkeypatch.setattr(kv_events, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(kv_events, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(kv_events, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(kv_event_sockets, "RECONNECT_MILLISECONDS", 10)


@asynccontextmanager
async def rigged(seed: int = 0, **options: Any) -> AsyncGenerator[Rig]:
    """An engine, its events, and a consumer that hears them."""
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: socket paths must be short
        rig = Rig(folder, SIZES, seed, **options)
        async with listening(rig.consumer):
            await rig.warm_up()
            yield rig
        rig.close()


@asynccontextmanager
async def listening(consumer: KVEventConsumer) -> AsyncGenerator[None]:
    task = asyncio.create_task(consumer.run())
    try:
        yield
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def assert_equal(rig: Rig, consumer: KVEventConsumer | None = None) -> None:
    difference = rig.difference(consumer)
    assert difference.engine > 0 and difference.missing == difference.wrong == 0
    (consumer or rig.consumer).contents.check()


# --- the law


@pytest.mark.parametrize(("seed", "loss"), [(1, 0.05), (2, 0.3), (3, 0.9), (4, 1.0)])
def test_with_replay_the_index_is_the_engines_whatever_was_lost(seed: int, loss: float) -> None:
    async def test() -> None:
        async with rigged(seed) as rig:
            assert rig.relay is not None
            rig.relay.loss = loss
            await rig.serve(20)
            await rig.caught_up()
            assert rig.engine.scheduler.pool.num_evictions > 100 and rig.relay.num_lost > 0
            assert_equal(rig)
            counts = rig.consumer.counts
            assert counts["unknown_parents"] == counts["lost"] == counts["restarts"] == counts["voids"] == 0

    run(test())


@pytest.mark.parametrize(("seed", "loss"), [(1, 0.05), (2, 0.5)])
def test_without_replay_nothing_is_believed_that_is_not_so(seed: int, loss: float) -> None:
    """Once a batch behind the last lost one has come. What it does not know it learns when the cache is emptied."""

    async def test() -> None:
        async with rigged(seed, replay=False) as rig:
            assert rig.relay is not None
            rig.relay.loss = loss
            await rig.serve(20)
            rig.relay.loss = 0.0
            await rig.until_heard()
            assert rig.difference().wrong == 0 and rig.consumer.counts["lost"] > 0
            rig.engine.reset_prefix_cache()
            await rig.serve(5)
            await rig.caught_up()
            assert_equal(rig)

    run(test())


def test_without_loss_and_without_replay_it_is_equal_from_the_first_reset_on() -> None:
    async def test() -> None:
        async with rigged(5, replay=False, relayed=False) as rig:
            rig.engine.reset_prefix_cache()
            await rig.serve(10)
            await rig.caught_up()
            assert_equal(rig)

    run(test())


def test_who_comes_late_learns_all_there_is() -> None:
    async def test() -> None:
        async with rigged(6) as rig:
            await rig.serve(10)
            late = rig.listener()
            async with listening(late):
                await rig.caught_up(late)
                assert_equal(rig, late)
                await rig.serve(5)
                await rig.caught_up(late)
                assert_equal(rig, late)

    run(test())


def test_who_comes_later_than_the_replay_reaches_believes_nothing_wrong() -> None:
    async def test() -> None:
        async with rigged(7, buffer_steps=5) as rig:
            await rig.serve(10)
            late = rig.listener()
            async with listening(late):
                await rig.caught_up(late)
                assert rig.difference(late).wrong == 0 and late.counts["voids"] == 1
                rig.engine.reset_prefix_cache()
                await rig.serve(5)
                await rig.caught_up(late)
                assert_equal(rig, late)

    run(test())


@pytest.mark.parametrize("relayed", [True, False])
def test_a_publisher_that_starts_again_in_mid_run(relayed: bool) -> None:
    async def test() -> None:
        async with rigged(8, relayed=relayed) as rig:
            await rig.serve(10)
            for rounds in (1, 12):  # fewer batches than before, and more
                rig.restart()
                await rig.serve(rounds)
                await rig.until(lambda: rig.consumer.position == rig.num_published)
                await until(lambda: rig.difference() == (len(rig.consumer.contents),) * 2 + (0, 0))
                assert_equal(rig)
            assert rig.consumer.counts["restarts"] >= 2

    run(test())


def test_without_replay_a_lost_connection_empties_the_index() -> None:
    """The new publisher may be at any number by the time it is heard."""

    async def test() -> None:
        async with rigged(9, replay=False, relayed=False) as rig:
            await rig.serve(5)
            await rig.caught_up()
            rig.restart()
            await until(lambda: rig.consumer.counts["connections"] == 2)
            await rig.until_heard()
            assert rig.difference().wrong == 0 and rig.consumer.counts["voids"] >= 1
            rig.engine.reset_prefix_cache()
            await rig.serve(3)
            await rig.caught_up()
            assert_equal(rig)

    run(test())


def test_a_replica_that_comes_back_with_other_blocks() -> None:
    async def test() -> None:
        async with rigged(10, relayed=False) as rig:
            await rig.serve(5)
            rig.restart(block_size=8)
            await rig.serve(5)
            await until(lambda: rig.consumer.contents.block_size == 8)
            await until(lambda: rig.difference()[2:] == (0, 0))
            await rig.caught_up()
            assert_equal(rig)
            assert rig.consumer.counts["other_block_size"] == 0 and rig.consumer.counts["stored"] > 0

    run(test())


def test_a_replay_that_nobody_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 0.05)

    async def test() -> None:
        async with rigged(11, replay="ipc:///tmp/nobody-is-here") as rig:
            assert rig.relay is not None
            rig.relay.loss = 0.3
            await rig.serve(10)
            rig.relay.loss = 0.0
            await rig.until_heard()
            assert rig.difference().wrong == 0 and rig.consumer.counts["lost"] > 0

    run(test())


# --- the loop, and what is said


def consumer_at(events: str, block_size: int = 4) -> KVEventConsumer:
    contents = ToldContents(block_size, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain))
    return KVEventConsumer(ReplicaAddress("http://replica", events), contents, kind="headstart")


def batch(*events: BlockStored) -> bytes:
    return BatchEncoder("CPU").encode(1.5, list(events))


def stored(number: int, count: int = 1, parent: int | None = None, block_size: int = 4) -> BlockStored:
    handles = tuple(BlockHash((number + i).to_bytes(32, "big")) for i in range(count))
    before = None if parent is None else BlockHash(parent.to_bytes(32, "big"))
    return BlockStored(handles, before, array("i", [number] * (count * block_size)), block_size)


def test_others_have_their_turn_while_a_long_batch_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SLICE_SECONDS", 0.0)
    turns: list[int] = []

    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/unused")

        async def other() -> None:
            while True:
                turns.append(len(consumer.contents))
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await consumer._take(Due(False, [batch(stored(1, 4096))]))  # pyright: ignore[reportPrivateUsage]
        task.cancel()
        assert len(consumer.contents) == 4096
        names = Prompt([1] * 4096 * 4, router_root("m")).names(4)
        assert consumer.contents.match(names, 0.0) == 4096

    run(test())
    assert len(set(turns)) > 10  # it saw the index grow


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
                names = Prompt([number] * 8, router_root("m")).names(4)
                consumer.contents.finished(consumer.contents.sent(names, 0.0), names, 0.0)

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
        ((b"nonsense",), "cannot be read"),
        ((msgspec.msgpack.encode([1.0, [["BlockStored", 7]]]),), "cannot be read"),
        ((batch(stored(1, block_size=8)),), "not of 4 tokens"),
        ((batch(stored(5, parent=4)),), "stored before we came.*replay endpoint"),
        ((msgspec.msgpack.encode([1.0, []]),), "no events of layers"),
    ],
)
def test_a_replica_that_tells_nothing_of_use_is_reported_once(
    payloads: tuple[bytes, ...], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    async def test() -> None:
        async with published(*payloads) as (consumer, end_requests):
            end_requests()
            await until(lambda: said.extend(capsys.readouterr().err.splitlines()) or said)
            assert consumer.is_blind
            end_requests()
            await asyncio.sleep(5 * kv_events.POLL_SECONDS)

    run(test())
    said.extend(capsys.readouterr().err.splitlines())
    assert len(said) == 1
    assert "KV events of http://replica: 16 requests ended" in said[0]
    assert re.search(cause, said[0]), said[0]


def test_nobody_at_the_address_is_reported_too(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        consumer = consumer_at("ipc:///tmp/nobody-is-here")
        async with listening(consumer):
            for number in range(SILENCE):
                names = Prompt([number] * 8, router_root("m")).names(4)
                consumer.contents.finished(consumer.contents.sent(names, 0.0), names, 0.0)
            await until(lambda: "nobody is at ipc:///tmp/nobody-is-here" in capsys.readouterr().err)

    run(test())


def test_an_address_that_is_none_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_events, "RETRY_SECONDS", 0.0)
    said: list[str] = []

    async def test() -> None:
        async with listening(consumer_at("tcp://no port")):
            await until(lambda: said.extend(capsys.readouterr().err.splitlines()) or len(said) > 1)

    run(test())
    assert "cannot listen at tcp://no port" in said[0]


def test_frames_that_are_no_message_are_counted_and_others_go_on() -> None:
    async def test() -> None:
        async with published(batch(stored(1))) as (consumer, _):
            assert consumer.counts["stored"] >= 1
            for frames in ([b"x"], [b"topic", b"1", b"short number"]):
                await consumer._offer(frames, replayed=False)  # pyright: ignore[reportPrivateUsage]
            assert consumer.counts["undecodable"] == 2

    run(test())
