"""Precise mode against a real scheduler: its events, replayed, are its index."""

from array import array
from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from router.fleets import BLOCK, names

from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.core.cache.hashing import BlockHash, root_hash
from headstart.core.engine import Engine
from headstart.core.request import SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.measurement.inprocess import requests_from_prompts, run_requests
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.event_sequencer import DueBatches, EventSequencer
from headstart.router.index.kv_event_index import SILENCE, SPECULATION, SPECULATION_COMPUTED, ReplicaKVEventIndex
from headstart.router.routing_request import RoutingPrompt, router_root
from headstart_lab.runners.null_executor import NullExecutor


def new() -> ReplicaKVEventIndex:
    return ReplicaKVEventIndex(BLOCK, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain))


def stored(
    handles: str, *blocks: int, parent: str | None = None, size: int = BLOCK, domain: bytes = b""
) -> BlockStored:
    """Blocks as in `fleets.prompt`, under handles of one letter each."""
    tokens = array("i", [10 * block + i for block in blocks for i in range(BLOCK)])
    above = None if parent is None else BlockHash(parent.encode())
    return BlockStored(tuple(BlockHash(h.encode()) for h in handles), above, tokens, size, None, domain)


def removed(handles: str) -> BlockRemoved:
    return BlockRemoved(tuple(BlockHash(h.encode()) for h in handles))


def test_engine_hashes_are_only_handles() -> None:
    told = new()
    told.apply([stored("ab", 1, 2), stored("c", 3, parent="b")])
    assert told.num_cached_prefix_blocks(names(1, 2, 3, 4), 0.0) == 3
    told.apply([removed("c")])
    assert told.num_cached_prefix_blocks(names(1, 2, 3, 4), 0.0) == 2
    told.check()


def test_a_head_that_goes_before_its_tail_hides_the_tail_until_it_is_back() -> None:
    told = new()
    told.apply([stored("abc", 1, 2, 3), removed("a")])
    assert told.num_cached_prefix_blocks(names(1, 2, 3), 0.0) == 0
    told.check()
    told.apply([removed("b"), stored("a", 1)])
    assert told.num_cached_prefix_blocks(names(1, 2, 3), 0.0) == 1
    told.apply([stored("b", 2, parent="a")])
    assert told.num_cached_prefix_blocks(names(1, 2, 3), 0.0) == 3
    told.check()


def test_a_block_on_two_tiers_is_gone_when_it_is_gone_from_both() -> None:
    told = new()
    told.apply([stored("a", 1), stored("A", 1), removed("a")])
    assert told.num_cached_prefix_blocks(names(1), 0.0) == 1
    told.apply([removed("A")])
    assert told.num_cached_prefix_blocks(names(1), 0.0) == 0
    told.check()


def test_a_block_that_was_computed_twice_is_gone_when_both_copies_are() -> None:
    """vLLM does not merge equal blocks, and tells of each."""
    told = new()
    told.apply([stored("ab", 1, 2), stored("b", 2, parent="a"), removed("b")])
    assert told.num_cached_prefix_blocks(names(1, 2), 0.0) == 2
    told.check()
    told.apply([removed("b")])
    assert told.num_cached_prefix_blocks(names(1, 2), 0.0) == 1
    told.check()


def test_stored_without_tokens_is_another_copy_of_a_known_block() -> None:
    told = new()
    copy = BlockStored((BlockHash(b"a"), BlockHash(b"z")), None, array("i"), 0)
    told.apply([stored("a", 1), copy, removed("a")])
    assert told.num_cached_prefix_blocks(names(1), 0.0) == 1
    assert told.counts["unknown_copies"] == 1 and told.counts["unknown_parents"] == 0
    told.apply([removed("a")])
    assert len(told) == 0
    told.check()


def test_a_handle_with_two_copies_that_names_another_block_leaves_the_first() -> None:
    told = new()
    told.apply([stored("a", 1), stored("a", 1), stored("a", 2)])
    assert (told.num_cached_prefix_blocks(names(1), 0.0), told.num_cached_prefix_blocks(names(2), 0.0)) == (0, 1)
    told.check()
    told.apply([removed("a")])
    assert len(told) == 0


def test_a_handle_that_names_another_block_now_leaves_the_first() -> None:
    told = new()
    told.apply([stored("a", 1), stored("a", 2)])
    assert (told.num_cached_prefix_blocks(names(1), 0.0), told.num_cached_prefix_blocks(names(2), 0.0)) == (0, 1)
    told.check()


def test_what_hangs_on_an_unknown_block_is_counted_and_left_out() -> None:
    told = new()
    told.apply([stored("b", 2, parent="a"), stored("c", 3, size=8), removed("z")])
    assert len(told) == 0
    assert told.counts["unknown_parents"] == told.counts["other_block_size"] == 1


def test_tenants_are_kept_apart() -> None:
    told = new()
    told.apply([stored("a", 1, domain=b"t")])
    assert told.num_cached_prefix_blocks(names(1), 0.0) == 0
    assert (
        told.num_cached_prefix_blocks(
            RoutingPrompt(range(10, 15), router_root("m", domain=b"t")).block_hashes(BLOCK), 0.0
        )
        == 1
    )


def test_what_was_sent_counts_until_its_events_are_overdue() -> None:
    told = new()
    told.apply([stored("a", 1)])
    hold = told.record_sent(names(1, 2, 3), 0.0)
    assert told.num_cached_prefix_blocks(names(1, 2, 3), 1.0) == 3
    assert told.num_cached_prefix_blocks(names(1, 2, 3), SPECULATION + 1) == 1
    told.record_prefilled(hold, 10.0)
    assert told.num_cached_prefix_blocks(names(1, 2, 3), 10.0 + SPECULATION_COMPUTED + 1) == 1
    told.apply([stored("b", 2, parent="a")])
    assert told.num_cached_prefix_blocks(names(1, 2, 3), 100.0) == 2


def test_what_failed_is_not_expected() -> None:
    told = new()
    told.record_failed(told.record_sent(names(1, 2), 0.0))
    assert told.num_cached_prefix_blocks(names(1, 2), 0.0) == 0


def test_expectations_are_bounded() -> None:
    told = new()
    for number in range(100):
        told.record_sent(names(number), number * 100.0)
    assert len(told._speculative) <= 2


def test_an_index_that_outgrows_its_bound_starts_anew() -> None:
    told = ReplicaKVEventIndex(
        BLOCK, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain), max_blocks=3
    )
    told.apply([stored("abc", 1, 2, 3)])
    assert told.counts["over_capacity"] == 0
    told.apply([stored("d", 4, parent="c")])
    assert len(told) == 0 and told.counts["over_capacity"] == 1
    told.check()
    told.apply([stored("abcd", 1, 2, 3, 4)])
    assert len(told) == 0 and told.counts["over_capacity"] == 2
    told.apply([stored("a", 1)])
    assert told.num_cached_prefix_blocks(names(1), 0.0) == 1


def test_silence_is_noticed_and_ends_with_the_first_event_of_use() -> None:
    told = new()
    for number in range(SILENCE):
        assert not told.relies_on_unusable_events
        told.record_finished(told.record_sent(names(number), 0.0), names(number), 0.0)
    assert told.relies_on_unusable_events
    told.apply([stored("b", 2, parent="a")])
    assert told.relies_on_unusable_events
    for event in (stored("a", 1), BlockStored((BlockHash(b"a"),), None, array("i"), 0)):  # the second: another copy
        told.silence = SILENCE
        told.apply([event])
        assert not told.relies_on_unusable_events and told.silence == 0


def test_requests_that_store_nothing_are_not_silence() -> None:
    told = new()
    told.apply([stored("a", 1)])
    for _ in range(2 * SILENCE):
        told.record_finished(told.record_sent(names(1), 0.0), names(1), 0.0)
    assert not told.relies_on_unusable_events


def run_engine(seed: int, sink: Callable[[list[Event]], None]) -> Engine:
    """A real scheduler over a pool much too small for what it serves: evictions, answers, preemptions."""
    rng = Random(seed)
    limits = Limits(max_batched_tokens=64, max_seqs=4, max_model_len=64)
    engine = Engine(Scheduler(SchedulerConfig(24, BLOCK, limits)), NullExecutor(24, BLOCK, 100), event_sink=sink)
    for start in range(12):
        prompts = [array("i", [rng.randrange(2) for _ in range(rng.randrange(4, 40))]) for _ in range(5)]
        run_requests(
            engine, requests_from_prompts(prompts, SamplingParams(max_tokens=6, temperature=0.0), f"r{start}-")
        )
    return engine


def take(told: ReplicaKVEventIndex, batches: list[list[Event]], due: DueBatches) -> None:
    """Applies what is due: a payload is the number of its batch."""
    if due.void:
        told.clear()
    for payload in due.batches:
        told.apply(batches[int(payload)])


def engine_names(engine: Engine) -> set[BlockHash]:
    return set(engine.scheduler.pool._entries)


def as_the_engine_names() -> ReplicaKVEventIndex:
    """With the root of an engine, to be compared with it name by name."""
    return ReplicaKVEventIndex(BLOCK, lambda adapter, domain: root_hash(b"", adapter=adapter, domain=domain))


@given(st.integers(0, 1000))
@settings(max_examples=10)
def test_after_any_run_the_index_is_the_engines(seed: int) -> None:
    told = as_the_engine_names()
    engine = run_engine(seed, told.apply)
    assert engine.scheduler.pool.num_capacity_evictions > 0
    assert set(told._uses) == engine_names(engine)
    assert told.counts["unknown_parents"] == 0
    told.check()


@given(st.integers(0, 1000), st.floats(0.0, 0.9), st.integers(1, 30))
@settings(max_examples=20)
def test_lost_events_that_are_replayed_leave_no_trace(seed: int, loss: float, patience: int) -> None:
    """Batches are lost and come later, in any order, among live ones; the publisher keeps all for replay."""
    batches: list[list[Event]] = []
    engine = run_engine(seed, batches.append)
    told, feed, rng = as_the_engine_names(), EventSequencer(), Random(seed)
    for number in range(len(batches)):
        if rng.random() < loss and number:
            continue
        take(told, batches, feed.offer(number, b"%d" % number))
        if feed.replay_from is not None and rng.randrange(patience) == 0:
            for missed in range(feed.replay_from, number + 1):
                take(told, batches, feed.offer(missed, b"%d" % missed, replayed=True))
            assert feed.replay_from is None
    for missed in range(len(batches)):  # the last ones may be missing without a later one to show it
        take(told, batches, feed.offer(missed, b"%d" % missed, replayed=True))
    assert feed.num_restarts == 0
    assert set(told._uses) == engine_names(engine)
    told.check()


@given(st.integers(0, 1000), st.floats(0.1, 0.9))
@settings(max_examples=10)
def test_events_lost_for_good_never_make_it_believe_what_is_not_so(seed: int, loss: float) -> None:
    """Without replay the index starts anew behind every gap; it may know less than the engine has, never more."""
    batches: list[list[Event]] = []
    engine = run_engine(seed, batches.append)
    told, feed, rng = as_the_engine_names(), EventSequencer(), Random(seed)
    for number in range(len(batches)):
        if rng.random() >= loss or number == len(batches) - 1:
            take(told, batches, feed.offer(number, b"%d" % number))
            take(told, batches, feed.give_up())
    assert set(told._uses) <= engine_names(engine)
    told.check()


def test_a_guess_is_kept_beside_what_is_told_and_says_what_goes_next() -> None:
    guess = ApproximateIndex(4)
    told = ReplicaKVEventIndex(BLOCK, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain), guess)
    assert new().expected_evicted_reusable_blocks(4) == 0.0
    for _ in range(2):
        hold = told.record_sent(names(1, 2, 3, 4), 0.0)
        told.record_prefilled(hold, 0.0)
        told.record_finished(hold, hold.block_hashes, 0.0)
        told.on_hit_reported(hold, 4, 0.0)
    assert len(guess) == 4 and told.expected_evicted_reusable_blocks(2) == guess.expected_evicted_reusable_blocks(2) > 0
    assert len(told) == 0, "of events nothing was heard yet"
    failing = told.record_sent(names(5), 0.0)
    told.record_failed(failing)
    guess.check()
    assert guess.num_cached_prefix_blocks(names(5)) == 0
    told.apply([stored("abcd", 1, 2, 3, 4), AllBlocksCleared()])
    assert len(guess) == 0 and told.expected_evicted_reusable_blocks(2) == 0.0
