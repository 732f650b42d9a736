"""The engine: schedule -> execute -> update, one step at a time. No threads, no I/O, no clock of its own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.batch import Batch, Output
from headstart.core.cache.block_store import BlockSource, BlockStore, Data, StoreStats
from headstart.core.cache.events import EventLog, EventSink
from headstart.core.cache.pinned_prefix import PrefixInfo, PrefixState
from headstart.core.errors import InvalidRequestError
from headstart.core.executor import Executor
from headstart.core.request import NO_DEFAULTS, Request, SamplingDefaults
from headstart.core.sched.scheduler import Scheduler
from headstart.explain.recent_requests import RecentRequests

LONG_STEP_SECONDS = 1.0  # a step that is expected to take longer is announced before it begins
LOAD_WAIT_SECONDS = 0.002  # for blocks on their way, while there is nothing else to do; then others may be heard


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end must know of an engine that it does not run itself; crosses the process border as msgpack."""

    model: str  # folder that was loaded: the front end reads the tokenizer from it
    served_name: str
    vocab_size: int  # rows of the logits: token ids must lie in [0, vocab_size)
    max_model_len: int  # tokens
    block_size: int  # tokens
    num_blocks: int  # usable KV blocks (block 0 not counted)
    kv_bytes: int
    dtype: str
    device: str
    threads: int
    attention_backend: str
    eos_token_ids: tuple[int, ...]
    scheduling_policy: str = "lpm"  # decides whether a request may have a priority
    quantization: str = "none"
    sampling_defaults: SamplingDefaults = NO_DEFAULTS


class EngineStats(NamedTuple):
    """A snapshot; counters run since start. Units: tokens, blocks, seconds."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable
    num_free_blocks: int = 0  # to be had: scratch + idle
    num_scratch_blocks: int = 0  # free, nothing in them that anybody could find
    num_idle_blocks: int = 0  # free, to be found until they are evicted
    num_pinned_idle_blocks: int = 0  # kept for pinned prefixes, not in use now
    num_pinned_blocks: int = 0  # names that are pinned, in use or not, computed or not
    num_published_blocks: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0  # spent in the executor, in all
    last_batch_tokens: int = 0
    prompt_tokens: int = 0  # of requests whose first token is out
    cached_tokens: int = 0  # of those, taken over: pinned + shared + store + followed
    pinned_tokens: int = 0
    shared_tokens: int = 0
    store_tokens: int = 0
    followed_tokens: int = 0  # computed by others while they waited for them or ran beside them
    prompt_computed_tokens: int = 0  # the rest of prompt_tokens
    computed_tokens: int = 0  # tokens computed in chunks, replays and decodes included
    prefill_tokens: int = 0  # of those, all but decodes
    replayed_tokens: int = 0  # of those, what had been computed before and was lost to a preemption
    ideal_tokens: int = 0  # what a perfect, infinite, shared cache would have computed of all prompts that came
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up at first admission
    prefix_hits: int = 0  # tokens found at first admission
    num_preemptions: int = 0
    num_promise_skips: int = 0  # times that work was left to another sequence that computes the same
    num_adoptions: int = 0  # times that a running sequence took over blocks
    num_evictions: int = 0  # published blocks whose content was given up, for any of these causes:
    num_evictions_capacity: int = 0  # their room was needed
    num_evictions_failed: int = 0  # a request whose hidden states were not finite wrote them, or shared them: trust.py
    num_evictions_reset: int = 0  # the cache was reset
    num_row_errors: int = 0
    num_recomputes: int = 0  # requests that were computed again because blocks of others might not be finite
    num_loading_blocks: int = 0  # on their way from the store
    compute_tokens_per_s: float = 0.0  # of steps that mostly prefill; 0: not measured yet
    store: StoreStats | None = None


class Engine:
    """Owns a scheduler and an executor; every call comes from one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        event_sink: EventSink | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """`event_sink` is told what happens to the prefix index, once per step that changes it; None costs nothing.

        `store` is the one the scheduler was built with; the engine starts it, and ends it with `close`.
        """
        assert executor.num_blocks == scheduler.pool.num_blocks and executor.block_size == scheduler.block_size
        self.scheduler = scheduler
        self.executor = executor
        self.recent = RecentRequests()
        self.on_long_step: Callable[[float], None] | None = None  # is told before a step how many seconds it may take
        self._num_steps = 0
        self._step_seconds = 0.0
        self._last_batch_tokens = 0
        self._event_sink = event_sink
        self._store = store
        self._event_log = EventLog(scheduler.block_size)
        if event_sink is not None:
            scheduler.pool.listeners.append(self._event_log)
            scheduler.cache.event_log = self._event_log
        if store is not None:
            store.start(_source(scheduler, executor))

    def add_request(self, request: Request) -> None:
        """Queues it. Raises RequestTooLargeError for what can never fit and ValueError for a request id in use."""
        self.scheduler.add(request)
        self.recent.queued(request.request_id)

    def abort(self, request_id: str) -> bool:
        """Forgets a request and frees its blocks at once; False if there is none. No Output follows."""
        self.recent.aborted(request_id)
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        return self.scheduler.has_work

    def step(self, now: float = 0.0) -> list[Output]:
        """One schedule-execute-update; news of the requests it concerned. Without work: nothing happens.

        If all there is to do waits for the store, so does this, for a moment. `now` in seconds, on any clock that does
        not go back: for retention times, statistics, and how long to wait for the store.
        """
        if not self.scheduler.has_work:
            return []
        scheduler = self.scheduler
        scheduler.transfers.take_in(self.executor, now)
        batch = scheduler.schedule(now)
        if not batch.chunks:
            scheduler.transfers.wait(LOAD_WAIT_SECONDS)
            self._publish_events()
            return []
        self.recent.planned(batch.chunks, scheduler.running, scheduler.pool, scheduler.block_size)
        dirty = scheduler.pool.take_blocks_to_zero()
        if dirty:
            self.executor.zero_blocks(dirty)
        self._last_batch_tokens = sum(len(chunk.token_ids) for chunk in batch.chunks)
        if self.on_long_step is not None:
            self._announce(batch)
        result = self.executor.execute(batch)
        self._num_steps += 1
        self._step_seconds += result.elapsed
        outputs = scheduler.update(result)
        self._publish_events()
        self.recent.answered(outputs)
        return self._tend_prefixes(outputs)

    def reset_prefix_cache(self, *, pinned: bool = False, external: bool = False) -> bool:
        """Forgets every published block; False (and nothing changes) while any sequence holds blocks.

        Pinned prefixes stay, unless `pinned`: then they are forgotten too, and computed anew. `external`: the store
        forgets everything as well, for all who use it.
        """
        if self.scheduler.running:
            return False
        if external and self._store is not None:
            self._store.clear()
        self.scheduler.pool.clear(pinned=pinned)
        self._publish_events()
        self._keep_prefixes()  # the store may have lost them, and they need not be computed again
        self._warm_prefixes()
        return True

    def add_prefix(self, name: str, token_ids: Iterable[int], *, tenant: str = "", domain: bytes = b"") -> PrefixInfo:
        """Pins the whole blocks of `token_ids` and begins to compute them: it is warm after some steps.

        Raises InvalidRequestError, and then there is no such prefix.
        """
        self.scheduler.prefixes.add(name, token_ids, tenant=tenant, domain=domain)
        self._keep_prefixes()
        self._warm_prefixes()
        info = self.scheduler.prefixes.get(name)
        assert info is not None
        if info.state is PrefixState.FAILED:
            self.remove_prefix(name)
            raise InvalidRequestError(f"prefix {name!r} cannot be computed: {info.error}", code="prefix_too_large")
        return info

    def remove_prefix(self, name: str) -> bool:
        """Unpins a prefix, whose blocks become ordinary cache; False if there is none. Raises InvalidRequestError."""
        removed = self.scheduler.prefixes.remove(name)
        self._keep_prefixes()
        self._warm_prefixes()
        if removed:
            self.recent.forget_prefix(name)
        return removed

    def list_prefixes(self) -> list[PrefixInfo]:
        """Every pinned prefix as it stands, oldest first."""
        return self.scheduler.prefixes.list()

    def close(self) -> None:
        """Ends the store, which writes what is pending if that is soon done. Twice does no harm."""
        if self._store is not None:
            self._store.close()

    def _announce(self, batch: Batch) -> None:
        """Tells of a step that is expected to be long, before it begins."""
        num_single = sum(1 for chunk in batch.chunks if len(chunk.token_ids) == 1)
        expected = self.scheduler.step_times.expected(self._last_batch_tokens - num_single, num_single)
        if expected > LONG_STEP_SECONDS:
            assert self.on_long_step is not None
            self.on_long_step(expected)

    def _publish_events(self) -> None:
        events = self._event_log.drain()
        if events and self._event_sink is not None:
            self._event_sink(events)

    def _tend_prefixes(self, outputs: list[Output]) -> list[Output]:
        """Keeps the news of requests that compute prefixes to itself, and runs those that are due."""
        prefixes = self.scheduler.prefixes
        if not prefixes.is_active:
            return outputs
        others = prefixes.sift(outputs)
        if len(others) < len(outputs):
            self._keep_prefixes()
        self._warm_prefixes()
        return others

    def _keep_prefixes(self) -> None:
        """Tells the store what is pinned, and offers it again what is there of it."""
        self.scheduler.transfers.keep(self.scheduler.prefixes.names)

    def _warm_prefixes(self) -> None:
        prefixes = self.scheduler.prefixes
        aborted, wanted = prefixes.take_requests()
        for request_id in aborted:
            self.abort(request_id)
        for request in wanted:
            try:
                self.add_request(request)
            except InvalidRequestError as error:  # longer than the model's context
                prefixes.fail(request.request_id, str(error))

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges. Changes nothing."""
        scheduler, pool, counters = self.scheduler, self.scheduler.pool, self.scheduler.counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_scratch_blocks=pool.num_scratch,
            num_idle_blocks=pool.num_free - pool.num_scratch,
            num_pinned_idle_blocks=pool.num_pinned_idle,
            num_pinned_blocks=pool.num_pinned_names,
            num_published_blocks=pool.num_published,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            last_batch_tokens=self._last_batch_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            pinned_tokens=counters.pinned_tokens,
            shared_tokens=counters.shared_tokens,
            store_tokens=counters.store_tokens,
            followed_tokens=counters.followed_tokens,
            prompt_computed_tokens=counters.prompt_computed_tokens,
            computed_tokens=counters.computed_tokens,
            prefill_tokens=counters.prefill_tokens,
            replayed_tokens=counters.replayed_tokens,
            ideal_tokens=counters.ideal_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            num_preemptions=counters.num_preemptions,
            num_promise_skips=counters.num_promise_skips,
            num_adoptions=counters.num_adoptions,
            num_evictions=sum(pool.evictions.values()),
            num_evictions_capacity=pool.evictions["capacity"],
            num_evictions_failed=pool.evictions["failed"],
            num_evictions_reset=pool.evictions["reset"],
            num_row_errors=counters.num_row_errors,
            num_recomputes=counters.num_recomputes,
            num_loading_blocks=scheduler.transfers.num_outstanding,
            compute_tokens_per_s=scheduler.transfers.rate.tokens_per_second,
            store=None if self._store is None else self._store.stats(),
        )


def _source(scheduler: Scheduler, executor: Executor) -> BlockSource:
    """Reads blocks for the store, from its thread. Knows pool and executor only, so that an engine can be dropped."""
    pool = scheduler.pool

    def read(block: int, version: int) -> Data | None:
        if pool.version(block) != version:
            return None
        data = executor.read_block(block)
        return data if pool.version(block) == version else None  # else it was written while it was read

    return read
