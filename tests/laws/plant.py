"""A pytest plugin that plants one bug, named by HEADSTART_PLANT, so that one can see the suite catch it.

    HEADSTART_PLANT=early_publish PYTHONPATH=tests:tests/laws python -m pytest -p plant tests/laws/test_laws.py

`tests/laws/test_planted_bugs.py` plants every one of them and demands a failure.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import Phase, settings
from state_bugs import STATE_BUGS

from headstart.core import engine
from headstart.core.cache import kv_cache
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.kv_cache import KVCache, PrefixHit
from headstart.core.cache.transfers import StoreTransfers
from headstart.core.cache.trust import SuspectBlockHandler
from headstart.core.request import CacheMode
from headstart.core.sched import admission as room
from headstart.core.sched import plan, scheduler
from headstart.core.sched.admission import AdmissionControl
from headstart.core.sched.in_flight import StepsInFlight
from headstart.core.sched.plan import StepPlan
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.token_accounting import TokenAccounting
from headstart.core.sched.waiting_queue import SingleTenantQueue
from headstart.core.sequence import SequenceStatus


def double_free() -> None:
    release = BlockPool.release

    def planted(pool: BlockPool, block_ids: Any) -> None:
        release(pool, block_ids)
        if block_ids and pool.ref_count(block_ids[-1]) == 0:
            pool._scratch.append(block_ids[-1])

    BlockPool.release = planted  # type: ignore[method-assign]


def early_publish() -> None:
    extend = KVCache.adopt_hit_and_extend_table

    def planted(self: KVCache, seq: Any, hit: PrefixHit, num_tokens: int, **options: bool) -> bool:
        done = extend(self, seq, hit, num_tokens, **options)
        if done:  # at allocation, as several engines do, instead of after the forward pass
            computed, seq.num_computed_tokens = seq.num_computed_tokens, num_tokens
            self.publish_full_blocks(seq)
            seq.num_computed_tokens = computed
        return done

    KVCache.adopt_hit_and_extend_table = planted  # type: ignore[method-assign]


def off_by_one_hit() -> None:
    match = KVCache.match_prefix

    def planted(self: KVCache, seq: Any) -> PrefixHit:
        hit = match(self, seq)
        return hit._replace(num_tokens=hit.num_tokens + 1) if hit.num_tokens else hit

    KVCache.match_prefix = planted  # type: ignore[method-assign]


def whole_prompt_hit() -> None:
    match = KVCache.match_prefix

    def planted(self: KVCache, seq: Any) -> PrefixHit:
        hit = match(self, seq)
        return hit._replace(num_tokens=len(hit.block_ids) * self.block_size)

    KVCache.match_prefix = planted  # type: ignore[method-assign]


def unchained_hash() -> None:
    def planted(
        hashes: list[Any], token_ids: Any, block_size: int, root: bytes, *, until: int | None = None, **_: Any
    ) -> None:
        end = len(token_ids) if until is None else until
        for index in range(len(hashes), end // block_size):
            tokens = token_ids[index * block_size : (index + 1) * block_size]
            hashes.append(BlockHash(root + tokens.tobytes()))

    kv_cache.extend_block_hashes = planted  # type: ignore[assignment]


def idle_hits_counted_as_free() -> None:
    KVCache.num_available_after_hit = lambda self, seq, hit, last_resort=False: (  # type: ignore[method-assign]
        self.pool.num_available_after_acquire((), seq.request.tenant, last_resort=last_resort)
    )


def budget_double_count() -> None:
    add = StepPlan.add_chunk

    def planted(self: Any, seq: Any, start: int, n: int, want: int, *, writes: bool, extra: int = 0) -> None:
        charged = seq.num_computed_tokens if not seq.num_output_tokens else extra
        add(self, seq, start, n, want, writes=writes, extra=charged)

    StepPlan.add_chunk = planted  # type: ignore[method-assign]


def no_alignment() -> None:
    planted = plan.chunk_len
    plan.chunk_len = lambda want, start, budget, limits, alone, cap=None: planted(  # type: ignore[assignment]
        want, start, budget, plan.Limits(limits.max_batched_tokens, limits.max_seqs), alone=alone, cap=cap
    )


def shared_block_is_written() -> None:
    chunk = Scheduler._chunk
    Scheduler._chunk = lambda self, seq, n: (  # type: ignore[method-assign]
        made := chunk(self, seq, n)
    )._replace(write_from=made.start)


def failed_blocks_stay_published() -> None:
    BlockPool.discard_corrupt = lambda self, block_ids: None  # type: ignore[method-assign]


def lost_on_abort() -> None:
    release = KVCache.release_table

    def planted(self: KVCache, seq: Any) -> None:
        seq.block_ids = seq.block_ids[1:]
        release(self, seq)

    KVCache.release_table = planted  # type: ignore[method-assign]


def missing_unpin() -> None:
    BlockPool.unpin_hashes = lambda self, names: None  # type: ignore[method-assign]


def pinned_blocks_are_evicted() -> None:
    release = BlockPool.release

    def planted(self: BlockPool, block_ids: Any, *retention: Any) -> None:
        pins, self._pins = self._pins, {}
        release(self, block_ids, *retention)
        self._pins = pins

    BlockPool.release = planted  # type: ignore[method-assign]


def promises_are_not_kept_in_mind() -> None:
    StepPlan.will_compute_block = lambda self, seq, index: False  # type: ignore[method-assign]


def promises_of_what_is_not_published() -> None:
    add = StepPlan.add_chunk
    StepPlan.add_chunk = lambda self, seq, start, n, want, *, writes, extra=0: add(  # type: ignore[method-assign]
        self, seq, start, n, want, writes=True, extra=extra
    )


def adoption_keeps_the_partial_block() -> None:
    extend = KVCache.adopt_hit_and_extend_table

    def planted(self: KVCache, seq: Any, hit: PrefixHit, num_tokens: int, **options: bool) -> bool:
        if hit.block_ids and seq.block_ids[hit.start_block :]:
            hit = hit._replace(block_ids=(*seq.block_ids[hit.start_block :], *hit.block_ids[1:]))
            seq.block_ids = seq.block_ids[: hit.start_block]
        return extend(self, seq, hit, num_tokens, **options)

    KVCache.adopt_hit_and_extend_table = planted  # type: ignore[method-assign]


def the_oldest_has_no_turn() -> None:
    following = SingleTenantQueue.next_group

    def planted(self: SingleTenantQueue) -> Any:
        self._num_admissions = 1
        return following(self)

    SingleTenantQueue.next_group = planted  # type: ignore[method-assign]


def the_queue_misses_what_is_published() -> None:
    SingleTenantQueue.regroup_after_publish = lambda self: None  # type: ignore[method-assign]


def domains_do_not_count_behind_a_public_prefix() -> None:
    kv_cache.private_parent_hash_for_domain = lambda parent, domain: parent  # type: ignore[assignment]


def no_room_to_grow() -> None:
    AdmissionControl.blocks_reserved_for_sequence = lambda self, seq: 0  # type: ignore[method-assign]


def preemptions_without_a_bound() -> None:
    scheduler.is_non_preemptible = lambda seq: False  # type: ignore[assignment]
    room.is_non_preemptible = lambda seq: False  # type: ignore[assignment]


def floors_are_not_kept() -> None:
    available = BlockPool.num_available_after_acquire
    BlockPool.num_available_after_acquire = lambda self, blocks, tenant="", *, last_resort=False: (  # type: ignore[method-assign]
        available(self, blocks, tenant, last_resort=True)
    )


def followed_tokens_are_counted_twice() -> None:
    adopted = TokenAccounting.on_blocks_adopted

    def planted(self: TokenAccounting, seq: Any, hit: PrefixHit, computed: int) -> None:
        adopted(self, seq, hit, 0)

    TokenAccounting.on_blocks_adopted = planted  # type: ignore[method-assign]


def the_store_writes_what_is_there_now() -> None:
    def planted(scheduler: Any, executor: Any) -> Any:
        return lambda block, version: executor.read_block(block)

    engine._source = planted  # type: ignore[attr-defined]


def loaded_blocks_are_cleared() -> None:
    take_in = StoreTransfers._take_in

    def planted(self: StoreTransfers, load: Any, loaded: Any, executor: Any, now: float) -> None:
        dirty: list[int] = []
        take = self._pool.take_unzeroed_blocks
        self._pool.take_unzeroed_blocks = lambda: dirty.extend(take()) or []  # type: ignore[method-assign, func-returns-value]
        take_in(self, load, loaded, executor, now)
        del self._pool.take_unzeroed_blocks
        executor.zero_blocks(dirty)

    StoreTransfers._take_in = planted  # type: ignore[method-assign]


def promises_of_a_failed_load_stay() -> None:
    def planted(self: StoreTransfers, load: Any) -> None:
        self.num_outstanding -= load.end - load.index
        load.end = load.index

    StoreTransfers._end = planted  # type: ignore[method-assign]


def a_met_load_outlives_its_sequence() -> None:
    StoreTransfers.on_sequence_left = lambda self, seq: None  # type: ignore[method-assign]


def blocks_are_published_before_those_in_front_of_them() -> None:
    def planted(self: StoreTransfers, load: Any) -> None:
        for index, block in load.held.items():
            self._cache.publish_block(load.seq, index, block)
            self._pool.release([block])
        load.held = {}

    StoreTransfers._publish_held = planted  # type: ignore[method-assign]


def what_has_arrived_is_computed_too() -> None:
    StoreTransfers.max_chunk_len = lambda self, seq, start, num: num  # type: ignore[method-assign]


def what_a_failed_row_used_is_loaded_again() -> None:
    StoreTransfers.discard_corrupt = lambda self, names: None  # type: ignore[method-assign]


def shared_blocks_of_a_failed_row_are_given_up() -> None:
    SuspectBlockHandler._shared = lambda self, seq: set()  # type: ignore[method-assign]


def corrupt_shared_blocks_stay() -> None:
    SuspectBlockHandler._is_there = lambda self, suspect: False  # type: ignore[method-assign]


def the_second_run_reads_the_cache() -> None:
    def planted(self: KVCache, seq: Any) -> bool:
        return self.enabled and seq.request.cache is not CacheMode.BYPASS

    KVCache.may_read_cache = planted  # type: ignore[method-assign]


def loads_arrive_one_block_late() -> None:
    publish = StoreTransfers._publish

    def planted(self: StoreTransfers, load: Any, blocks: list[int]) -> None:
        publish(self, load, blocks[1:] + blocks[:1])

    StoreTransfers._publish = planted  # type: ignore[method-assign]


def tables_in_flight_are_released_at_once() -> None:
    def planted(self: Any, seq: Any) -> None:
        seq.num_scheduled_tokens, seq.pending_row = 0, None
        self._cache.release(seq)

    StepsInFlight.release_table = planted  # type: ignore[method-assign]


def blocks_ahead_of_a_failed_row_stay() -> None:
    settle = StepsInFlight.confirm_or_withdraw_published
    StepsInFlight.confirm_or_withdraw_published = lambda self, step, rows: (  # type: ignore[method-assign]
        settle(self, step, [row._replace(error=None) for row in rows])
    )


def readers_of_a_failed_row_go_on() -> None:
    Scheduler._requeue_readers = lambda self, block_ids, writers: None  # type: ignore[method-assign]


def discarded_rows_are_applied() -> None:
    scheduler.is_current_chunk = lambda seq, chunk: seq.status is SequenceStatus.RUNNING


def blocks_ahead_are_told_at_once() -> None:
    publish = BlockPool.publish

    def planted(self: BlockPool, *values: Any, ahead: bool = False) -> bool:
        done = publish(self, *values)
        if ahead and done:
            self._ahead.add(values[0])
        return done

    BlockPool.publish = planted  # type: ignore[method-assign]
    BlockPool.confirm_published = lambda self, block: self._ahead.remove(block)  # type: ignore[method-assign]


def penalties_are_planned_ahead() -> None:
    scheduler.needs_token_on_host = lambda sampling: False


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        double_free,
        early_publish,
        off_by_one_hit,
        whole_prompt_hit,
        unchained_hash,
        idle_hits_counted_as_free,
        budget_double_count,
        no_alignment,
        shared_block_is_written,
        failed_blocks_stay_published,
        lost_on_abort,
        missing_unpin,
        pinned_blocks_are_evicted,
        promises_are_not_kept_in_mind,
        promises_of_what_is_not_published,
        adoption_keeps_the_partial_block,
        the_oldest_has_no_turn,
        the_queue_misses_what_is_published,
        domains_do_not_count_behind_a_public_prefix,
        no_room_to_grow,
        preemptions_without_a_bound,
        floors_are_not_kept,
        followed_tokens_are_counted_twice,
        the_store_writes_what_is_there_now,
        loaded_blocks_are_cleared,
        promises_of_a_failed_load_stay,
        a_met_load_outlives_its_sequence,
        blocks_are_published_before_those_in_front_of_them,
        what_has_arrived_is_computed_too,
        what_a_failed_row_used_is_loaded_again,
        shared_blocks_of_a_failed_row_are_given_up,
        corrupt_shared_blocks_stay,
        the_second_run_reads_the_cache,
        loads_arrive_one_block_late,
        tables_in_flight_are_released_at_once,
        blocks_ahead_of_a_failed_row_stay,
        readers_of_a_failed_row_go_on,
        discarded_rows_are_applied,
        blocks_ahead_are_told_at_once,
        penalties_are_planned_ahead,
    )
}
BUGS |= {bug.__name__: partial(bug, setattr) for bug in STATE_BUGS}

# a planted bug has to be seen, not explained: no shrinking
settings.register_profile("planted", phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False)
settings.load_profile("planted")

if name := os.environ.get("HEADSTART_PLANT"):
    BUGS[name]()
