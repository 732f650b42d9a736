"""The scheduler: add, abort, schedule, update. The one state machine of engine, simulator and benchmarks.

There is no prefill phase and no decode phase: every sequence has a number of computed tokens and a number of known
tokens, and the difference is to be computed. Admission and the token budget count only what is not cached (vLLM #7883).
Sequences are planned from the head of the order and preempted from its tail, so a preempted sequence is never already
in the batch (invariant 7). A sequence whose next block is computed by another one in this very step, or being loaded
from a store, waits and takes it over (promised blocks), so a prefix is computed once for any number of requests.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping

from headstart.core.batch import (
    UNKNOWN_TOKEN,
    Batch,
    Chunk,
    PromptTokenBreakdown,
    RequestStepOutput,
    RowErrorKind,
    RowResult,
    StepResult,
)
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.block_store import BlockStore
from headstart.core.cache.eviction import PYTHON, KVBlockLoops
from headstart.core.cache.hashing import HashChain
from headstart.core.cache.kv_cache import NO_HIT, KVCache, PrefixHit
from headstart.core.cache.pinned_prefixes import PinnedPrefixes, RequestBlockDemand
from headstart.core.cache.transfers import LoadableBlocks, StoreTransfers
from headstart.core.cache.trust import SuspectBlockHandler
from headstart.core.errors import prompt_too_long_error
from headstart.core.request import FinishReason, Request
from headstart.core.sched.admission import MAX_CANDIDATES, AdmissionControl, is_non_preemptible
from headstart.core.sched.in_flight import StepInFlight, StepsInFlight, is_current_chunk, needs_token_on_host
from headstart.core.sched.plan import NO_SHARES, StepPlan, is_decoding
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sched.step_time import StepTimes
from headstart.core.sched.tenant_queues import TenantQueues
from headstart.core.sched.tenant_shares import RemainingStepShare, TenantShares, TenantStepDemand
from headstart.core.sched.token_accounting import TokenAccounting
from headstart.core.sched.waiting_queue import POLICIES, OrderedSequences, PrefixGroup
from headstart.core.sequence import Sequence, SequenceStatus
from headstart.core.speculation.speculation import Speculator


class Scheduler:
    """The scheduler of one pool of KV blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        store: BlockStore | None = None,
        chain: HashChain | None = None,
        ops: KVBlockLoops | None = None,
    ) -> None:
        """Build a scheduler. `chain` computes block hashes (core/cache/hashing.py); None: in Python. So do `ops`."""
        self.limits = limits = config.limits
        self.block_size = config.block_size
        self.pool = BlockPool(
            config.num_blocks,
            eviction_policy=config.eviction_policy,
            tenant_floor=config.tenant_floor,
            ops=ops or PYTHON,
        )
        self.cache = KVCache(
            self.pool,
            config.block_size,
            model=config.model,
            enabled=config.enable_prefix_caching,
            chain=chain,
            state_pages=config.state_pages,
        )
        self.step_times = StepTimes(limits.max_step_time)
        self.tenants = TenantShares(limits, self.pool.usable_capacity, self.step_times)
        self.waiting = TenantQueues(
            self.pool, config.policy, config.lpm_k, self.cache.may_read_cache, self.tenants.tenant_order_key
        )
        order = POLICIES[config.policy]
        self.running = OrderedSequences(lambda seq: (not is_non_preemptible(seq), *order(seq)))
        self.admission = AdmissionControl(self.cache, limits.max_model_len)
        self.prefixes = PinnedPrefixes(self.cache, self._demands, max_share=config.max_pinned_share)
        self.transfers = StoreTransfers(self.cache, store)
        self.trust = SuspectBlockHandler(self.cache, self.transfers, self.admission)
        self.speculation: Speculator | None = None
        if config.speculation is not None:
            most = config.max_draft_tokens
            self.speculation = Speculator(config.speculation, self.cache, limits.max_model_len, max_draft_tokens=most)
        self.in_flight = StepsInFlight(self.cache, limits.max_model_len)
        self.accounting = TokenAccounting(self.cache, self.transfers, self.prefixes.is_warming_request)
        self.counters = self.accounting.counters
        self._by_priority = config.policy == "priority"
        self._charges_cached = config.charge_cached
        self._sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._now = 0.0
        self._num_prompts = 0  # sequences with prompt tokens to compute, when the step was planned
        self._drains = False  # the next plan may preempt, so nothing may be in flight
        self._finished: list[str] = []  # ids whose state the executor may drop

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLargeError if it can never run, ValueError for an id in use."""
        self.check_request(request)
        seq = self.cache.new_sequence(request, self._num_arrivals)
        self.admission.check_fits_alone(seq)
        self._num_arrivals += 1
        seq.needs_host = self.speculation is not None or needs_token_on_host(request.sampling)
        self.accounting.on_arrived(seq)
        self._sequences[request.request_id] = seq
        self.tenants.on_arrived(seq)
        self.waiting.add(seq)

    def check_request(self, request: Request) -> None:
        """Raise RequestTooLargeError for a prompt longer than the context, ValueError for an id in use."""
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._check_length(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks, at once unless a step in flight names them; return False if none."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        if seq.num_output_tokens:  # a stop string ends a sequence like this too
            self.admission.record_output_length(seq.num_output_tokens)
        self._finish(seq)
        return True

    def schedule(self, now: float = 0.0) -> Batch:
        """Plan one step: running sequences first, in order; then waiting ones while budget and blocks are left.

        The batch has no chunks if everything that could be computed is being loaded from the store. `now` in seconds,
        on any clock that does not go back: for retention times, statistics and load deadlines.

        The step before may still be in flight. Then the batch has no chunks either if nothing can be planned ahead.
        """
        assert len(self.in_flight) < 2, "the step before the last one was not updated"
        self._now = self.pool.now = now
        running = list(self.running)
        if self.in_flight:
            if self._drains or not self.in_flight.can_plan_next():
                return Batch(())
            self.in_flight.publish_ahead()
            running = [seq for seq in running if not self.in_flight.is_last_step_of(seq)]
        self._drains = False
        shares = self._shares(running) if self.tenants.has_several_recent_tenants(now) else NO_SHARES
        victims = self._reclaim() if shares else set[str]()
        if self._drains:
            return Batch(())
        if victims:
            running = list(self.running)
        plan = self._plan(running, shares, victims)
        if shares and not plan.entries and not self.in_flight:  # those with a share wait, and the others may run
            plan = self._plan(running, NO_SHARES, victims)
        if not plan.entries and (
            self.transfers.num_outstanding or self.in_flight or self.transfers.cancel_loads_holding_blocks()
        ):
            return Batch(())
        assert plan.entries or not self._sequences, (
            f"nothing planned for {len(self.waiting)} waiting and {len(self.running)} running sequences "
            f"with {self.pool.num_free} free blocks"
        )
        for seq, n in plan.entries if shares else ():
            self.tenants.record_planned_tokens(seq, n)
        planned = [(seq, self._chunk(seq, n)) for seq, n in plan.entries]
        if self.speculation is not None:
            self._add_drafts(self.speculation, plan, planned)
        self.in_flight.begin_step(planned)
        finished, self._finished = self._finished, []
        return Batch(tuple([chunk for _, chunk in planned]), tuple(finished))

    def update(self, result: StepResult) -> list[RequestStepOutput]:
        """Apply the result of the oldest step in flight; return the outputs of all sequences that have any."""
        step = self.in_flight.end_oldest()
        assert len(result.rows) == len(step.entries), f"{len(step.entries)} chunks but {len(result.rows)} rows"
        self._learn(step, result.elapsed)
        withdrawn = self.in_flight.confirm_or_withdraw_published(step, result.rows)
        if withdrawn:
            self._requeue_readers(withdrawn, {seq.request_id for seq, _ in step.entries})
        outputs, has_states = list[RequestStepOutput](), self.cache.checkpoints.num_pages > 0
        for (seq, chunk), num_known, row in zip(step.entries, step.lengths, result.rows, strict=True):
            if is_current_chunk(seq, chunk):
                output = self._update_row(seq, chunk, num_known, row)
                if output is not None:
                    outputs.append(output)
            elif row.error is not None and row.error.kind is RowErrorKind.NON_FINITE:
                self.pool.discard_corrupt(self._written(chunk))
            if has_states and (chunk.saves or chunk.state):
                num_computed = chunk.start + num_known + chunk.num_accepted(row.token_ids)
                self.cache.checkpoints.finish_chunk(seq, chunk, 0 if row.error is not None else num_computed)
        self.in_flight.free_left_tables(step)
        return outputs

    # ------------------------------------------------------------------------------------------------- planning

    def _plan(self, running: list[Sequence], shares: Mapping[str, RemainingStepShare], victims: set[str]) -> StepPlan:
        """Plan a step. `shares`: of tenants, if there are several; nothing of the tenants `victims` is admitted."""
        num_decodes = total = sum(map(is_decoding, running))
        if shares:
            decodes = Counter(seq.request.tenant for seq in running if is_decoding(seq))
            num_decodes = sum(min(num, shares[tenant].num_rows) for tenant, num in decodes.items())
        self._num_prompts = len(self._sequences) - total
        most = self.step_times.max_prompt_tokens(num_decodes, self._num_prompts)
        plan = StepPlan(self.limits, self.block_size, num_decodes=num_decodes, max_prompt_tokens=most, shares=shares)
        preempted = self._plan_running(plan, running)
        if self.waiting and not self._drains and not (preempted and plan.entries):
            for tenant in victims:
                self.waiting.skip_tenant(tenant)
            self._plan_waiting(plan, is_shared=bool(shares))
        return plan

    def _plan_running(self, plan: StepPlan, running: list[Sequence]) -> bool:
        """Plan the running sequences; return whether one of them was preempted.

        If one does not fit while a step is in flight, which names the blocks that a preemption would free, planning
        ends, and goes on when that step has ended.
        """
        preempted = False
        alone = len(self._sequences) == 1
        for seq in running:
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted below, for a sequence earlier in the order
            start = before = seq.num_computed_tokens + seq.num_scheduled_tokens
            hit, num_tokens = NO_HIT, len(seq.token_ids) + (seq.pending_row is not None)
            if num_tokens - start > 1:
                hit = self.cache.match_prefix(seq)  # others may have published what it was about to compute
                if hit.block_ids and seq.num_scheduled_tokens:
                    continue  # it takes them over in the next step: the one in flight names the block that it drops
                start = max(hit.num_tokens, start)
                index = hit.start_block + len(hit.block_ids) or start // self.block_size
                if self._is_promised(plan, seq, index) or self._is_loading(seq, hit, index):
                    continue
            want = num_tokens - start
            n = self.transfers.max_chunk_len(seq, start, plan.chunk_len_within_budget(seq, start, want, alone=alone))
            while n and not self.cache.adopt_hit_and_extend_table(
                seq, hit, start + n, last_resort=len(self.running) == 1 or is_non_preemptible(seq)
            ):
                if self.transfers.cancel_loads_holding_blocks():
                    continue
                if self.in_flight:
                    self._drains = True
                    return preempted
                preempted = True
                if self._preempt(self.admission.choose_victim(seq, hit, start + n, self._candidates(seq))) is seq:
                    n = 0
            if n:
                if hit.block_ids:
                    self.accounting.on_blocks_adopted(seq, hit, before)
                plan.add_chunk(seq, start, n, want, writes=self.cache.may_publish(seq))
        return preempted

    def _plan_waiting(self, plan: StepPlan, *, is_shared: bool) -> None:
        """Admit waiting sequences in the queue's order; stop at the first that does not fit.

        `is_shared`: no tenant above its share gets more while one below it waits.
        """
        self.waiting.regroup_after_publish()
        reserved = sum(map(self.admission.blocks_reserved_for_sequence, self.running))
        while plan.budget > 0 and len(self.running) < self.limits.max_seqs:
            group = self.waiting.next_group()
            if group is None:
                break
            seq, tenant = group.members[0], group.members[0].request.tenant
            if (
                is_shared
                and self.tenants.reaches_place_or_block_share(tenant)
                and not all(map(self.tenants.reaches_place_or_block_share, self.waiting.tenants))
            ):
                break
            if seq.recompute is not None and not self._may_recompute(seq, group):
                continue
            hit = self.cache.match_prefix(seq)
            depth = len(hit.block_ids)
            if depth < group.depth:
                self.waiting.regroup_sequence(seq, depth)
                continue
            if self._is_promised(plan, seq, depth) or self._is_loading(seq, hit, depth, reserved):
                self.waiting.skip_prefix_group(group, hit.num_tokens)
                continue
            if plan.exceeds_tenant_share(seq, hit.num_tokens):
                self.waiting.skip_tenant(tenant)
                continue
            if not self._admit(plan, seq, hit, reserved):
                break
            reserved += self.admission.blocks_reserved_for_sequence(seq)
        self.waiting.reset_skipped()

    def _may_recompute(self, seq: Sequence, group: PrefixGroup) -> bool:
        """Return whether the second run of a waiting sequence may begin; only one runs at a time.

        If all its suspects are gone by then, the second run is cancelled and the sequence is queued as usual.
        """
        if any(other.recompute is not None for other in self.running):
            self.waiting.skip_prefix_group(group, 0)
            return False
        if self.trust.sequence_has_published_suspects(seq):
            return True
        self.waiting.remove(seq)
        seq.recompute = None
        self.waiting.add(seq)
        return False

    def _is_promised(self, plan: StepPlan, seq: Sequence, index: int) -> bool:
        """Return whether to wait a step for another sequence that computes block `index` of `seq`, and count that."""
        if not plan.will_compute_block(seq, index) or not self.cache.may_read_cache(seq):
            return False
        self.counters.num_promise_skips += 1
        return True

    def _is_loading(self, seq: Sequence, hit: PrefixHit, index: int, reserved: int | None = None) -> bool:
        """Return whether its next blocks, from `index` on, are being loaded from the store; begins a load if it helps.

        Loads begin only for what could run now: for a waiting sequence if all of it fits beside the reservations
        `reserved`.
        """
        transfers, start = self.transfers, max(hit.num_tokens, seq.next_start)
        alone = self._num_prompts == 1
        if transfers.should_await_load(seq, index, start, alone=alone):
            return True
        if not transfers.may_load_from_store(seq) or (reserved is not None and not self._fits(seq, hit, reserved)):
            return False  # in every step while it waits: its blocks are not looked up one by one
        wanted = transfers.find_loadable(seq, index, start)
        if not wanted.pieces:
            return False
        if reserved is None:
            fits = len(wanted.pieces) + transfers.num_outstanding <= self.cache.num_available_after_hit(seq, hit)
        else:
            fits = not wanted.num_checkpoint_pages or self._fits(seq, hit, reserved + wanted.num_checkpoint_pages)
        return fits and transfers.begin_load_if_faster(
            seq, wanted, self._now, may_meet=alone and self._fits_beside(seq, hit, wanted)
        )

    def _fits_beside(self, seq: Sequence, hit: PrefixHit, wanted: LoadableBlocks) -> bool:
        """Return whether all of it fits beside what is loaded for it meanwhile."""
        coming = len(wanted.pieces) + self.transfers.num_outstanding
        return self.cache.num_new_blocks(seq, hit, len(seq.token_ids)) + coming <= self.cache.num_available_after_hit(
            seq, hit
        )

    def _admit(self, plan: StepPlan, seq: Sequence, hit: PrefixHit, reserved: int) -> bool:
        """Admit a waiting sequence and plan its first chunk; otherwise return False and change nothing."""
        if hit.state and not self.running and not self._fits(seq, hit, reserved):
            hit = NO_HIT  # alone it fits, but not beside the pages of the state that it would begin from
        want = seq.num_tokens_with_pending - hit.num_tokens
        n = plan.chunk_len_within_budget(seq, hit.num_tokens, want, alone=len(self._sequences) == 1)
        n = self.transfers.max_chunk_len(seq, hit.num_tokens, n)
        extra = hit.num_tokens if self._charges_cached else 0
        if not n or (extra and plan.entries and extra + n > plan.budget) or not self._fits(seq, hit, reserved):
            return False
        extended = self.cache.adopt_hit_and_extend_table(seq, hit, hit.num_tokens + n, last_resort=not self.running)
        assert extended, f"{seq.request_id} fits but cannot be extended"
        self.waiting.remove_admitted(seq)
        is_first = not seq.admitted
        self.accounting.on_admitted(seq, hit, self._now)
        if is_first:
            self.prefixes.on_admitted(seq)
        self.running.add(seq)
        self.tenants.on_admitted(seq)
        seq.status = SequenceStatus.RUNNING
        plan.add_chunk(seq, hit.num_tokens, n, want, writes=self.cache.may_publish(seq), extra=extra)
        return True

    def _fits(self, seq: Sequence, hit: PrefixHit, reserved: int) -> bool:
        """Return whether all of it fits beside the reservations of others and the blocks being loaded."""
        hit = NO_HIT if self._charges_cached else hit
        coming = self.transfers.num_reserved_by_others(seq, may_wait=bool(self.running))
        if coming:  # loads take little time, so this applies even if nothing runs yet
            new = self.cache.num_new_blocks(seq, hit, len(seq.token_ids))
            if new + coming > self.cache.num_available_after_hit(seq, hit):
                return False
        return self.admission.can_admit(seq, hit, self.running, reserved + coming)

    def _candidates(self, seq: Sequence) -> list[Sequence]:
        """Return the preemption candidates for `seq`: the last running sequences after it, all of one priority.

        Those of another tenant only if that holds more than its share of the blocks, or `seq` is non-preemptible.
        """
        candidates: list[Sequence] = []
        others = not is_non_preemptible(seq) and self.tenants.num_tenants > 1
        for index in range(len(self.running) - 1, -1, -1):
            other = self.running[index]
            if other is seq or len(candidates) == MAX_CANDIDATES:
                break
            if (
                others
                and other.request.tenant != seq.request.tenant
                and not self.tenants.exceeds_block_share(other.request.tenant)
            ):
                continue
            if candidates and self._by_priority and other.request.priority != candidates[0].request.priority:
                break
            candidates.append(other)
        return candidates

    def _preempt(self, seq: Sequence) -> Sequence:
        """Preempt a running sequence: release all its blocks and queue it; it is recomputed (often from cache)."""
        seq.num_covered_tokens = max(seq.num_covered_tokens, seq.num_computed_tokens)
        self._requeue(seq)
        seq.num_preemptions += 1  # not before: it is part of the order of the running ones
        self.counters.num_preemptions += 1
        return seq

    def _requeue(self, seq: Sequence) -> None:
        """Release all blocks of a running sequence and queue it."""
        self.running.remove(seq)
        self.tenants.on_preempted(seq)
        self.transfers.on_sequence_left(seq)
        if self.cache.may_read_cache(seq):
            self.cache.hash_blocks(seq, until=seq.num_computed_tokens)
        self.in_flight.release_table(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.add(seq)

    def _chunk(self, seq: Sequence, n: int) -> Chunk:
        request, tokens, start = seq.request, seq.token_ids, seq.num_computed_tokens + seq.num_scheduled_tokens
        end = start + n
        is_unknown = start == len(tokens)
        state, saves = (
            self.cache.assign_chunk_state_blocks(seq, start, end) if self.cache.checkpoints.num_pages else ((), ())
        )
        published = seq.num_published_blocks * self.block_size
        return Chunk(  # in the order of its fields: keywords cost a tenth of a step of 256 decodes
            request.request_id,
            array("i", (UNKNOWN_TOKEN,)) if is_unknown else tokens[start:end],
            start,
            seq.block_ids,
            start if start > published else published,
            1 if end >= len(tokens) and request.sampling.max_tokens else 0,
            request.sampling,
            len(request.prompt),
            tokens,
            request.adapter,
            seq.pending_row if is_unknown else None,
            state,
            saves,
        )

    def _add_drafts(self, speculation: Speculator, plan: StepPlan, planned: list[tuple[Sequence, Chunk]]) -> None:
        """Append drafts to the planned chunks, within the budget and the free blocks that are left.

        No sequence waits or is preempted for a draft.
        """
        drafts = speculation.propose_drafts(plan.entries, plan.budget)
        for index, (seq, chunk) in enumerate(planned if drafts else ()):
            draft = drafts.get(seq.request_id)
            if draft is None:
                continue
            end = chunk.start + len(chunk.token_ids)
            if not self.cache.adopt_hit_and_extend_table(seq, NO_HIT, end + len(draft)):
                draft = draft[: len(seq.block_ids) * self.block_size - end]
            saves = chunk.saves + self.cache.allocate_saves(seq, end, end + len(draft))
            tokens = chunk.token_ids + draft
            planned[index] = seq, chunk._replace(token_ids=tokens, num_logits=1 + len(draft), saves=saves)

    # ------------------------------------------------------------------------------------------------- tenants

    def _shares(self, running: list[Sequence]) -> dict[str, RemainingStepShare]:
        """Return the share of each tenant in this step."""
        decodes, prompts, most = Counter[str](), Counter[str](), self.limits.max_batched_tokens
        for seq in running:
            tenant, is_one = seq.request.tenant, is_decoding(seq)
            decodes[tenant] += is_one
            prompts[tenant] += seq.num_tokens_with_pending - seq.next_start - is_one
        for tenant in self.waiting.tenants:
            prompts[tenant] += self.waiting.queue_of(tenant).num_tokens_to_compute(self.block_size, most)
        demands = {tenant: TenantStepDemand(decodes[tenant], num) for tenant, num in prompts.items()}
        return self.tenants.step_shares(demands, len(self._sequences) - decodes.total()) if demands else {}

    def _reclaim(self) -> set[str]:
        """Preempt sequences of tenants above their share for those below it that find no place or no blocks.

        Return the tenants of those preempted. While a step is in flight none is: planning goes on when it has ended.
        """
        victims = set[str]()
        self.tenants.recount_usage(self.running)
        for tenant in self.waiting.tenants:
            group = (
                None
                if self.tenants.reaches_place_or_block_share(tenant)
                else self.waiting.queue_of(tenant).next_group()
            )
            if group is None:
                continue
            seq = group.members[0]
            hit = self.cache.match_prefix(seq)
            if self.tenants.exceeds_block_share(tenant, self.admission.max_blocks(seq)):
                continue  # it may need more than its share, so it waits
            while True:
                reserved = sum(map(self.admission.blocks_reserved_for_sequence, self.running))
                needs_place = len(self.running) >= self.limits.max_seqs
                if not needs_place and self._fits(seq, hit, reserved):
                    break
                victim = self.tenants.last_sequence_above_share(self.running, needs_place=needs_place)
                if victim is None:
                    break
                if self.in_flight:
                    self._drains = True
                    return victims
                victim.num_covered_tokens = max(victim.num_covered_tokens, victim.num_computed_tokens)
                self._requeue(victim)
                self.counters.num_preemptions += 1
                victims.add(victim.request.tenant)
        return victims

    # ------------------------------------------------------------------------------------------------- results

    def _learn(self, step: StepInFlight, elapsed: float) -> None:
        """Update the compute rate (the rule of transfers.py) and the step durations."""
        planned, lengths = step.entries, step.lengths
        num_tokens = sum(lengths)
        num_decodes = sum([chunk.start >= chunk.num_prompt_tokens for _, chunk in planned])
        self.transfers.rate.learn(num_tokens, num_tokens - num_decodes, elapsed)
        num_single = len(planned)
        if num_tokens > num_single:
            num_single = lengths.count(1)
        self.step_times.learn(num_tokens - num_single, num_single, elapsed)
        if self.speculation is not None:
            self.speculation.learn_decode_cost([chunk for _, chunk in planned], elapsed)

    def _update_row(self, seq: Sequence, chunk: Chunk, num_known: int, row: RowResult) -> RequestStepOutput | None:
        self.accounting.on_chunk_computed(seq, chunk)
        if row.error is not None:
            return self._row_failed(seq, chunk, row, row.error.kind)
        assert bool(row.token_ids) == bool(chunk.num_logits), f"{chunk.num_logits} due, {len(row.token_ids)} came"
        breakdown: PromptTokenBreakdown | None = None
        reason: FinishReason | None = None
        num_drafts = len(chunk.token_ids) - num_known
        if row.token_ids:
            if len(seq.token_ids) == chunk.num_prompt_tokens:
                breakdown = self.accounting.finish_prompt(seq)
            row, reason = self._append(seq, row, num_drafts)
        elif not seq.request.sampling.max_tokens and chunk.start + len(chunk.token_ids) == len(seq.token_ids):
            breakdown, reason = self.accounting.finish_prompt(seq), FinishReason.LENGTH
        num_accepted = self._num_accepted(seq, chunk, row.token_ids) if num_drafts else 0
        seq.num_computed_tokens += num_known + num_accepted
        if seq.recompute is None:
            self.cache.publish_full_blocks(seq)
        elif self.trust.on_finite_rerun_row(seq):
            self.cache.publish_full_blocks(seq)
            self.cache.share_equal_blocks(seq)
        if num_drafts:
            self.cache.trim_table(seq)
        if row.prompt_logprobs:
            fresh = row.prompt_logprobs[max(seq.num_prompt_logprobs - chunk.start, 0) :]
            seq.num_prompt_logprobs += len(fresh)
            row = row._replace(prompt_logprobs=fresh)
        if not row.token_ids and reason is None:
            return self._output(seq, row, None) if row.prompt_logprobs else None
        if reason is not None:
            if seq.num_output_tokens:
                self.admission.record_output_length(seq.num_output_tokens)
            self._finish(seq)
        return self._output(seq, row, reason, breakdown)

    def _append(self, seq: Sequence, row: RowResult, num_drafts: int) -> tuple[RowResult, FinishReason | None]:
        """Append the output tokens of a row up to the one that finishes the sequence.

        Return the row without others, and the reason if it is finished.
        """
        token_ids, num, reason = row.token_ids, 0, None
        while reason is None and num < len(token_ids):
            seq.token_ids.append(token_ids[num])
            num += 1
            reason = self._finish_reason(seq)
        self.counters.generation_tokens += num
        if not num_drafts and num > 1:
            self.counters.forced_tokens += num - 1
        if num < len(token_ids):
            row = row._replace(token_ids=row.token_ids[:num], logprobs=row.logprobs[:num])
        return row, reason

    def _num_accepted(self, seq: Sequence, chunk: Chunk, token_ids: tuple[int, ...]) -> int:
        """Return the number of leading draft tokens that are now tokens of the sequence, and count them."""
        num = chunk.num_accepted(token_ids)
        self.counters.num_drafts += 1
        self.counters.num_draft_tokens += chunk.num_drafts
        self.counters.num_accepted_tokens += num
        self.counters.forced_tokens += len(token_ids) - 1 - num
        assert self.speculation is not None
        self.speculation.record_verified(seq, chunk.num_drafts, num)
        return num

    def _row_failed(self, seq: Sequence, chunk: Chunk, row: RowResult, kind: RowErrorKind) -> RequestStepOutput | None:
        """Finish a sequence whose row failed, or compute it once more if shared blocks or a draft may be the cause."""
        if kind is RowErrorKind.NON_FINITE and chunk.num_logits > 1:
            self._row_with_draft_failed(seq, chunk)
            return None
        if kind is RowErrorKind.NON_FINITE and self.trust.on_nonfinite_row(seq, chunk.start + len(chunk.token_ids)):
            self.accounting.record_full_recompute(seq)
            self._requeue(seq)
            return None
        self.counters.num_row_errors += 1
        self._finish(seq)
        return self._output(seq, row, FinishReason.ERROR)

    def _row_with_draft_failed(self, seq: Sequence, chunk: Chunk) -> None:
        """Compute a sequence again, without drafts: its own next token may be finite."""
        assert self.speculation is not None
        self.speculation.disable_for(seq)
        self.pool.discard_corrupt(seq.block_ids[max(chunk.start // self.block_size, seq.num_published_blocks) :])
        seq.num_covered_tokens = max(seq.num_covered_tokens, seq.num_computed_tokens)
        self._requeue(seq)

    def _requeue_readers(self, block_ids: set[int], writers: set[str]) -> None:
        """Queue the sequences that took over these blocks, whose rows have failed; their own rows are discarded."""
        for seq in [seq for seq in self.running if not block_ids.isdisjoint(seq.block_ids)]:
            if seq.request_id not in writers:
                self.accounting.forget_reuse(seq)
                self._requeue(seq)

    def _written(self, chunk: Chunk) -> "array[int]":
        """Return the blocks that a chunk writes."""
        first = max(chunk.start, chunk.write_from) // self.block_size
        return array("i", chunk.block_ids[first : -(-(chunk.start + len(chunk.token_ids)) // self.block_size)])

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        request, tokens = seq.request, seq.token_ids
        sampling, num_tokens = request.sampling, len(tokens)
        num_outputs = num_tokens - len(request.prompt)
        if tokens[-1] in sampling.stop_token_ids and (
            num_outputs >= sampling.min_tokens or sampling.grammar is not None
        ):
            return FinishReason.STOP  # before min_tokens only if the grammar allows nothing else
        if num_outputs >= sampling.max_tokens or num_tokens >= self.limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _finish(self, seq: Sequence) -> None:
        (self.running if seq.status is SequenceStatus.RUNNING else self.waiting).remove(seq)
        self.tenants.on_finished(seq, self._now)
        self.transfers.on_sequence_left(seq)
        self.in_flight.release_table(seq)
        self.accounting.add_to_perfect_cache(seq)
        if self.speculation is not None:
            self.speculation.on_finished(seq)
        seq.status = SequenceStatus.FINISHED
        del self._sequences[seq.request_id]
        self._finished.append(seq.request_id)

    def _output(
        self, seq: Sequence, row: RowResult, reason: FinishReason | None, breakdown: PromptTokenBreakdown | None = None
    ) -> RequestStepOutput:
        request, error = seq.request, row.error
        return RequestStepOutput(  # in the order of its fields, as in `_chunk`
            request.request_id,
            row.token_ids,
            row.logprobs,
            reason,
            len(request.prompt),
            seq.num_cached_tokens + seq.num_store_tokens + seq.num_followed_tokens,
            None if error is None else error.message,
            row.prompt_logprobs,
            breakdown,
            seq.scheduled_at,
            error is not None and error.kind is RowErrorKind.GRAMMAR,
            0 if breakdown is None else self.accounting.num_evicted_tokens(seq, breakdown),
            evicted_by=seq.evicted_by,
        )

    def _demands(self) -> Iterator[RequestBlockDemand]:
        """Iterate over what must still fit beside pinned blocks."""
        for seq in self._sequences.values():
            yield RequestBlockDemand(
                seq, self.admission.max_blocks(seq), is_non_preemptible(seq) and seq.status is SequenceStatus.RUNNING
            )

    def _check_length(self, request: Request) -> None:
        """Raise RequestTooLargeError for a prompt that could never run, so that no request waits for ever."""
        length, limit = len(request.prompt), self.limits.max_model_len
        assert length > 0, "an empty prompt has nothing to compute; the front end refuses it"
        if length + 1 > limit:
            raise prompt_too_long_error(length, limit, "shorten the prompt, or raise max_model_len")
