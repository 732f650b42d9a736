"""Events replayed by someone who knows nothing else give exactly the index of the pool, after every step."""

from array import array
from contextlib import suppress
from typing import Any

import pytest
from checking import CheckingExecutor, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headstart.core.cache.events import AllBlocksCleared, BlockEventLog, BlockRemoved, BlockStored, Event
from headstart.core.cache.hashing import BlockHash, private_parent_hash_for_domain, root_hash
from headstart.core.engine import Engine
from headstart.core.errors import InvalidRequestError
from headstart.core.request import CacheMode
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sequence import Sequence

BLOCK = 4
PUBLIC = list(range(8))  # two blocks that every domain shares in these tests


class Consumer:
    """A router's view: parent's name and tokens of every block, from events alone."""

    def __init__(self) -> None:
        self.index: dict[BlockHash, tuple[BlockHash, bytes]] = {}
        self.seen: set[BlockHash] = set()
        self.num_events = 0

    def apply(self, events: list[Event]) -> None:
        self.num_events += len(events)
        assert events, "an empty batch must not be sent"
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.index[name]  # KeyError: removed twice, or never stored
                case AllBlocksCleared():
                    self.index.clear()

    def _store(self, event: BlockStored) -> None:
        assert event.block_size == BLOCK and len(event.token_ids) == BLOCK * len(event.block_hashes) > 0
        parent = event.parent_block_hash
        assert parent is None or parent in self.seen, "the parent is no block"
        if parent is None:
            parent = root_hash(b"", adapter=event.adapter, domain=event.domain)
        elif event.domain:
            parent = private_parent_hash_for_domain(parent, event.domain)
        for start, name in enumerate(event.block_hashes):
            assert name not in self.index, "stored twice"
            self.index[name] = (parent, event.token_ids[start * BLOCK : (start + 1) * BLOCK].tobytes())
            self.seen.add(name)
            parent = name


def make(consumer: Consumer, num_blocks: int = 13, poison: Any = lambda _: False, **fields: Any) -> Engine:
    limits = Limits(max_batched_tokens=32, max_seqs=4, max_model_len=40)
    scheduler = Scheduler(SchedulerConfig(num_blocks, BLOCK, limits, **fields))
    return Engine(scheduler, CheckingExecutor(num_blocks, BLOCK, poison), event_sink=consumer.apply)


def index_of(engine: Engine) -> dict[BlockHash, tuple[BlockHash, bytes]]:
    entries = engine.scheduler.pool._entries  # type: ignore[reportPrivateUsage]
    return {name: (parent, tokens) for name, (_, parent, tokens) in entries.items()}


def finish(engine: Engine) -> None:
    for _ in range(500):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("still busy")


ASKS = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            list.__add__,
            st.sampled_from([[], PUBLIC[:4], PUBLIC]),
            st.lists(st.sampled_from([1, 1, 2, 2, 66]), min_size=1, max_size=13),
        ),
        "max_tokens": st.integers(1, 9),
        "domain": st.sampled_from([b"", b"x", b"y"]),
        "adapter": st.sampled_from([None, None, "lora"]),
        "cache": st.sampled_from([CacheMode.READ_WRITE, *CacheMode]),
    }
)


class Replay(RuleBasedStateMachine):
    """Adds, aborts, failures, preemptions, evictions and resets in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.consumer = Consumer()
        self.engine = make(self.consumer, poison=lambda chunk: 66 in chunk.token_ids)
        self.names = 0

    @rule(asks=st.lists(ASKS, min_size=1, max_size=4), steps=st.integers(0, 6))
    def add(self, asks: list[dict[str, Any]], steps: int) -> None:
        for ask in asks:
            self.names += 1
            self.engine.add_request(make_request(str(self.names), **ask))
        self.step(steps)

    @rule(age=st.integers(0, 4))
    def abort(self, age: int) -> None:
        self.engine.abort(str(self.names - age))

    @rule(times=st.integers(1, 9))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            self.the_consumer_has_exactly_the_index()

    @rule(pinned=st.booleans())
    def reset(self, pinned: bool) -> None:
        self.engine.reset_prefix_cache(pinned=pinned)

    @invariant()
    def the_consumer_has_exactly_the_index(self) -> None:
        assert self.consumer.index == index_of(self.engine)


class ReplayWithPins(Replay):
    """The same, while prefixes are pinned, survive resets, are recomputed and unpinned."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = make(self.consumer, eviction_policy="2q", policy="lpm", tenant_floor=0.5)

    @rule(
        tokens=st.sampled_from([PUBLIC[:4], PUBLIC, [*PUBLIC, 1, 1, 1, 1]]),
        tenant=st.sampled_from(["", "x"]),
        run=st.booleans(),
    )
    def pin(self, tokens: list[int], tenant: str, run: bool) -> None:
        with suppress(InvalidRequestError):  # the name is taken, or there is no room
            self.engine.add_prefix(f"{len(tokens)}{tenant}", tokens, tenant=tenant, domain=tenant.encode())
        self.step(3 * run)

    @rule(name=st.sampled_from(["4", "8", "8x", "12x"]))
    def unpin(self, name: str) -> None:
        self.engine.remove_prefix(name)


class ReplayBehindPublicPrefix(Replay):
    """The same, where the first blocks are public and domains begin behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.engine.add_request(make_request("public", PUBLIC))
        finish(self.engine)
        self.engine.scheduler.cache.public_hashes = set(index_of(self.engine))
        assert len(index_of(self.engine)) == 2


BOUNDS = settings(max_examples=70, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestReplay = Replay.TestCase
TestReplay.settings = BOUNDS
TestReplayWithPins = ReplayWithPins.TestCase
TestReplayWithPins.settings = BOUNDS
TestReplayBehindPublicPrefix = ReplayBehindPublicPrefix.TestCase
TestReplayBehindPublicPrefix.settings = BOUNDS


def test_a_prompt_is_one_event_and_a_decoded_block_is_another() -> None:
    events: list[Event] = []
    limits = Limits(max_batched_tokens=16, max_seqs=4, max_model_len=40)
    engine = Engine(Scheduler(SchedulerConfig(9, BLOCK, limits)), CheckingExecutor(9, BLOCK), event_sink=events.extend)
    engine.add_request(make_request("a", range(10), max_tokens=4))
    engine.step()
    (first,) = events
    assert isinstance(first, BlockStored)
    assert (first.parent_block_hash, list(first.token_ids), len(first.block_hashes)) == (None, list(range(8)), 2)
    finish(engine)
    _, second = events
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[-1] and list(second.token_ids[:2]) == [8, 9]


def test_an_event_ends_where_the_public_prefix_ends() -> None:
    consumer, events = Consumer(), list[Event]()
    engine = make(consumer)
    engine.add_request(make_request("a", PUBLIC))
    finish(engine)
    engine.scheduler.cache.public_hashes = set(index_of(engine))
    engine.reset_prefix_cache()
    engine._event_sink = events.extend  # type: ignore[reportPrivateUsage]
    engine.add_request(make_request("b", [*PUBLIC, 1, 1, 1, 1, 2, 2, 2, 2, 3], domain=b"x"))
    engine.step()
    engine.step()
    public, private = events[:2]
    assert isinstance(public, BlockStored) and isinstance(private, BlockStored)
    assert (list(public.token_ids), public.domain, public.parent_block_hash) == (PUBLIC, b"", None)
    assert (list(private.token_ids)[:4], private.domain) == ([1, 1, 1, 1], b"x")
    assert private.parent_block_hash == public.block_hashes[-1]


def test_what_is_evicted_in_a_row_is_one_event() -> None:
    consumer, events = Consumer(), list[Event]()
    engine = make(consumer, num_blocks=5)
    engine.add_request(make_request("a", range(12)))
    finish(engine)
    engine._event_sink = events.extend  # type: ignore[reportPrivateUsage]
    engine.add_request(make_request("b", range(20, 34)))
    engine.step()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert len(removed) == 1 and len(removed[0].block_hashes) == 3


def test_a_reset_is_one_event_and_comes_at_once() -> None:
    consumer = Consumer()
    engine = make(consumer)
    engine.add_request(make_request("a", range(12)))
    finish(engine)
    before = consumer.num_events
    assert consumer.index and engine.reset_prefix_cache()
    assert not consumer.index and consumer.num_events == before + 1


def test_a_reset_that_pins_survive_removes_exactly_what_went() -> None:
    consumer, events = Consumer(), list[Event]()
    engine = make(consumer)
    engine.add_prefix("public", PUBLIC)
    engine.add_request(make_request("a", [*PUBLIC, 1, 1, 1, 1, 2]))
    finish(engine)
    (gone,) = (name for name in consumer.index if not engine.scheduler.pool.is_pinned(name))
    engine._event_sink = events.extend  # type: ignore[reportPrivateUsage]
    assert engine.reset_prefix_cache()
    assert events == [BlockRemoved((gone,))] and gone not in index_of(engine)
    assert len(index_of(engine)) == 2
    events.clear()
    assert engine.reset_prefix_cache(pinned=True)
    assert events == [AllBlocksCleared()]


def test_without_a_sink_nothing_is_collected() -> None:
    engine = Engine(Scheduler(SchedulerConfig(9, BLOCK, Limits(16, 4, 40))), CheckingExecutor(9, BLOCK))
    assert engine.scheduler.cache.event_log is None
    assert not any(isinstance(listener, BlockEventLog) for listener in engine.scheduler.pool.listeners)


def test_events_keep_their_order_across_kinds() -> None:
    root = root_hash(b"")
    log, names = BlockEventLog(1), [BlockHash(bytes([number])) for number in range(3)]
    tokens = array("i", [7]).tobytes()
    log.set_publishing_request(Sequence(make_request("a", [1]), array("i", [1]), root, root))
    log.on_block_published(1, names[0], root, tokens)
    log.on_block_removed(names[0])
    log.on_block_published(1, names[0], root, tokens)
    log.on_block_published(2, names[1], names[0], tokens)
    log.on_cache_cleared()
    one = array("i", [7])
    assert log.drain() == [
        BlockStored((names[0],), None, one, 1),
        BlockRemoved((names[0],)),
        BlockStored((names[0], names[1]), None, array("i", [7, 7]), 1),
        AllBlocksCleared(),
    ]
    assert log.drain() == []


def test_who_publishes_without_saying_whose_it_is_is_wrong() -> None:
    with pytest.raises(AssertionError, match="call `publishing`"):
        BlockEventLog(1).on_block_published(1, BlockHash(b"a"), BlockHash(b"b"), b"1234")
