"""SimReplica: one simulated replica: a real scheduler and pool, and an executor in virtual time.

SimExecutor: an executor in virtual time. It computes nothing, and a step takes as long as its cost model says.

Sampled tokens are fake: all tokens of a request are one id, made from its prompt and below 0, so that an output equals
no prompt, and equals another output only after the same prompt, as in greedy sampling.
"""

from array import array
from dataclasses import asdict, dataclass, field
from random import Random
from zlib import crc32

from headstart.core.batch import Batch, Chunk, RequestStepOutput, RowResult, StepResult
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.block_store import Data
from headstart.core.errors import RequestTooLargeError
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.token_accounting import TokenCounters
from headstart.core.warm_up import measure_step_times
from headstart.router.endpoint import ReplicaReport
from headstart.sim.profile import ReplicaProfile
from headstart.sim.sim_store import BLOCK_CONTENT, SimStore
from headstart.sim.step_cost import StepCost, StepWork

_NOT_SAMPLED = RowResult()


@dataclass(slots=True, eq=False)
class MachineSlowdown:
    """The speed of one simulated machine: `factor` times the modelled duration, and noise of each step.

    `noise` is the standard deviation of the logarithm of a factor with mean 1: 0.1 is 10 %. 0 draws nothing.
    """

    noise: float = 0.0
    rng: Random = field(default_factory=lambda: Random(0))
    factor: float = 1.0

    def draw_step_factor(self) -> float:
        """Return the factor of the next step."""
        if not self.noise:
            return self.factor
        return self.factor * self.rng.lognormvariate(-self.noise * self.noise / 2, self.noise)


class SimExecutor:
    """An executor over `num_blocks` blocks. `elapsed` of its results is the modelled duration.

    With `block_bytes` a block can be read and written, for an offload tier; its content is always zeros.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cost: StepCost,
        speed: MachineSlowdown | None = None,
        block_bytes: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.cost = cost
        self.speed = speed or MachineSlowdown()
        self.work = StepWork()  # of the last step
        self._rows: dict[str, RowResult] = {}  # by request id

    def execute(self, batch: Batch) -> StepResult:
        for request_id in batch.finished:
            self._rows.pop(request_id, None)
        known = self._rows
        rows = tuple(
            (known.get(chunk.request_id) or self._row(chunk)) if chunk.num_logits else _NOT_SAMPLED
            for chunk in batch.chunks
        )
        self.work = StepWork.of(batch)
        return StepResult(rows, self.cost.seconds(self.work) * self.speed.draw_step_factor())

    def read_block(self, block_id: int) -> Data:
        """Return zeros. Raises ValueError if blocks have no content here."""
        if not self.block_bytes:
            raise ValueError("this executor keeps no KV")
        return bytes(self.block_bytes)

    def write_block(self, block_id: int, data: Data) -> None:
        """Do nothing. Raises ValueError for a wrong length, or if blocks have no content here."""
        if not self.block_bytes or len(data) != self.block_bytes:
            raise ValueError(f"a block of this executor has {self.block_bytes} bytes, got {len(data)}")

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Do nothing: there is no content to clear."""

    def _row(self, chunk: Chunk) -> RowResult:
        prompt = chunk.history[: chunk.num_prompt_tokens].tobytes()
        row = self._rows[chunk.request_id] = RowResult((-1 - (crc32(prompt) >> 1),))
        return row


class SimReplica:
    """One replica. The caller advances time: `begin` a step, wait for its seconds, `end` it.

    `is_up` False: it refuses requests. `is_draining`: it finishes what it has and accepts nothing new.
    """

    def __init__(self, name: str, profile: ReplicaProfile, *, seed: int | str = 0, now: float = 0.0) -> None:
        self.name = name
        self.profile = profile
        self.is_up = True
        self.is_draining = False
        self.speed = MachineSlowdown(profile.noise, Random(f"{seed}/{name}"))
        self.step_began = 0.0
        self.step_ends = 0.0  # when the last step ends or ended; later if it shares its cores
        self.epoch = 0  # number of stops: a step begun before the last one never ends
        self.num_steps = 0
        self.busy_seconds = 0.0  # of steps as modelled, without sharing of cores
        self._before = TokenCounters()  # of schedulers before the last restart
        self._evictions_before = 0
        self._up_since, self._up_seconds = now, 0.0
        self._start()

    def _start(self) -> None:
        profile = self.profile
        self.store = SimStore(profile.offload, profile.block_size) if profile.offload is not None else None
        self.scheduler = Scheduler(profile.scheduler_config(), store=self.store)
        self.executor = SimExecutor(
            profile.num_blocks + 1,
            profile.block_size,
            profile.cost,
            self.speed,
            block_bytes=len(BLOCK_CONTENT) if self.store is not None else 0,
        )
        if profile.step_bound is not None:
            measure_step_times(self.executor, self.scheduler.step_times, max_tokens=self.scheduler.limits.max_model_len)
        self._step: tuple[Batch, StepResult] | None = None

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting

    def submit(self, request_id: str, prompt: "array[int]", output_tokens: int, now: float) -> None:
        """Queue a request that generates exactly `output_tokens`. Raises RequestTooLargeError."""
        longest = self.scheduler.limits.max_model_len
        if len(prompt) + output_tokens > longest:  # the scheduler would end the answer there
            raise RequestTooLargeError(
                f"prompt and output of {len(prompt) + output_tokens} tokens exceed the context of {longest}",
                param="max_tokens",
            )
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        self.scheduler.add_request(Request(request_id, prompt, sampling, now))

    def begin_step(self, now: float) -> float | None:
        """Begin the next step and return its seconds; None if one is running or nothing is to be done.

        While all work waits for loads from the offload tier, a step is that wait.
        """
        if self._step is not None or not self.scheduler.has_work or not self.is_up:
            return None
        if self.store is not None:
            self.store.now = now
            self.scheduler.transfers.publish_loaded(self.executor, now)
        self.step_began = now
        batch = self.scheduler.schedule(now)
        if not batch.chunks:
            assert self.store is not None and self.store.next_load_ready_at > now
            self._step = (batch, StepResult((), self.store.next_load_ready_at - now))
            self.step_ends = self.store.next_load_ready_at
            return self._step[1].elapsed
        result = self.executor.execute(batch)
        self._step = (batch, result)
        self.num_steps += 1
        self.busy_seconds += result.elapsed
        self.step_ends = now + result.elapsed
        return result.elapsed

    def end_step(self, now: float | None = None) -> list[RequestStepOutput]:
        """End the step; return its outputs. `now`: the time, if the step took another time than modelled."""
        assert self._step is not None, f"{self.name}: no step has begun"
        (batch, result), self._step = self._step, None
        if now is not None:
            result = result._replace(elapsed=now - self.step_began)
        return self.scheduler.update(result) if batch.chunks else []

    def flush(self) -> None:
        """Clear the prefix cache; requests in flight continue."""
        self.pool.clear_published()

    def kill(self, now: float) -> None:
        """Stop at once: requests, queue and cache are lost, and it refuses requests until `restart`."""
        self._up_seconds = self.up_seconds(now)
        self.is_up = False
        self.epoch += 1
        self._before, self._evictions_before = self.counters(), self.num_capacity_evictions
        self._start()

    def restart(self, now: float) -> None:
        """Serve again, with an empty cache. Does nothing if it is up."""
        if not self.is_up:
            self._up_since = now
        self.is_up, self.is_draining = True, False

    def up_seconds(self, now: float) -> float:
        """Return for how long it has been up."""
        return self._up_seconds + (now - self._up_since if self.is_up else 0.0)

    def counters(self) -> TokenCounters:
        """Return the token counters since the start of the simulation; a copy."""
        now, before = asdict(self.scheduler.counters), asdict(self._before)
        return TokenCounters(**{name: count + before[name] for name, count in now.items()})

    @property
    def num_capacity_evictions(self) -> int:
        """Published blocks evicted for lack of space, since the start of the simulation."""
        return self._evictions_before + self.pool.num_capacity_evictions

    def report(self, now: float) -> ReplicaReport:
        """Return the state that a probe reads: queue lengths and the share of blocks in use."""
        pool = self.pool
        used = pool.usable_capacity - pool.num_free - pool.num_pinned_idle
        return ReplicaReport(
            at=now, waiting=self.num_waiting, running=self.num_running, kv_usage=used / pool.usable_capacity
        )
