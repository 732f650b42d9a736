"""SimReplica: one simulated replica: a real scheduler and pool, and an executor in virtual time."""

from array import array
from dataclasses import replace
from random import Random

from headstart.core.batch import Batch, Output, StepResult
from headstart.core.cache.block_pool import BlockPool
from headstart.core.errors import RequestTooLargeError
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.token_accounting import Counters
from headstart.core.warm_up import measure_steps
from headstart.router.endpoint import Reported
from headstart.sim.profile import Profile
from headstart.sim.sim_executor import SimExecutor, Speed
from headstart.sim.sim_store import BLOCK_CONTENT, SimStore


class SimReplica:
    """One replica. The caller advances time: `begin` a step, wait for its seconds, `end` it.

    `is_up` False: it refuses requests. `is_draining`: it finishes what it has and accepts nothing new.
    """

    def __init__(self, name: str, profile: Profile, *, seed: int | str = 0, now: float = 0.0) -> None:
        self.name = name
        self.profile = profile
        self.is_up = True
        self.is_draining = False
        self.speed = Speed(profile.noise, Random(f"{seed}/{name}"))
        self.step_began = 0.0
        self.step_ends = 0.0  # when the last step ends or ended; later if it shares its cores
        self.epoch = 0  # number of stops: a step begun before the last one never ends
        self.num_steps = 0
        self.busy_seconds = 0.0  # of steps as modelled, without sharing of cores
        self._before = Counters()  # of schedulers before the last restart
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
            measure_steps(self.executor, self.scheduler.step_times, max_tokens=self.scheduler.limits.max_model_len)
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
        self.scheduler.add(Request(request_id, prompt, sampling, now))

    def begin(self, now: float) -> float | None:
        """Begin the next step and return its seconds; None if one is running or nothing is to be done.

        While all work waits for loads from the offload tier, a step is that wait.
        """
        if self._step is not None or not self.scheduler.has_work or not self.is_up:
            return None
        if self.store is not None:
            self.store.now = now
            self.scheduler.transfers.take_in(self.executor, now)
        self.step_began = now
        batch = self.scheduler.schedule(now)
        if not batch.chunks:
            assert self.store is not None and self.store.next_ready > now
            self._step = (batch, StepResult((), self.store.next_ready - now))
            self.step_ends = self.store.next_ready
            return self._step[1].elapsed
        result = self.executor.execute(batch)
        self._step = (batch, result)
        self.num_steps += 1
        self.busy_seconds += result.elapsed
        self.step_ends = now + result.elapsed
        return result.elapsed

    def end(self, now: float | None = None) -> list[Output]:
        """End the step; return its outputs. `now`: the time, if the step took another time than modelled."""
        assert self._step is not None, f"{self.name}: no step has begun"
        (batch, result), self._step = self._step, None
        if now is not None:
            result = result._replace(elapsed=now - self.step_began)
        return self.scheduler.update(result) if batch.chunks else []

    def flush(self) -> None:
        """Clear the prefix cache; requests in flight continue."""
        self.pool.clear()

    def stop(self, now: float) -> None:
        """Stop at once: requests, queue and cache are lost, and it refuses requests until `restart`."""
        self._up_seconds = self.up_seconds(now)
        self.is_up = False
        self.epoch += 1
        self._before, self._evictions_before = self.counters(), self.num_evictions
        self._start()

    def restart(self, now: float) -> None:
        """Serve again, with an empty cache. Does nothing if it is up."""
        if not self.is_up:
            self._up_since = now
        self.is_up, self.is_draining = True, False

    def up_seconds(self, now: float) -> float:
        """Return for how long it has been up."""
        return self._up_seconds + (now - self._up_since if self.is_up else 0.0)

    def counters(self) -> Counters:
        """Return the token counters since the start of the simulation; a copy."""
        now = self.scheduler.counters
        return replace(now, **{name: getattr(now, name) + getattr(self._before, name) for name in Counters.__slots__})

    @property
    def num_evictions(self) -> int:
        """Published blocks evicted for lack of space, since the start of the simulation."""
        return self._evictions_before + self.pool.num_evictions

    def report(self, now: float) -> Reported:
        """Return the state that a probe reads: queue lengths and the share of blocks in use."""
        pool = self.pool
        used = pool.num_usable - pool.num_free - pool.num_pinned_idle
        return Reported(at=now, waiting=self.num_waiting, running=self.num_running, kv_usage=used / pool.num_usable)
