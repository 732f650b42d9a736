"""Laws 1-9 of the scheduler, by hypothesis, over random prefix trees on tiny pools; law 10 is tests/test_oracle.py.

The checking executor catches every wrong, stale or missing block at the read; `check_laws` states the rest.
"""

from array import array
from functools import cache
from itertools import product
from random import Random

import pytest
from checking import CheckingExecutor, executor_of, expected_tokens, make_engine, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory_store import Habits, MemoryStore, Shelf

from headstart.core.batch import Batch
from headstart.core.engine import Engine
from headstart.core.request import CacheMode, Request, RetentionHint
from headstart.core.sched.admission import MAX_PREEMPTIONS
from headstart.core.sched.limits import budget_cost
from headstart.core.sched.step_time import MaxStepTime
from headstart.core.sched.token_accounting import TokenAccounting
from headstart.core.sequence import SequenceStatus
from headstart.core.speculation.speculation_config import SpeculationConfig

BLOCK = 4


STEMS = [list(range(12)), [7] * 8, [*range(8), 90], []]


def prompts(max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Prompts over a tree: few branches, so that prefixes are shared, whole blocks and parts of blocks."""
    stems = st.sampled_from(STEMS)
    return st.builds(lambda stem, tail: (stem + tail)[:max_size] or [1], stems, st.lists(st.integers(0, 2), max_size=9))


def habits(rng: Random) -> Habits:
    """A store that is sometimes late, sometimes in pieces, and sometimes fails."""
    return Habits(
        write_delay=lambda: rng.choice([0, 0, 1, 5]),
        load_delay=lambda: rng.choice([0, 0, 1, 4]),
        piece=lambda: rng.choice([1, 2, 100]),
        fails=lambda: rng.random() < 0.1,
        expected=lambda num: rng.choice([0.0, 0.0, 1e9]),
    )


@cache
def stocked() -> Shelf:
    """A store as a process left it that knew the stems, and some more, of every tenant."""
    store = MemoryStore()
    engine = make_engine(100, BLOCK, store=store)
    prompts = ([*stem, *tail] for stem in STEMS for tail in ([0] * 8, [1, 2] * 4, [2, 0] * 4) if stem)
    for index, (prompt, tenant) in enumerate(product(prompts, ("", "a", "b"))):
        engine.add_request(make_request(f"stock-{index}", prompt, domain=tenant.encode()))
    while engine.has_work:
        engine.step()
    store.flush()
    return store.shelf


class SchedulerLaws(RuleBasedStateMachine):
    """Adds, steps, aborts, poisons, resets and restarts in any order; every rule is followed by every law."""

    @initialize(
        num_blocks=st.integers(8, 24),
        budget=st.integers(4, 40),
        max_seqs=st.integers(1, 4),
        long_prefill=st.sampled_from([0, 0, 4, 6]),
        align=st.sampled_from([1, 1, 4]),
        ceil=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "lpm"]),
        k=st.integers(1, 4),
        eviction=st.sampled_from(["lru", "2q"]),
        floor=st.sampled_from([0.0, 0.5]),
        short=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        store=st.sampled_from([None, 1, 2, 3]),
        bound=st.sampled_from([None, None, 1, 3, 5]),
        drafts=st.sampled_from([None, None, 1, 6]),
    )
    def start(
        self, num_blocks: int, budget: int, max_seqs: int, long_prefill: int, align: int, ceil: bool, policy: str,
        k: int, eviction: str, floor: float, short: bool, caching: bool, store: int | None,
        bound: int | None, drafts: int | None,
    ) -> None:  # fmt: skip
        if align > 1:
            budget = max(budget, max_seqs + align)
        self.poisoned: set[str] = set()
        self.store = None if store is None else MemoryStore(dict(stocked()), habits(Random(store)))
        self.build = lambda: make_engine(
            num_blocks,
            BLOCK,
            store=self.store,
            poison=lambda chunk: chunk.request_id in self.poisoned,
            enable_prefix_caching=caching,
            policy=policy,
            lpm_k=k,
            eviction_policy=eviction,
            tenant_floor=floor,
            expects_short_outputs=short,
            max_batched_tokens=max(budget, max_seqs),
            max_seqs=max_seqs,
            long_prefill_threshold=long_prefill,
            align=align,
            charge_ceil=ceil,
            max_model_len=28,
            speculation=None if drafts is None else SpeculationConfig(drafts, 3, 1),
            max_step_time=None if bound is None else MaxStepTime(0.5, least_tokens=bound),  # a step takes 1 s here
        )
        self.engine = self.build()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.done: set[str] = set()
        self.books: dict[str, set[int]] = {}  # prompt positions that each request computed
        self.count = 0

    @rule(prompt=prompts(), max_tokens=st.integers(1, 8), mode=st.sampled_from(CacheMode), urgent=st.integers(0, 2),
          tenant=st.sampled_from(["", "a", "b"]), hint=st.sampled_from([0, 50, 90]))  # fmt: skip
    def add(self, prompt: list[int], max_tokens: int, mode: CacheMode, urgent: int, tenant: str, hint: int) -> None:
        if -(-(len(prompt) + max_tokens - 1) // BLOCK) > self.engine.scheduler.pool.usable_capacity or self.count > 60:
            return
        self.count += 1
        request = make_request(
            f"r{self.count}", prompt, max_tokens, cache=mode, priority=urgent, tenant=tenant, domain=tenant.encode(),
            retention=RetentionHint(hint, 3.0 if hint > 50 else 0.0),
        )  # fmt: skip
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.engine.add_request(request)

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            check_step(self.engine, self.tokens, self.done, self.poisoned, self.books)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(set(self.requests) - self.done)
        if live:
            victim = data.draw(st.sampled_from(live))
            assert self.engine.abort(victim)
            assert not self.engine.abort(victim)
            self.done.add(victim)

    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        live = sorted(set(self.requests) - self.done)
        if live:
            self.poisoned.add(data.draw(st.sampled_from(live)))

    @rule(which=st.integers(0, 30))
    def corrupt(self, which: int) -> None:
        """A published block goes bad: its readers are computed again, and no request gets a wrong token."""
        idle = sorted(self.engine.scheduler.pool.iterate_in_eviction_order())
        if idle:
            executor_of(self.engine).corrupt(idle[which % len(idle)])

    @rule()
    def reset(self) -> None:
        held = self.engine.scheduler.pool.num_free < self.engine.scheduler.pool.usable_capacity
        assert self.engine.reset_prefix_cache() is not held

    @rule()
    def restart(self) -> None:
        """The process dies; what it had stored is there for the next."""
        self.done |= set(self.requests)
        if self.store is not None:
            self.store = MemoryStore(self.store.shelf, self.store.habits)
        self.engine = self.build()

    @invariant()
    def laws(self) -> None:
        check_laws(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2_000):
            if not self.engine.has_work:
                break
            check_step(self.engine, self.tokens, self.done, self.poisoned, self.books)
        assert not self.engine.has_work, "a request never finishes"
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.usable_capacity, "blocks are held although nothing runs"
        for request_id, request in self.requests.items():  # law 10 on paper: reuse changes no output
            if request_id not in self.poisoned:
                due = expected_tokens(request.prompt, request.sampling.max_tokens)
                got = self.tokens[request_id]
                assert got == due[: len(got)]
                assert request_id in self.done


def check_step(
    engine: Engine, tokens: dict[str, list[int]], done: set[str], poisoned: set[str], books: dict[str, set[int]]
) -> None:
    """One step; laws 4-7 and 9 on the batch that was executed."""
    executor = executor_of(engine)
    before = len(executor.batches)
    computed = {seq.request_id: seq.num_computed_tokens for seq in engine.scheduler.running}
    covered = {seq.request_id: seq.num_covered_tokens for seq in engine.scheduler._sequences.values()}
    again = {seq.request_id for seq in engine.scheduler._sequences.values() if seq.was_recomputed}
    adoptions = engine.scheduler.counters.num_adoptions
    outputs = engine.step()
    adoptions = engine.scheduler.counters.num_adoptions - adoptions
    for batch in executor.batches[before:]:
        check_batch(engine, batch, computed)
        ahead = sum(chunk.start > computed.get(chunk.request_id, chunk.start) for chunk in batch.chunks)
        assert ahead <= adoptions, "law 7: a chunk begins where its sequence was, unless it took over blocks"
        for chunk in batch.chunks:
            first = max(chunk.start, covered.get(chunk.request_id, 0))  # those before are a replay, counted apart
            positions = range(first, min(chunk.start + len(chunk.token_ids), chunk.num_prompt_tokens))
            books.setdefault(chunk.request_id, set()).update(positions)
    executor.batches.clear()
    for seq in engine.scheduler._sequences.values():
        if seq.was_recomputed and seq.request_id not in again and not seq.num_output_tokens:
            books[seq.request_id] = set()  # nothing of the first run counts
    for output in outputs:
        assert output.request_id not in done, "news of a request that ended"
        if output.breakdown is not None:
            assert sum(output.breakdown) == output.num_prompt_tokens and min(output.breakdown) >= 0
            assert output.breakdown.num_cached == output.num_cached_tokens < output.num_prompt_tokens
            assert output.breakdown.computed == len(books[output.request_id]), "the books do not tell what was computed"
        tokens[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            done.add(output.request_id)
        if output.error is not None:
            excused = poisoned | executor.harmed
            assert output.request_id in excused, f"{output.request_id} was harmed by another: {output.error}"


def check_batch(engine: Engine, batch: Batch, computed: dict[str, int]) -> None:
    limits = engine.scheduler.limits
    assert len(batch.chunks) <= limits.max_seqs  # law 5
    charged = 0
    for chunk in batch.chunks:
        n = len(chunk.token_ids)
        if chunk.num_logits == 0 and chunk.start < chunk.num_prompt_tokens:  # outputs come one by one, also in a replay
            assert (chunk.start + n) % limits.align == 0, "law 6: only the last chunk may end inside a block"
        charged += budget_cost(chunk.start, n, limits, decode=n == chunk.num_logits)
        kept = n - max(chunk.num_logits - 1, 0)  # the table is trimmed behind rejected drafts; the executor checks all
        assert len(chunk.block_ids) * BLOCK >= chunk.start + kept, "law 4"
        if chunk.request_id in computed:
            assert chunk.start >= computed[chunk.request_id], "law 7: a victim is in the batch"
    assert charged <= limits.max_batched_tokens, "law 5"


def check_laws(engine: Engine) -> None:
    """Laws 1, 2, 3 and 8 on the state between two steps; law 2 is about blocks that are not corrupted."""
    scheduler = engine.scheduler
    scheduler.waiting.regroup_after_publish()
    scheduler.pool.check_invariants()  # law 8
    executor = engine.executor
    assert isinstance(executor, CheckingExecutor)
    transfers = scheduler.transfers
    loads = transfers._loads.values()
    assert transfers.num_outstanding == len(transfers._promised) == sum(load.end - load.index for load in loads)
    references = {block: 1 for load in loads for block in load.held.values()}
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING
        for block in seq.block_ids:
            references[block] = references.get(block, 0) + 1
        for position in range(seq.num_computed_tokens):  # law 1
            slot = seq.block_ids[position // BLOCK] * BLOCK + position % BLOCK
            if executor.slots[slot] != "NaN":
                assert executor.slots[slot] == (position, seq.token_ids[position])
    for block in range(1, scheduler.pool.num_blocks):
        assert scheduler.pool.ref_count(block) == references.get(block, 0), (
            "a reference without a table, or the reverse"
        )
    assert all(seq.num_preemptions <= MAX_PREEMPTIONS for seq in (*scheduler.running, *scheduler.waiting))
    for seq in scheduler.waiting:
        assert not seq.block_ids and seq.num_computed_tokens == 0
        hit = scheduler.cache.match_prefix(seq)
        assert hit.num_tokens < len(seq.token_ids)  # law 3
        assert scheduler.waiting.published_blocks_upper_bound(seq) >= len(hit.block_ids), (
            "the queue knows less than there is"
        )
        for index, block in enumerate(hit.block_ids):  # laws 2 and 3: contiguous, full, computed, the right tokens
            held = executor.slots[block * BLOCK : (block + 1) * BLOCK]
            due = seq.token_ids[index * BLOCK : (index + 1) * BLOCK]
            if block in executor.corrupted:
                continue
            assert held == [(index * BLOCK + offset, token) for offset, token in enumerate(due)]


def finish_overtaken() -> Engine:
    """Finish a prompt that stands inside a block while another publishes that block and more; check every step."""
    engine = make_engine(60, BLOCK, long_prefill_threshold=6, max_batched_tokens=32)
    tokens: dict[str, list[int]] = {"slow": [], "other": [], "racer": []}
    done: set[str] = set()
    books: dict[str, set[int]] = {}

    def step() -> None:
        check_step(engine, tokens, done, set(), books)
        check_laws(engine)

    engine.add_request(make_request("slow", [*range(20), 50]))
    engine.add_request(make_request("other", [70] * 9))  # so that the cap of 6 tokens holds
    step()
    running = engine.scheduler.running
    (slow,) = (seq for seq in running if seq.request_id == "slow")
    engine.add_request(make_request("racer", [*range(20), 51], cache=CacheMode.READ_WRITE))
    running.remove(slow)  # not planned for three steps: the racer overtakes it
    for _ in range(3):
        check_step(engine, tokens, done, set(), books)
    running.add(slow)
    assert slow.num_computed_tokens == 6 and done == {"other", "racer"}
    while engine.has_work:
        step()
    assert tokens["slow"] == expected_tokens([*range(20), 50], 1)
    return engine


def test_a_chunk_begins_ahead_only_where_blocks_were_taken_over() -> None:
    assert finish_overtaken().scheduler.counters.num_adoptions == 1


def test_a_chunk_that_begins_ahead_without_an_adoption_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenAccounting, "on_blocks_adopted", lambda self, seq, hit, computed: None)
    with pytest.raises(AssertionError, match="law 7: a chunk begins"):
        finish_overtaken()


TestSchedulerLaws = SchedulerLaws.TestCase
TestSchedulerLaws.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(
    trees=st.lists(prompts(), min_size=1, max_size=12),
    max_tokens=st.integers(1, 6),
    num_blocks=st.integers(8, 20),
    budget=st.integers(8, 64),
    max_seqs=st.integers(1, 8),
)
def test_outputs_with_reuse_equal_outputs_without(
    trees: list[list[int]], max_tokens: int, num_blocks: int, budget: int, max_seqs: int
) -> None:
    results = []
    for caching in (True, False):
        engine = make_engine(
            num_blocks, BLOCK, enable_prefix_caching=caching, max_batched_tokens=budget, max_seqs=max_seqs,
            max_model_len=30,
        )  # fmt: skip
        outputs: dict[str, list[int]] = {}
        for index, prompt in enumerate(trees):
            engine.add_request(make_request(f"r{index}", prompt, max_tokens))
        for _ in range(3_000):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).extend(output.token_ids)
        results.append(outputs)
        for index, prompt in enumerate(trees):
            assert outputs[f"r{index}"] == expected_tokens(array("i", prompt), max_tokens)
    assert results[0] == results[1]
