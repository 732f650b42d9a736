"""The scheduler: add, abort, schedule, update. The one state machine of engine, simulator and benchmarks.

There is no prefill phase and no decode phase: every sequence only has a count to catch up with. Admission and the
token budget count only what is not cached (vLLM #7883). Sequences are planned from the head of the order and give
way from its tail, so a victim is never already in the batch (law 7).
"""

from dataclasses import dataclass

from headstart.core.batch import Batch, Chunk, Output, Row, StepResult
from headstart.core.blocks import BlockPool
from headstart.core.errors import RequestTooLargeError
from headstart.core.hashing import root_hash
from headstart.core.kv_cache import NO_HIT, Hit, KVCache
from headstart.core.limits import Limits, charge, chunk_len
from headstart.core.policy import POLICIES, OrderedSequences
from headstart.core.request import FinishReason, Request, Sequence, Status


@dataclass(slots=True)
class Counters:
    """Running totals since start, in tokens unless the name says otherwise; see engine.EngineStats."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_row_errors: int = 0


class Scheduler:
    """Plans steps over one pool of KV blocks.

    `cache_aware_accounting` False is the "before" of vLLM #3402, for the benchmark only: cached tokens and blocks are
    charged as if they had to be computed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        *,
        model: bytes = b"",
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        cache_aware_accounting: bool = True,
    ) -> None:
        self.limits = limits
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = KVCache(self.pool, block_size, enabled=enable_prefix_caching)
        self.waiting = OrderedSequences(POLICIES[policy])
        self.running = OrderedSequences(POLICIES[policy])
        self.counters = Counters()
        self._model = model
        self._cache_aware = cache_aware_accounting
        self._sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._planned: list[tuple[Sequence, Chunk]] = []
        self._finished: list[str] = []  # ids whose state the executor may drop

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestTooLargeError for what can never run, ValueError for an id in use."""
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._check_size(request)
        root = root_hash(self._model, adapter=request.adapter, domain=request.domain)
        seq = Sequence(request, request.prompt[:], root, order=self._num_arrivals)
        self._num_arrivals += 1
        self.cache.name_blocks(seq)
        self._sequences[request.request_id] = seq
        self.waiting.add(seq)

    def abort(self, request_id: str) -> bool:
        """Forgets a request and frees its blocks at once; False if there is none."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._finish(seq)
        return True

    def schedule(self) -> Batch:
        """Plans one step: running sequences first, in order; then newcomers while anything is left."""
        assert not self._planned, "the step before this one was not updated"
        plan = _Plan(self.limits, num_decodes=sum(1 for seq in self.running if _want(seq) == 1))
        preempted = self._plan_running(plan)
        if not preempted:
            self._plan_waiting(plan)
        assert plan.entries or not self._sequences, (
            f"nothing planned for {len(self.waiting)} waiting and {len(self.running)} running sequences "
            f"with {self.pool.num_free} free blocks"
        )
        self._planned = [(seq, self._chunk(seq, n)) for seq, n in plan.entries]
        finished, self._finished = self._finished, []
        return Batch(tuple(chunk for _, chunk in self._planned), tuple(finished))

    def update(self, result: StepResult) -> list[Output]:
        """Takes in what a step computed; news of every sequence that has some."""
        planned, self._planned = self._planned, []
        assert len(result.rows) == len(planned), f"{len(planned)} chunks but {len(result.rows)} rows"
        outputs: list[Output] = []
        for (seq, chunk), row in zip(planned, result.rows, strict=True):
            if seq.status is Status.RUNNING:  # else it was aborted while the step was in flight
                output = self._update_row(seq, chunk, row)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _plan_running(self, plan: "_Plan") -> bool:
        """Plans the running sequences; True if one of them had to give way."""
        preempted = False
        alone = len(self._sequences) == 1
        for seq in list(self.running):
            if seq.status is not Status.RUNNING:
                continue  # gave way to a more important one, below
            n = plan.chunk_len(seq, seq.num_computed_tokens, alone=alone)
            while n and not self.cache.extend(seq, NO_HIT, seq.num_computed_tokens + n):
                preempted = True
                if self._preempt_last() is seq:
                    n = 0
            if n:
                plan.add(seq, seq.num_computed_tokens, n)
        return preempted

    def _plan_waiting(self, plan: "_Plan") -> None:
        """Admits newcomers in order; stops at the first that finds no room."""
        alone = len(self._sequences) == 1
        owed = sum(self._blocks_owed(seq) for seq in self.running) if self.waiting else 0
        while self.waiting and len(self.running) < self.limits.max_seqs:
            seq = self.waiting[0]
            hit = self.cache.match(seq)
            n = plan.chunk_len(seq, hit.num_tokens, alone=alone)
            if not n or not self._fits(seq, hit, owed) or not self._affords(plan, hit, n):
                break
            admitted = self.cache.extend(seq, hit, hit.num_tokens + n)
            assert admitted, f"{seq.request_id} fits but cannot be extended"
            self._admit(seq, hit)
            owed += self._blocks_owed(seq)
            plan.add(seq, hit.num_tokens, n, extra=0 if self._cache_aware else hit.num_tokens)

    def _fits(self, seq: Sequence, hit: Hit, owed: int) -> bool:
        """Whether the whole prompt, less what is cached, fits beside what running prompts still need."""
        if not self._cache_aware:
            hit = NO_HIT
        new = self.cache.num_new_blocks(seq, hit, len(seq.token_ids))
        return new <= self.cache.num_available(hit) - owed

    def _affords(self, plan: "_Plan", hit: Hit, n: int) -> bool:
        """Whether the budget pays for it; always, unless cached tokens are charged too (see the class)."""
        return self._cache_aware or not plan.entries or hit.num_tokens + n <= plan.budget

    def _blocks_owed(self, seq: Sequence) -> int:
        """Blocks that a running sequence still needs for the tokens it has."""
        return self.cache.num_new_blocks(seq, NO_HIT, len(seq.token_ids))

    def _admit(self, seq: Sequence, hit: Hit) -> None:
        self.waiting.remove(seq)
        self.running.add(seq)
        seq.status = Status.RUNNING
        if not seq.admitted:
            seq.admitted = True
            seq.num_cached_tokens = hit.num_tokens
            self.counters.prefix_queries += len(seq.token_ids)
            self.counters.prefix_hits += hit.num_tokens

    def _preempt_last(self) -> Sequence:
        """Takes all blocks from the last sequence in order; it waits and will recompute (often it hits)."""
        seq = self.running[len(self.running) - 1]
        self.running.remove(seq)
        self.cache.release(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.waiting.add(seq)
        self.counters.num_preemptions += 1
        return seq

    def _chunk(self, seq: Sequence, n: int) -> Chunk:
        start = seq.num_computed_tokens
        seq.num_scheduled_tokens = n
        return Chunk(
            request_id=seq.request.request_id,
            token_ids=seq.token_ids[start : start + n],
            start=start,
            block_ids=seq.block_ids,
            write_from=max(start, seq.num_published_blocks * self.block_size),
            num_logits=1 if start + n == len(seq.token_ids) else 0,
            sampling=seq.request.sampling,
            num_prompt_tokens=len(seq.request.prompt),
            history=seq.token_ids,
            adapter=seq.request.adapter,
        )

    def _update_row(self, seq: Sequence, chunk: Chunk, row: Row) -> Output | None:
        seq.num_scheduled_tokens = 0
        self.counters.computed_tokens += len(chunk.token_ids)
        if row.error is not None:
            self.counters.num_row_errors += 1
            self._finish(seq, failed=True)
            return self._output(seq, row, FinishReason.ERROR)
        assert len(row.token_ids) == chunk.num_logits, f"{chunk.num_logits} tokens due, {len(row.token_ids)} came"
        seq.num_computed_tokens += len(chunk.token_ids)
        self.cache.publish(seq)
        if row.prompt_logprobs:
            fresh = row.prompt_logprobs[max(seq.num_prompt_logprobs - chunk.start, 0) :]
            seq.num_prompt_logprobs += len(fresh)
            row = row._replace(prompt_logprobs=fresh)
        if not row.token_ids:
            return self._output(seq, row, None) if row.prompt_logprobs else None
        first = seq.num_output_tokens == 0
        seq.token_ids.extend(row.token_ids)
        if first:
            self.counters.prompt_tokens += seq.num_prompt_tokens
            self.counters.cached_tokens += seq.num_cached_tokens
        self.counters.generation_tokens += len(row.token_ids)
        reason = self._finish_reason(seq)
        if reason is not None:
            self._finish(seq)
        return self._output(seq, row, reason)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        sampling = seq.request.sampling
        num_outputs = seq.num_output_tokens
        if num_outputs >= sampling.min_tokens and seq.token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if num_outputs >= sampling.max_tokens or len(seq.token_ids) >= self.limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _finish(self, seq: Sequence, *, failed: bool = False) -> None:
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        self.cache.release(seq, failed=failed)
        seq.status = Status.FINISHED
        del self._sequences[seq.request_id]
        self._finished.append(seq.request_id)

    def _output(self, seq: Sequence, row: Row, reason: FinishReason | None) -> Output:
        return Output(
            seq.request_id,
            row.token_ids,
            row.logprobs,
            reason,
            seq.num_prompt_tokens,
            seq.num_cached_tokens,
            row.error,
            row.prompt_logprobs,
        )

    def _check_size(self, request: Request) -> None:
        """Refuses at once what could never run, so that nothing waits for ever."""
        length, limit = len(request.prompt), self.limits.max_model_len
        assert length > 0, "an empty prompt has nothing to compute; the front end refuses it"
        if length + 1 > limit:
            raise RequestTooLargeError(
                f"the prompt has {length} tokens; with at least one output token that exceeds the limit of {limit} "
                f"(max_model_len); shorten the prompt",
                param="prompt",
            )
        # the KV of the very last token is never needed
        tokens = min(length + request.sampling.max_tokens, limit) - 1
        blocks, usable = -(-tokens // self.block_size), self.pool.num_usable
        if blocks > usable:
            raise RequestTooLargeError(
                f"prompt and output of {tokens + 1} tokens need {blocks} KV blocks but the pool has {usable}; "
                f"lower max_tokens, shorten the prompt, or serve with a larger --kv-cache-memory",
                param="max_tokens",
            )


class _Plan:
    """What this step will compute so far, and what is left of its budget."""

    def __init__(self, limits: Limits, *, num_decodes: int) -> None:
        self.limits = limits
        self.budget = limits.max_batched_tokens
        self.entries: list[tuple[Sequence, int]] = []
        self._num_decodes = num_decodes  # running sequences with one token to go, not planned yet

    def chunk_len(self, seq: Sequence, start: int, *, alone: bool) -> int:
        """Tokens of `seq` from `start` on to compute now; a prefill leaves a token to every decode behind it."""
        want = len(seq.token_ids) - start
        budget = self.budget if want == 1 else self.budget - self._num_decodes
        return chunk_len(want, start, budget, self.limits, alone=alone)

    def add(self, seq: Sequence, start: int, n: int, *, extra: int = 0) -> None:
        decode = len(seq.token_ids) - start == 1
        self.budget -= charge(start, n, self.limits, decode=decode) + extra
        self.entries.append((seq, n))
        if decode and self._num_decodes:
            self._num_decodes -= 1


def _want(seq: Sequence) -> int:
    return len(seq.token_ids) - seq.num_computed_tokens
