"""Load and compute meet: a prefix is computed from its front while its back is loaded. In virtual time.

The store hands out blocks at a rate of its own, which may differ from what it expects. The executor is the checking
one, so any mix of computed and loaded blocks that is not the sequence's own fails.
"""

from dataclasses import dataclass, field
from random import Random

import pytest
from checking import CheckingExecutor, expected_tokens, make_engine, make_request
from checking_async import AsyncCheckingExecutor
from laws.test_laws import check_laws
from memory_store import MemoryStore, Shelf

from headstart.core.batch import Batch, RequestStepOutput, StepResult
from headstart.core.cache.block_store import BlockKey, BlockLoadPart
from headstart.core.cache.events import BlockEventLog, BlockStored
from headstart.core.engine import Engine

BLOCK = 4
PROMPT = [number % 97 for number in range(40 * BLOCK + 1)]
COMPUTING = 0.1  # seconds per block


class TimedExecutor(CheckingExecutor):
    def execute(self, batch: Batch) -> StepResult:
        num = sum(len(chunk.token_ids) for chunk in batch.chunks)
        return super().execute(batch)._replace(elapsed=num * COMPUTING / BLOCK)


@dataclass
class TimedStore(MemoryStore):
    """Hands out a block every `seconds`, after `latency`; expects one every `expected`. `now` is set from outside."""

    now: float = 0.0
    seconds: float = 0.1
    expected: float = 0.1
    latency: float = 0.0
    fails_at: int = 1 << 30  # the block of a load that is missing
    hangs_at: int = 1 << 30  # the block of a load that never comes
    _timed: list[tuple[int, list[BlockKey], float, int]] = field(default_factory=list)  # id, keys, begin, given

    def expected_load_seconds(self, num_blocks: int, first: object = None) -> float:
        waiting = sum(len(keys) - given for _, keys, _, given in self._timed)
        return self.latency + (num_blocks + waiting) * self.expected

    def begin_load(self, keys: list[BlockKey]) -> int:  # type: ignore[override]
        self.loads.append(list(keys))
        self._timed.append((len(self.loads), list(keys), self.now, 0))
        return len(self.loads)

    def cancel_load(self, load_id: int, *, is_late: bool) -> None:
        self.cancelled.append((load_id, is_late))
        self._timed = [one for one in self._timed if one[0] != load_id]

    def poll_loads(self) -> list[BlockLoadPart]:
        self._write()
        found: list[BlockLoadPart] = []
        for number, (load_id, keys, begin, given) in enumerate(self._timed):
            ready = int((self.now - begin - self.latency) / self.seconds + 1e-9)
            ready = max(min(ready, len(keys), self.fails_at, self.hangs_at), 0)
            data = tuple(bytearray(self.shelf[key.block_hash][1]) for key in keys[given:ready])
            is_last = ready in (len(keys), self.fails_at)
            if data or is_last:
                found.append(BlockLoadPart(load_id, data, is_last))
                self._timed[number] = (load_id, keys, begin, ready)
        over = {loaded.load_id for loaded in found if loaded.is_last}
        self._timed = [one for one in self._timed if one[0] not in over]
        return found


def shelf_of(*prompts: list[int]) -> Shelf:
    store = MemoryStore()
    engine = make_engine(200, BLOCK, store=store, max_model_len=400)
    for number, prompt in enumerate(prompts):
        engine.add_request(make_request(f"{number}", prompt))
    while engine.has_work:
        engine.step()
    store.flush()
    return store.shelf


def engine_on(
    store: TimedStore, num_blocks: int = 100, budget: int = 400, executor: type[CheckingExecutor] = TimedExecutor
) -> Engine:
    engine = make_engine(
        num_blocks,
        BLOCK,
        store=store,
        executor_class=executor,
        max_model_len=400,
        max_batched_tokens=budget,
        max_seqs=8,
    )
    engine.scheduler.transfers.rate.seconds_per_token = COMPUTING / BLOCK
    return engine


def step(engine: Engine, store: TimedStore) -> list[RequestStepOutput]:
    """One step, in its own time; 2 ms pass if there is nothing to compute."""
    before = engine.stats().num_steps
    outputs = engine.step(store.now)
    check_laws(engine)
    elapsed = executor(engine).batches[-1].chunks if engine.stats().num_steps > before else ()
    store.now += sum(len(chunk.token_ids) for chunk in elapsed) * COMPUTING / BLOCK or 0.002
    return outputs


def executor(engine: Engine) -> TimedExecutor:
    assert isinstance(engine.executor, TimedExecutor)
    return engine.executor


def seconds_to_answer(engine: Engine, store: TimedStore, prompt: list[int] = PROMPT) -> float:
    began = store.now
    engine.add_request(make_request("a", prompt))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in step(engine, store) for token in output.token_ids]
    assert tokens == expected_tokens(prompt, 1)
    transfers = engine.scheduler.transfers
    assert not any(load.is_met for load in transfers._loads.values())
    return store.now - began


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return shelf_of(PROMPT)


def test_front_and_back_meet(shelf: Shelf) -> None:
    """Loading alone takes 3.8 s, computing 4 s."""
    store = TimedStore(dict(shelf), seconds=0.095, expected=0.095)
    engine = engine_on(store)
    assert 1.9 < seconds_to_answer(engine, store) < 2.4
    counters = engine.stats().counters
    assert 17 <= counters.store_tokens / BLOCK <= 22 and counters.prefill_tokens + counters.store_tokens == 161
    assert len(store.loads) == 1 and store.cancelled == [(1, False)]


@pytest.mark.parametrize(
    ("loading", "latency", "share"), [(0.3, 0.0, 0.26), (0.025, 0.0, 0.8), (0.05, 1.0, 0.5), (0.09, 0.0, 0.5)]
)
def test_both_are_used_by_their_rates(shelf: Shelf, loading: float, latency: float, share: float) -> None:
    """Wherever loading is expected to take less time than computing; then the actual rate decides."""
    store = TimedStore(dict(shelf), seconds=loading, expected=min(loading, 0.07), latency=latency)
    engine = engine_on(store)
    seconds = seconds_to_answer(engine, store)
    assert engine.stats().counters.store_tokens / BLOCK / 40 > share - 0.11
    assert seconds < 4.0 * (1 - share) + 0.45


def test_a_short_load_is_waited_for(shelf: Shelf) -> None:
    store = TimedStore(dict(shelf), seconds=0.001, expected=0.001)
    engine = engine_on(store)
    seconds_to_answer(engine, store)
    assert engine.stats().counters.prefill_tokens == 1


@pytest.mark.parametrize(("seconds", "most"), [(0.019, 0), (0.024, 20), (0.09, 36)])
def test_a_load_that_goes_on_is_waited_for(shelf: Shelf, seconds: float, most: int) -> None:
    """Expected are 0.36 s; after 0.4 s, a tenth of computing, what is left at a pace of 0.019 takes less than that."""
    store = TimedStore(dict(shelf), seconds=seconds, expected=0.009)
    engine = engine_on(store)
    seconds_to_answer(engine, store)
    assert engine.stats().counters.prefill_tokens <= 1 + most * BLOCK


@pytest.mark.parametrize("stops_at", [1, 10, 20, 25, 30, 39])
@pytest.mark.parametrize("pace", [0.005, 0.01, 0.02, 0.05])
def test_a_load_that_stops_costs_no_more_than_a_tenth(shelf: Shelf, pace: float, stops_at: int) -> None:
    store = TimedStore(dict(shelf), seconds=pace, expected=0.01, hangs_at=stops_at)
    assert seconds_to_answer(engine_on(store), store) < 1.1 * 4.025


def test_beside_another_prompt_nothing_is_computed_that_is_loaded(shelf: Shelf) -> None:
    store = TimedStore(dict(shelf), seconds=0.05, expected=0.05)
    engine = engine_on(store, num_blocks=200, budget=2 * BLOCK)
    engine.add_request(make_request("a", PROMPT))
    engine.add_request(make_request("other", [5] * (60 * BLOCK)))
    while engine.has_work:
        step(engine, store)
    assert engine.stats().counters.store_tokens == 40 * BLOCK and store.now < 6.5


@pytest.mark.parametrize("expected", [0.0, 0.002, 0.01, 0.03, 0.06, 0.09])
@pytest.mark.parametrize("latency", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("factor", [0.5, 3.0, 20.0, 1e6])
def test_no_tier_costs_more_than_a_tenth(shelf: Shelf, expected: float, factor: float, latency: float) -> None:
    """Computing all takes 4.025 s, however much slower the tier is than it was measured to be."""
    store = TimedStore(dict(shelf), seconds=max(expected, 0.001) * factor, expected=expected, latency=latency)
    store.expected_seconds = lambda num, first=None: num * expected  # type: ignore[method-assign]
    assert seconds_to_answer(engine_on(store), store) < 1.1 * 4.025


def test_what_a_load_does_not_bring_is_computed(shelf: Shelf) -> None:
    store = TimedStore(dict(shelf), fails_at=7, expected=0.05, seconds=0.05)
    engine = engine_on(store)
    seconds_to_answer(engine, store)
    assert engine.stats().counters.store_tokens >= 7 * BLOCK


def test_chains_are_published_from_the_front(shelf: Shelf) -> None:
    store = TimedStore(dict(shelf), expected=0.05, seconds=0.05)
    engine = engine_on(store)
    log = BlockEventLog(BLOCK)
    engine.scheduler.pool.listeners.append(log)
    engine.scheduler.cache.event_log = log
    known: set[object] = {None}
    engine.add_request(make_request("a", PROMPT))
    while engine.has_work:
        step(engine, store)
        for event in log.drain():
            assert isinstance(event, BlockStored) and event.parent_block_hash in known
            known.update(event.block_hashes)
    assert len(known) == 41


def begun(shelf: Shelf) -> tuple[Engine, TimedStore]:
    """An engine whose sequence computes while blocks of its load are held."""
    store = TimedStore(dict(shelf), expected=0.05, seconds=0.05)
    engine = engine_on(store, budget=2 * BLOCK)
    engine.add_request(make_request("a", PROMPT))
    for _ in range(5):
        step(engine, store)
    (load,) = engine.scheduler.transfers._loads.values()
    assert load.held
    return engine, store


def test_an_aborted_sequence_leaves_nothing_behind(shelf: Shelf) -> None:
    engine, store = begun(shelf)
    engine.abort("a")
    assert not engine.scheduler.transfers.num_outstanding and store.cancelled == [(1, False)]
    assert not engine.has_work and engine.stats().pool.num_free == engine.stats().pool.num_blocks


def test_a_preempted_sequence_gives_up_what_it_holds(shelf: Shelf) -> None:
    engine, store = begun(shelf)
    (seq,) = engine.scheduler.running
    engine.scheduler._preempt(seq)
    check_laws(engine)
    assert not engine.scheduler.transfers.num_outstanding and store.cancelled == [(1, False)]
    while engine.has_work:
        step(engine, store)


def test_what_is_held_goes_before_a_running_sequence_does(shelf: Shelf) -> None:
    engine, store = begun(shelf)
    pool = engine.scheduler.pool
    taken = pool.allocate(pool.num_free, "")
    while engine.scheduler.transfers._loads:
        engine.step(store.now)
    assert pool.num_free and not engine.scheduler.counters.num_preemptions
    pool.release(taken)
    while engine.has_work:
        engine.step(store.now)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.95])
def test_what_arrives_before_its_sequence_is_admitted_is_used(shelf: Shelf, seconds: float) -> None:
    """The load takes 2 s; meanwhile there is no place for the sequence for `seconds`."""
    store = TimedStore(dict(shelf), expected=0.05, seconds=0.05)
    engine = engine_on(store)
    scheduler = engine.scheduler
    admit = scheduler._admit
    scheduler._admit = lambda *values: store.now > seconds and admit(*values)  # type: ignore[method-assign]
    seconds_to_answer(engine, store)
    assert engine.stats().counters.store_tokens / BLOCK >= 20 + 10 * seconds - 4


def test_blocks_that_are_distrusted_meanwhile_are_not_published(shelf: Shelf) -> None:
    engine, store = begun(shelf)
    (load,) = engine.scheduler.transfers._loads.values()
    name = load.seq.block_hashes[max(load.held)]
    engine.scheduler.transfers.discard_corrupt([name])
    assert not engine.scheduler.transfers._loads and not engine.scheduler.transfers.num_outstanding
    while engine.has_work:
        step(engine, store)


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_arrivals_gives_the_same_tokens(seed: int, lags: bool) -> None:
    """Prompts of common stems at random times; rates, delays, failures, aborts, resets and pools at random.

    `lags`: a step is planned while the one before it is in flight.
    """
    rng = Random(seed)
    stems = [[rng.randrange(97) for _ in range(BLOCK * rng.randint(5, 40))] for _ in range(3)]
    shelf, num_met = shelf_of(*stems), 0
    for _ in range(4):
        store = TimedStore(
            dict(shelf),
            seconds=rng.choice([0.01, 0.1, 0.3, 2.0]),
            expected=rng.choice([0.0, 0.03, 0.06, 0.09]),
            latency=rng.choice([0.0, 0.0, 0.5]),
            fails_at=rng.choice([1, 9, 1 << 30, 1 << 30]),
        )
        num_blocks, budget = rng.choice([44, 60, 120]), rng.choice([2, 5, 16, 60]) * BLOCK
        engine = engine_on(store, num_blocks, budget, AsyncCheckingExecutor if lags else TimedExecutor)
        engine.scheduler.transfers.rate.learn = lambda *values: None  # type: ignore[method-assign]
        prompts: dict[str, list[int]] = {}
        tokens: dict[str, list[int]] = {}
        aborted: set[str] = set()

        def advance(engine: Engine = engine, store: TimedStore = store, tokens: dict[str, list[int]] = tokens) -> None:
            if lags:
                outputs = engine.step(store.now)
                engine.scheduler.pool.check_invariants()
                store.now += 0.2
            else:
                outputs = step(engine, store)
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)

        for number in range(120):
            if number < 90 and rng.random() < 0.07:
                stem = rng.choice(stems)
                prompt = [*stem[: rng.randint(1, len(stem))], *(rng.randrange(97) for _ in range(rng.randint(0, 6)))]
                prompts[f"{number}"] = prompt
                engine.add_request(make_request(f"{number}", prompt, max_tokens=rng.randint(1, 5)))
            if prompts and rng.random() < 0.02:
                aborted.add(name := rng.choice(list(prompts)))
                engine.abort(name)
            running = list(engine.scheduler.running)
            if running and rng.random() < 0.02 and running[0].num_preemptions < 3 and not engine.scheduler.in_flight:
                engine.scheduler._preempt(running[0])
            if rng.random() < 0.02:
                engine.reset_prefix_cache()
            if engine.has_work:
                advance()
            num_met += any(load.is_met for load in engine.scheduler.transfers._loads.values())
        for _ in range(20_000):
            if not engine.has_work:
                break
            advance()
        assert not engine.has_work and engine.stats().pool.num_free == engine.stats().pool.num_blocks
        for name in prompts.keys() - aborted:
            assert tokens[name] == expected_tokens(prompts[name], len(tokens[name])), name
    assert num_met, "no load was met"
