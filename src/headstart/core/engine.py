"""The engine: schedule -> execute -> update, one step at a time. No threads, no I/O, no clock of its own.

With an AsyncExecutor the next step is planned and submitted before the result of this one is collected.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from headstart.core.batch import Batch, Chunk, RequestStepOutput, StepResult
from headstart.core.cache.block_store import BlockSource, BlockStore, Data
from headstart.core.cache.events import BlockEventLog, EventSink
from headstart.core.cache.pinned_prefix import PrefixInfo, PrefixState
from headstart.core.engine_info import EngineStats, PoolStats
from headstart.core.errors import InvalidRequestError
from headstart.core.executor import Executor, is_async
from headstart.core.grammars import CompilingRequests, GrammarCompiler
from headstart.core.recent_requests import RecentRequests
from headstart.core.request import FinishReason, Request
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.step_time import TracedRequestPrefills

LONG_STEP_SECONDS = 1.0  # a step expected to take longer is announced before it begins
LOAD_WAIT_SECONDS = 0.002  # wait for blocks being loaded when there is nothing else to do; then messages are read


class _Begun(NamedTuple):
    """A step in flight: its handle, its tokens, when it was planned, and its chunks if any request is traced."""

    handle: Any
    num_tokens: int
    planned_at: float
    chunks: tuple[Chunk, ...]


class Engine:
    """A scheduler and an executor; every call comes from one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        event_sink: EventSink | None = None,
        store: BlockStore | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Connect scheduler and executor. `event_sink` gets the KV events of each step, if any; None costs nothing.

        `store` is the one the scheduler was built with; the engine starts it, and stops it in `close`. `grammars`
        compiles the grammars of requests; without it, requests with a grammar are refused.
        """
        assert executor.num_blocks == scheduler.pool.num_blocks and executor.block_size == scheduler.block_size
        self.scheduler = scheduler
        self.executor = executor
        self.recent = RecentRequests()
        self.on_long_step: Callable[[float], None] | None = None  # called before a long step with its duration, s
        self._begun: deque[_Begun] = deque()  # steps in flight, oldest first
        self._prefills = TracedRequestPrefills()
        self._num_steps = 0
        self._step_seconds = 0.0
        self._last_batch_tokens = 0
        self._event_sink = event_sink
        self._store = store
        self._compiling = CompilingRequests(grammars)
        self._event_log = BlockEventLog(scheduler.block_size)
        if event_sink is not None:
            scheduler.pool.listeners.append(self._event_log)
            scheduler.cache.event_log = self._event_log
        if store is not None:
            store.start_writing_from(_source(scheduler, executor))

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLargeError if it can never fit and ValueError for a request id in use.

        A request with a grammar is queued as soon as the grammar is compiled.
        """
        if request.request_id in self._compiling:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.sampling.grammar is not None:
            self.scheduler.check_request(request)
            self._compiling.begin_compiling(request)
            return
        self._add(request)

    def _add(self, request: Request) -> None:
        self.scheduler.add_request(request)
        self.recent.record_queued(request.request_id)
        self._prefills.add_request_if_traced(request)

    def compile_grammar(self, grammar: str) -> None:
        """Compile a grammar and keep it for later requests; blocks. Raises InvalidRequestError."""
        self._compiling.compile_now(grammar)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once; return False if there is none. No Output follows."""
        if self._compiling.remove(request_id):
            return True
        self.recent.record_aborted(request_id)
        self._prefills.remove(request_id)
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        return self.scheduler.has_work or bool(self._begun) or bool(self._compiling)

    def step(self, now: float = 0.0) -> list[RequestStepOutput]:
        """Run one schedule-execute-update; return the outputs of its requests. Without work: nothing happens.

        If all work waits for the store, wait a moment for it. `now` in seconds, on any clock that does not go back: for
        retention times, statistics and load deadlines.
        """
        refused = self._add_compiled() if self._compiling else []
        if not self.scheduler.has_work and not self._begun:
            if self._compiling and not refused:
                self._compiling.wait_briefly_for_any()
            return refused
        return refused + self._step(now)

    def _step(self, now: float) -> list[RequestStepOutput]:
        """Begin the next step, and the one behind it if it can be planned ahead; end the oldest."""
        self.scheduler.transfers.publish_loaded(self.executor, now)
        max_begun = 2 if is_async(self.executor) else 1
        while len(self._begun) < max_begun and self._begin(now):
            pass
        if self._begun:
            return self._end()
        self.scheduler.transfers.wait_for_any_load(LOAD_WAIT_SECONDS)
        self._publish_events()
        return []

    def _begin(self, now: float) -> bool:
        """Plan a step and submit it, or execute it; return False if there is nothing to compute now."""
        scheduler, executor = self.scheduler, self.executor
        batch = scheduler.schedule(now)
        if not batch.chunks:
            return False
        self.recent.record_planned(batch.chunks, scheduler.running, scheduler.pool, scheduler.block_size)
        dirty = scheduler.pool.take_unzeroed_blocks()
        if dirty:
            executor.zero_blocks(dirty)
        num_tokens = sum(len(chunk.token_ids) for chunk in batch.chunks)
        if self.on_long_step is not None:
            self._announce(batch, num_tokens)
        handle = executor.submit(batch) if is_async(executor) else executor.execute(batch)
        self._begun.append(_Begun(handle, num_tokens, now, batch.chunks if self._prefills else ()))
        return True

    def _end(self) -> list[RequestStepOutput]:
        """Collect the oldest step and return the outputs of its requests."""
        handle, self._last_batch_tokens, now, chunks = self._begun.popleft()
        result = self.executor.collect(handle) if is_async(self.executor) else handle
        assert isinstance(result, StepResult)
        self._num_steps += 1
        self._step_seconds += result.elapsed
        outputs = self.scheduler.update(result)
        if self._prefills:
            outputs = self._prefills.record_and_attach_timings(chunks, now, result.elapsed, outputs)
        self._publish_events()
        self.recent.record_prompt_breakdowns(outputs, num_later=len(self._begun))
        return self._tend_prefixes(outputs)

    def reset_prefix_cache(self, *, pinned: bool = False, external: bool = False) -> bool:
        """Remove all published blocks from the index; return False, and change nothing, while sequences hold blocks.

        Pinned prefixes stay, unless `pinned`: then they are removed too, and computed again. `external`: the store is
        cleared as well, for all processes that use it.
        """
        if self.scheduler.running:
            return False
        while self._begun:  # rows of aborted requests only
            self._end()
        if external and self._store is not None:
            self._store.clear()
        self.scheduler.pool.clear_published(pinned=pinned)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.clear()
        self._publish_events()
        self._keep_prefixes()  # the store may have lost them, and they need not be computed again
        self._warm_prefixes()
        return True

    def add_prefix(self, name: str, token_ids: Iterable[int], *, tenant: str = "", domain: bytes = b"") -> PrefixInfo:
        """Pin the whole blocks of `token_ids` and begin to compute them: the prefix is warm after some steps.

        Raises InvalidRequestError, and then there is no such prefix.
        """
        self.scheduler.prefixes.add(name, token_ids, tenant=tenant, domain=domain)
        self._keep_prefixes()
        self._warm_prefixes()
        info = self.scheduler.prefixes.get_prefix(name)
        assert info is not None
        if info.state is PrefixState.FAILED:
            self.remove_prefix(name)
            raise InvalidRequestError(f"prefix {name!r} cannot be computed: {info.error}", code="prefix_too_large")
        return info

    def remove_prefix(self, name: str) -> bool:
        """Unpin a prefix; its blocks become ordinary cache. Return False if unknown. Raises InvalidRequestError."""
        removed = self.scheduler.prefixes.remove(name)
        self._keep_prefixes()
        self._warm_prefixes()
        if removed:
            self.recent.forget_prefix(name)
        return removed

    def list_prefixes(self) -> list[PrefixInfo]:
        """Return a snapshot of every pinned prefix, oldest first."""
        return self.scheduler.prefixes.list_prefixes()

    def close(self) -> None:
        """Stop the store, which writes pending blocks within some seconds. Idempotent."""
        if self._store is not None:
            self._store.close()

    def _add_compiled(self) -> list[RequestStepOutput]:
        """Queue the requests whose grammars are compiled; return the outputs of those that cannot run."""
        refused: list[RequestStepOutput] = []
        for request, error in self._compiling.take_compiled():
            try:
                if error is not None:
                    raise InvalidRequestError(error)
                self._add(request)
            except InvalidRequestError as reason:
                refused.append(
                    RequestStepOutput(
                        request.request_id, finish_reason=FinishReason.ERROR, error=str(reason), is_invalid=True
                    )
                )
        return refused

    def _announce(self, batch: Batch, num_tokens: int) -> None:
        """Announce a step that is expected to be long, before it begins."""
        num_single = sum(1 for chunk in batch.chunks if len(chunk.token_ids) == 1)
        expected = self.scheduler.step_times.expected_seconds(num_tokens - num_single, num_single)
        if expected > LONG_STEP_SECONDS:
            assert self.on_long_step is not None
            self.on_long_step(expected)

    def _publish_events(self) -> None:
        events = self._event_log.drain()
        if events and self._event_sink is not None:
            self._event_sink(events)

    def _tend_prefixes(self, outputs: list[RequestStepOutput]) -> list[RequestStepOutput]:
        """Remove the outputs of prefix requests, and run prefix requests that are due."""
        prefixes = self.scheduler.prefixes
        if not prefixes.has_pending_requests:
            return outputs
        others = prefixes.consume_warming_outputs(outputs)
        if len(others) < len(outputs):
            self._keep_prefixes()
        self._warm_prefixes()
        return others

    def _keep_prefixes(self) -> None:
        """Make the store keep the pinned blocks, and offer it those that are published."""
        self.scheduler.transfers.set_pinned_blocks(self.scheduler.prefixes.block_hashes)

    def _warm_prefixes(self) -> None:
        prefixes = self.scheduler.prefixes
        aborted, wanted = prefixes.take_aborts_and_requests()
        for request_id in aborted:
            self.abort(request_id)
        for request in wanted:
            try:
                self.add_request(request)
            except InvalidRequestError as error:  # longer than the model's context
                prefixes.mark_failed(request.request_id, str(error))

    def stats(self) -> EngineStats:
        """Return a snapshot of counters and gauges. Changes nothing."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            counters=replace(scheduler.counters),
            pool=PoolStats(
                num_blocks=pool.usable_capacity,
                num_free=pool.num_free,
                num_scratch=pool.num_scratch,
                num_pinned_idle=pool.num_pinned_idle,
                num_pinned=pool.num_pinned_hashes,
                num_published=pool.num_published,
                num_loading=scheduler.transfers.num_outstanding,
                evictions_capacity=pool.evictions["capacity"],
                evictions_failed=pool.evictions["failed"],
                evictions_reset=pool.evictions["reset"],
            ),
            store=None if self._store is None else self._store.stats(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            last_batch_tokens=self._last_batch_tokens,
            compute_tokens_per_s=scheduler.transfers.rate.tokens_per_second,
        )


def _source(scheduler: Scheduler, executor: Executor) -> BlockSource:
    """Return the function with which the store's thread reads blocks. It holds no reference to the engine."""
    pool = scheduler.pool

    def read(block: int, version: int) -> Data | None:
        if pool.block_version(block) != version:
            return None
        data = executor.read_block(block)
        return data if pool.block_version(block) == version else None  # else it was overwritten while it was read

    return read
