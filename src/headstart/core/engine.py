"""The engine: schedule -> execute -> update, one step at a time. No threads, no I/O, no clock of its own."""

from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.batch import Output
from headstart.core.executor import Executor
from headstart.core.request import Request
from headstart.core.scheduler import Scheduler


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


class EngineStats(NamedTuple):
    """A snapshot; counters run since start. Units: tokens, blocks, seconds."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable
    num_free_blocks: int = 0  # reference count 0, published or not
    num_published_blocks: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0  # spent in the executor, in all
    last_batch_tokens: int = 0
    prompt_tokens: int = 0  # of requests whose first token is out
    cached_tokens: int = 0  # of those, taken over
    computed_tokens: int = 0  # tokens computed in chunks, replays and decodes included
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up at first admission
    prefix_hits: int = 0  # tokens found at first admission
    num_preemptions: int = 0
    num_evictions: int = 0  # published blocks whose content was given up
    num_row_errors: int = 0


class Engine:
    """Owns a scheduler and an executor; every call comes from one thread."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        assert executor.num_blocks == scheduler.pool.num_blocks and executor.block_size == scheduler.block_size
        self.scheduler = scheduler
        self.executor = executor
        self._num_steps = 0
        self._step_seconds = 0.0
        self._last_batch_tokens = 0

    def add_request(self, request: Request) -> None:
        """Queues it. Raises RequestTooLargeError for what can never fit and ValueError for a request id in use."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Forgets a request and frees its blocks at once; False if there is none. No Output follows."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """One schedule-execute-update; news of the requests it concerned. Without work: nothing happens."""
        if not self.scheduler.has_work:
            return []
        batch = self.scheduler.schedule()
        dirty = self.scheduler.pool.take_blocks_to_zero()
        if dirty:
            self.executor.zero_blocks(dirty)
        result = self.executor.execute(batch)
        self._num_steps += 1
        self._step_seconds += result.elapsed
        self._last_batch_tokens = sum(len(chunk.token_ids) for chunk in batch.chunks)
        return self.scheduler.update(result)

    def reset_prefix_cache(self) -> bool:
        """Forgets every published block; False (and nothing changes) while any sequence holds blocks."""
        pool = self.scheduler.pool
        if pool.num_free < pool.num_usable:
            return False
        pool.clear()
        return True

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges. Changes nothing."""
        scheduler, pool, counters = self.scheduler, self.scheduler.pool, self.scheduler.counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_published_blocks=pool.num_published,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            last_batch_tokens=self._last_batch_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            num_preemptions=counters.num_preemptions,
            num_evictions=pool.num_evictions,
            num_row_errors=counters.num_row_errors,
        )
