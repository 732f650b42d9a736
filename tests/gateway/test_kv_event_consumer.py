"""Precise mode over real sockets: the index of the consumer against the engine's own, whatever is lost on the way."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway.kv_event_harness import listening, look_often, run, until

from headstart.engine.kv_event_encoding import KVEventEncoder
from headstart.gateway.kv_events import kv_event_consumer as kv_events
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer
from headstart_lab.router.precise_rig import Rig, Sizes

SIZES = Sizes()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 1800.0)  # a replay fails by its content, not by a busy machine


@asynccontextmanager
async def rigged(seed: int = 0, **options: Any) -> AsyncGenerator[Rig]:
    """An engine, its events, and a consumer that hears them."""
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: socket paths must be short
        rig = Rig(folder, SIZES, seed, **options)
        async with listening(rig.consumer):
            await rig.warm_up()
            yield rig
        rig.close()


def assert_equal(rig: Rig, consumer: KVEventConsumer | None = None) -> None:
    difference = rig.difference(consumer)
    assert difference.engine > 0 and difference.missing == difference.wrong == 0
    (consumer or rig.consumer).index.check()


# --- the law


@pytest.mark.parametrize(("seed", "loss"), [(1, 0.05), (2, 0.3), (3, 0.9), (4, 1.0)])
def test_with_replay_the_index_is_the_engines_whatever_was_lost(seed: int, loss: float) -> None:
    async def test() -> None:
        async with rigged(seed) as rig:
            assert rig.relay is not None
            rig.relay.loss = loss
            await rig.serve(20)
            await rig.caught_up()
            assert rig.engine.scheduler.pool.num_capacity_evictions > 100 and rig.relay.num_lost > 0
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
            await rig.settled()  # else more gaps may follow, each with a clear of its own
            late = rig.listener()
            async with listening(late):
                await rig.caught_up(late)
                assert rig.difference(late).wrong == 0 and late.counts["voids"] == 1
                rig.engine.reset_prefix_cache()
                await rig.serve(5)
                await rig.caught_up(late)
                assert_equal(rig, late)

    run(test())


def test_several_gaps_that_end_at_one_time_clear_the_index_once() -> None:
    """Found on a busy machine: live batches that were on their way came before a replay of later ones."""

    async def test() -> None:
        async with rigged(7, buffer_steps=5) as rig:
            payloads = [KVEventEncoder("CPU").encode(float(number), []) for number in range(20)]
            late = rig.listener()
            for number in (3, 4, 7, 8):
                await late._offer([b"", number.to_bytes(8, "big"), payloads[number]], replayed=False)
            for number in range(15, 20):
                await late._offer([b"", number.to_bytes(8, "big"), payloads[number]], replayed=True)
            await late._give_up()
            counts = late.counts
            assert late.next_batch_number == 20 and counts["voids"] == 1 and counts["batches"] == 5
            await late._offer([b"", (9).to_bytes(8, "big"), payloads[9]], replayed=False)  # it was on its way, too
            assert late.next_batch_number == 20 and late.counts["voids"] == 1

    run(test())


@pytest.mark.parametrize("relayed", [True, False])
def test_a_publisher_that_starts_again_in_mid_run(relayed: bool) -> None:
    async def test() -> None:
        async with rigged(8, relayed=relayed) as rig:
            await rig.serve(10)
            for rounds in (1, 12):  # fewer batches than before, and more
                rig.restart()
                await rig.serve(rounds)
                await rig.until(lambda: rig.consumer.next_batch_number == rig.num_published)
                await until(lambda: rig.difference() == (len(rig.consumer.index),) * 2 + (0, 0))
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
            assert rig.difference().wrong == 0 and rig.consumer.counts["voids"] >= 1 and len(rig.consumer.index) > 0
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
            await until(lambda: rig.consumer.index.block_size == 8)
            await until(lambda: rig.difference()[2:] == (0, 0))
            await rig.caught_up()
            assert_equal(rig)
            assert rig.consumer.counts["other_block_size"] == 0 and rig.consumer.counts["stored"] > 0

    run(test())


def test_contents_that_were_put_in_place_of_others_are_filled_anew() -> None:
    async def test() -> None:
        async with rigged(12) as rig:
            await rig.serve(5)
            await rig.caught_up()
            before = rig.consumer.counts
            rig.consumer.index = rig.listener().index
            await until(lambda: len(rig.consumer.index))
            await rig.caught_up()
            assert_equal(rig)
            after = rig.consumer.counts
            assert all(after[key] >= before[key] for key in before) and after["stored"] == 2 * before["stored"]

    run(test())


def test_a_replay_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 0.05)

    async def test() -> None:
        async with rigged(11, replay="ipc:///tmp/no-publisher-here") as rig:
            assert rig.relay is not None
            rig.relay.loss = 0.3
            await rig.serve(10)
            rig.relay.loss = 0.0
            await rig.until_heard()
            assert rig.difference().wrong == 0 and rig.consumer.counts["lost"] > 0

    run(test())
