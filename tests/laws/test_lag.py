"""Laws of one step of lag: step n + 1 is planned and submitted before step n is collected."""

from array import array
from dataclasses import replace
from random import Random

import pytest
from checking import Grammars, expected_tokens, generate, make_engine, make_request, next_token
from checking_async import AsyncCheckingExecutor
from memory_store import Habits, MemoryStore

from headstart.core.batch import Chunk, RequestStepOutput
from headstart.core.cache.events import BlockStored, Event
from headstart.core.engine import Engine
from headstart.core.errors import InvalidRequestError
from headstart.core.request import CacheMode, Request, RetentionHint, SamplingParams
from headstart.core.speculation.speculation_config import SpeculationConfig

PREFIX = list(range(8))


def lagging(**values: object) -> Engine:
    engine = make_engine(executor_class=AsyncCheckingExecutor, **values)  # type: ignore[arg-type]
    executor_of(engine).checks_reads = True
    return engine


def executor_of(engine: Engine) -> AsyncCheckingExecutor:
    assert isinstance(engine.executor, AsyncCheckingExecutor)
    return engine.executor


def chunks_of(engine: Engine, request_id: str) -> list[Chunk]:
    """The chunks of a request as they were planned, whether they have run or not."""
    executor = executor_of(engine)
    planned = [*executor.batches, *(step.batch for step in executor._pending if step.result is None)]
    return [chunk for batch in planned for chunk in batch.chunks if chunk.request_id == request_id]


# ---------------------------------------------------------------------------------------------------------- by hand


def test_the_next_step_is_submitted_before_this_one_is_collected() -> None:
    engine = lagging()
    engine.add_request(make_request("a", PREFIX, 3))
    assert [output.token_ids for output in engine.step()] == [tuple(expected_tokens(PREFIX, 1))]
    assert executor_of(engine).num_ahead == 1 and len(executor_of(engine)._pending) == 1
    assert generate(engine)["a"] == expected_tokens(PREFIX, 3)[1:]
    assert executor_of(engine).num_unknown == 2, "the last step is known to be the last"
    assert engine.stats().num_steps == 3


def test_an_executor_without_submit_has_one_step_at_a_time() -> None:
    engine = make_engine()
    engine.add_request(make_request("a", PREFIX, 3))
    for _ in range(3):
        assert engine.step() and not engine.scheduler.in_flight


def test_blocks_of_a_step_are_read_by_the_next_and_seen_by_events_and_store_when_it_ends() -> None:
    store = MemoryStore()
    engine = lagging(store=store)
    events: list[Event] = []
    engine._event_sink = events.extend
    engine.scheduler.pool.listeners.append(engine._event_log)
    engine.scheduler.cache.event_log = engine._event_log
    engine.add_request(make_request("leader", [*PREFIX, 50]))
    engine.add_request(make_request("follower", [*PREFIX, 51]))
    assert engine._begin(0.0)
    assert engine._begin(0.0), "the follower is planned while the leader's step runs"
    engine._publish_events()
    assert [chunk.start for chunk in chunks_of(engine, "follower")] == [8]
    assert events == [] and store._offers == []
    (output,) = engine._end()
    assert output.request_id == "leader"
    assert [len(event.block_hashes) for event in events if isinstance(event, BlockStored)] == [2]
    assert len(store._offers) == 2
    assert generate(engine)["follower"] == expected_tokens([*PREFIX, 51], 1)


@pytest.mark.parametrize("fails", ["poison", "refuse"])
def test_what_read_the_blocks_of_a_failed_row_is_computed_again(fails: str) -> None:
    engine = lagging()
    setattr(executor_of(engine), fails, lambda chunk: chunk.request_id == "leader")
    events: list[Event] = []
    engine.scheduler.pool.listeners.append(engine._event_log)
    engine.scheduler.cache.event_log = engine._event_log
    engine._event_sink = events.extend
    engine.add_request(make_request("leader", [*PREFIX, 50]))
    engine.add_request(make_request("follower", [*PREFIX, 51], 3))
    (failed,) = engine.step()
    assert failed.request_id == "leader" and failed.error and events == []
    outputs = [output for _ in range(9) for output in engine.step()]
    assert [token for output in outputs for token in output.token_ids] == expected_tokens([*PREFIX, 51], 3)
    assert [chunk.start for chunk in chunks_of(engine, "follower")][:2] == [8, 0]
    breakdown = outputs[0].breakdown
    assert breakdown is not None and breakdown.computed == 9 and breakdown.num_cached == 0
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.usable_capacity


def test_a_block_freed_while_a_step_names_it_is_reused_after_the_step() -> None:
    engine = lagging()
    engine.add_request(make_request("a", range(20), 8))
    engine.step()
    engine.step()
    assert engine.abort("a") and not engine.abort("a")
    held = engine.scheduler.pool.usable_capacity - engine.scheduler.pool.num_free
    assert held == 6 and engine.has_work, "the step in flight names six blocks"
    engine.add_request(make_request("b", range(40, 60), 8))
    assert engine.step() == []
    assert not chunks_of(engine, "b"), "five blocks are needed and two are free"
    assert generate(engine)["b"] == expected_tokens(range(40, 60), 8)


def test_a_finished_sequence_is_discarded_from_the_step_planned_ahead() -> None:
    first, second, *_ = expected_tokens(PREFIX, 5)
    engine = lagging()
    engine.add_request(make_request("a", PREFIX, 5, stop=(second,)))
    engine.add_request(make_request("b", [60, 61], 5))
    assert generate(engine) == {"a": [first, second], "b": expected_tokens([60, 61], 5)}
    assert len(chunks_of(engine, "a")) == 3, "the third row was planned before the stop token was known"
    assert "a" in executor_of(engine).finished
    assert engine.scheduler.counters.generation_tokens == 7


def test_a_request_id_may_be_used_again_while_a_step_names_it() -> None:
    engine = lagging()
    engine.add_request(make_request("a", PREFIX, 6))
    engine.step()
    engine.abort("a")
    assert generate(engine, make_request("a", [70, 71, 72], 4)) == {"a": expected_tokens([70, 71, 72], 4)}


def test_the_cache_can_be_reset_when_only_aborted_requests_are_in_flight() -> None:
    engine = lagging()
    engine.add_request(make_request("a", PREFIX, 6))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.abort("a")
    assert engine.reset_prefix_cache()
    pool = engine.scheduler.pool
    assert (pool.num_published, pool.num_free, engine.has_work) == (0, pool.usable_capacity, False)


def test_aborted_rows_that_are_not_finite_leave_no_block_that_is_not_cleared() -> None:
    engine = lagging(num_blocks=4, max_batched_tokens=8)
    executor_of(engine).poison = lambda chunk: chunk.request_id == "a" and chunk.start == 8
    engine.add_request(make_request("a", range(12)))
    assert engine.step() == []
    engine.abort("a")
    assert generate(engine, make_request("b", [30, 31], 2)) == {"b": expected_tokens([30, 31], 2)}


def test_preemption_waits_for_the_step_in_flight() -> None:
    engine = lagging(expects_short_outputs=True)
    prompts = {name: [10 * index + offset for offset in range(4)] for index, name in enumerate("abcd")}
    requests = [make_request(name, prompt, 12) for name, prompt in prompts.items()]
    assert generate(engine, *requests) == {name: expected_tokens(prompt, 12) for name, prompt in prompts.items()}
    assert engine.scheduler.counters.num_preemptions > 0 and executor_of(engine).num_unknown > 20


@pytest.mark.parametrize(
    "values",
    [
        {"grammar": "0"},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
    ],
)
def test_a_request_whose_next_step_needs_the_host_is_not_planned_ahead(values: dict[str, object]) -> None:
    engine = lagging(grammars=Grammars())
    plain = make_request("a", PREFIX, 4)
    engine.add_request(replace(plain, sampling=replace(plain.sampling, **values)))  # type: ignore[arg-type]
    engine.add_request(make_request("b", [60, 61], 6))
    for _ in range(3):
        assert len(engine.step()) == 2, "both advance in every step"
        assert executor_of(engine).num_ahead == 0
    assert generate(engine)["b"] == expected_tokens([60, 61], 6)[3:]
    assert executor_of(engine).num_unknown == 2, "a ends with the fourth step, so the last two of b are planned ahead"


def test_drafts_are_looked_up_when_the_last_token_is_known() -> None:
    engine = lagging(speculation=SpeculationConfig(3, 3, 1), model=lambda tokens: len(tokens) % 3)
    expected = expected_tokens(PREFIX, 12, model=lambda tokens: len(tokens) % 3)
    assert generate(engine, make_request("a", PREFIX, 12)) == {"a": expected}
    assert executor_of(engine).num_unknown == 0 and engine.scheduler.counters.num_accepted_tokens > 0


def test_prompts_are_planned_ahead_chunk_by_chunk() -> None:
    engine = lagging(max_batched_tokens=8)
    engine.add_request(make_request("a", range(30), 2))
    assert engine.step() == [] and executor_of(engine).num_ahead == 1
    assert generate(engine) == {"a": expected_tokens(range(30), 2)}
    assert [chunk.start for chunk in chunks_of(engine, "a")] == [0, 8, 16, 24, 30]


def test_the_explainer_knows_that_the_blocks_of_the_step_before_were_readable() -> None:
    engine = lagging()
    engine.add_request(make_request("leader", [*PREFIX, 50]))
    engine.add_request(make_request("follower", [*PREFIX, 51]))
    generate(engine)
    leader, follower = engine.recent.find("leader"), engine.recent.find("follower")
    assert leader and follower and leader.first_token_step is not None and leader.first_token_step < follower.admitted


# ------------------------------------------------------------------------------------------------------- at random


def random_request(rng: Random, request_id: str) -> Request:
    stems = [list(range(12)), [7] * 8, [*range(8), 90], []]
    prompt = [*rng.choice(stems), *(rng.randrange(3) for _ in range(rng.randint(0, 9)))] or [1]
    tenant = rng.choice(["", "", "a", "b"])
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=rng.choice([0, 1, 2, 5, 8]),
        stop_token_ids=tuple(rng.sample(range(97), rng.choice([0, 0, 9]))),
        grammar=rng.choice([None] * 9 + ["0", "2"]),
        presence_penalty=rng.choice([0.0] * 9 + [1.0]),
        prompt_logprobs=rng.choice([None] * 9 + [0]),
    )
    return Request(
        request_id,
        array("i", prompt),
        sampling,
        domain=tenant.encode(),
        tenant=tenant,
        priority=rng.randint(0, 2),
        cache=rng.choice([CacheMode.READ_WRITE] * 8 + [CacheMode.READ_ONLY, CacheMode.BYPASS]),
        retention=RetentionHint(rng.choice([0, 50, 90]), rng.choice([0.0, 3.0])),
    )


class Session:
    """One engine and everything that may be asked of it, in an order that the seed decides."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.bad: set[str] = set()
        self.refused: set[str] = set()
        store = MemoryStore(habits=_habits(rng)) if rng.random() < 0.4 else None
        self.engine = lagging(
            num_blocks=rng.choice([9, 13, 25]),
            policy=rng.choice(["fcfs", "lpm", "priority"]),
            eviction_policy=rng.choice(["lru", "2q", "lhd"]),
            tenant_floor=rng.choice([0.0, 0.5]),
            expects_short_outputs=rng.random() < 0.7,
            enable_prefix_caching=rng.random() < 0.9,
            grammars=Grammars(),
            store=store,
            poison=lambda chunk: chunk.request_id in self.bad,
            speculation=SpeculationConfig(3, 3, 1) if rng.random() < 0.15 else None,
            max_batched_tokens=rng.choice([8, 16, 64]),
            max_seqs=rng.choice([2, 4, 8]),
            long_prefill_threshold=rng.choice([0, 0, 6]),
            max_model_len=rng.choice([29, 64]),
        )
        self.executor = executor_of(self.engine)
        self.executor.eager = rng.random() < 0.5
        self.executor.refuse = lambda chunk: chunk.request_id in self.refused
        engine = self.engine
        engine._event_sink = self._stored
        engine.scheduler.pool.listeners.append(engine._event_log)
        engine.scheduler.cache.event_log = engine._event_log
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.live: set[str] = set()
        self.finished: set[str] = set()

    def act(self) -> None:
        rng, dice = self.rng, self.rng.random()
        try:
            if dice < 0.45:
                request = random_request(rng, f"r{len(self.requests)}")
                self.engine.add_request(request)
                self.requests[request.request_id], self.tokens[request.request_id] = request, []
                self.live.add(request.request_id)
            elif dice < 0.52 and self.live:
                victim = rng.choice(sorted(self.live))
                assert self.engine.abort(victim) and not self.engine.abort(victim)
                self.live.remove(victim)
            elif dice < 0.55 and self.live:
                rng.choice([self.bad, self.refused]).add(rng.choice(sorted(self.live)))
            elif dice < 0.58:
                idle = sorted(self.engine.scheduler.pool.iterate_in_eviction_order())
                if idle:
                    self.executor.corrupt(rng.choice(idle))
            elif dice < 0.62:
                domain = rng.choice([b"", b"a"])
                self.engine.add_prefix(f"p{rng.randrange(3)}", range(12), tenant=domain.decode(), domain=domain)
            elif dice < 0.65:
                self.engine.remove_prefix(f"p{rng.randrange(3)}")
            elif dice < 0.67:
                self.engine.reset_prefix_cache(pinned=rng.random() < 0.5)
        except InvalidRequestError:
            pass

    def step(self, now: float) -> None:
        outputs = self.engine.step(now)
        self.engine.scheduler.pool.check_invariants()
        for output in outputs:
            self._check(output)

    def end(self) -> None:
        for step in range(3_000):
            if not self.engine.has_work:
                break
            self.step(1e6 + step)
        assert not self.engine.has_work and not self.live, f"{self.live} never end"
        pool = self.engine.scheduler.pool
        assert pool.num_free + pool.num_pinned_idle == pool.usable_capacity, "blocks are held although nothing runs"
        for request_id, request in self.requests.items():
            due = expected_tokens(request.prompt, *_limits(request, self.engine.scheduler.limits.max_model_len))
            got = self.tokens[request_id]
            assert got == due[: len(got)]
            assert len(got) == len(due) or request_id not in self.finished

    def _check(self, output: RequestStepOutput) -> None:
        name = output.request_id
        assert name in self.live, f"news of {name}, which ended"
        if output.breakdown is not None:
            assert sum(output.breakdown) == output.num_prompt_tokens and min(output.breakdown) >= 0
        self.tokens[name] += output.token_ids
        if output.is_invalid:  # it did not fit any more when its grammar was compiled
            assert output.error is not None and self.requests[name].sampling.grammar is not None
        elif output.error is not None:
            assert name in self.bad | self.refused | self.executor.harmed, f"{name} failed for another: {output.error}"
        if output.finish_reason is not None:
            self.live.remove(name)
            if output.error is None:
                self.finished.add(name)

    def _stored(self, events: list[Event]) -> None:
        for event in events:
            for block_hash in event.block_hashes if isinstance(event, BlockStored) else ():
                entry = self.engine.scheduler.pool.published_entry(block_hash)
                assert entry is None or not self.executor.is_written(entry[0]), "an event of a block in flight"


def _habits(rng: Random) -> Habits:
    return Habits(
        write_delay=lambda: rng.choice([0, 0, 1, 5]),
        load_delay=lambda: rng.choice([0, 0, 1, 4]),
        piece=lambda: rng.choice([1, 2, 100]),
        fails=lambda: rng.random() < 0.1,
        expected=lambda num: rng.choice([0.0, 0.0, 1e9]),
    )


def _limits(request: Request, max_model_len: int) -> tuple[int, tuple[int, ...]]:
    sampling = request.sampling
    return min(sampling.max_tokens, max_model_len - len(request.prompt)), sampling.stop_token_ids


def run_sessions(seeds: range, num_acts: int = 120) -> dict[str, int]:
    """Run random sessions; return what they saw, so that a test can tell whether they saw enough."""
    seen = dict.fromkeys(["requests", "finished", "preemptions", "recomputes", "ahead", "unknown", "loads"], 0)
    for seed in seeds:
        session = Session(seed)
        for now in range(num_acts):
            session.act()
            if session.rng.random() < 0.6:
                session.step(float(now))
        session.end()
        counters = session.engine.scheduler.counters
        seen["requests"] += len(session.requests)
        seen["finished"] += len(session.finished)
        seen["preemptions"] += counters.num_preemptions
        seen["recomputes"] += counters.num_recomputes
        seen["loads"] += counters.store_tokens
        seen["ahead"] += session.executor.num_ahead
        seen["unknown"] += session.executor.num_unknown
    return seen


def test_outputs_with_lag_equal_outputs_without() -> None:
    assert next_token(array("i", [1])) == expected_tokens([1], 1)[0]  # what is due is computed without an engine
    seen = run_sessions(range(60))
    assert seen["requests"] > 2_000 and seen["finished"] > 1_000, seen
    assert min(seen.values()) > 20, seen


@pytest.mark.long
@pytest.mark.timeout(900)
def test_outputs_with_lag_equal_outputs_without_for_long() -> None:
    assert run_sessions(range(1_000, 3_000))["requests"] > 100_000
