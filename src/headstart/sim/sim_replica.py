"""SimReplica: one simulated replica: a real scheduler and pool, and an executor in virtual time."""

from array import array
from dataclasses import replace
from random import Random

from headstart.core.batch import Output
from headstart.core.cache.block_pool import BlockPool
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.token_accounting import Counters
from headstart.router.endpoint import Reported
from headstart.sim.profile import Profile
from headstart.sim.sim_executor import SimExecutor, Speed


class SimReplica:
    """One replica. The caller advances time: `begin` a step, wait for its seconds, `end` it.

    `is_up` False: it refuses requests. `is_draining`: it finishes what it has and is told nothing new.
    """

    def __init__(self, name: str, profile: Profile, *, seed: int | str = 0) -> None:
        self.name = name
        self.profile = profile
        self.is_up = True
        self.is_draining = False
        self.speed = Speed(profile.noise, Random(f"{seed}/{name}"))
        self.epoch = 0  # number of restarts: a step begun before the last one never ends
        self.num_steps = 0
        self.busy_seconds = 0.0
        self._lost = Counters()  # of schedulers before the last restart
        self._lost_evictions = 0
        self._start()

    def _start(self) -> None:
        profile = self.profile
        self.scheduler = Scheduler(profile.scheduler_config())
        self.executor = SimExecutor(profile.num_blocks + 1, profile.block_size, profile.cost, self.speed)
        self._result = None

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._result is not None

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def submit(self, request_id: str, prompt: "array[int]", output_tokens: int, now: float) -> None:
        """Queue a request that generates exactly `output_tokens`. Raises RequestTooLargeError."""
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        self.scheduler.add(Request(request_id, prompt, sampling, now))

    def begin(self, now: float) -> float | None:
        """Begin the next step and return its seconds; None if one is running or nothing is to be done."""
        if self._result is not None or not self.scheduler.has_work or not self.is_up:
            return None
        batch = self.scheduler.schedule(now)
        result = self._result = self.executor.execute(batch)
        self.num_steps += 1
        self.busy_seconds += result.elapsed
        return result.elapsed

    def end(self) -> list[Output]:
        """End the step; return its outputs."""
        result, self._result = self._result, None
        assert result is not None, f"{self.name}: no step has begun"
        return self.scheduler.update(result)

    def flush(self) -> None:
        """Clear the prefix cache; requests in flight continue."""
        self.pool.clear()

    def stop(self) -> None:
        """Stop at once: requests, queue and cache are lost, and it refuses requests until `restart`."""
        self.is_up = False
        self.epoch += 1
        self._lost = _sum(self._lost, self.scheduler.counters)
        self._lost_evictions += self.pool.num_evictions
        self._start()

    def restart(self, profile: Profile | None = None) -> None:
        """Serve again, with an empty cache; `profile`: with other settings."""
        assert not self.is_up, f"{self.name} runs: stop it first"
        self.profile = profile or self.profile
        self.is_up, self.is_draining = True, False
        self._start()

    def counters(self) -> Counters:
        """Return the token counters since the start of the simulation."""
        return _sum(self._lost, self.scheduler.counters)

    @property
    def num_evictions(self) -> int:
        """Published blocks evicted for lack of space, since the start of the simulation."""
        return self._lost_evictions + self.pool.num_evictions

    def report(self, now: float) -> Reported:
        """Return the state that a probe reads: queue lengths and the share of blocks in use."""
        pool = self.pool
        used = pool.num_usable - pool.num_free - pool.num_pinned_idle
        return Reported(at=now, waiting=self.num_waiting, running=self.num_running, kv_usage=used / pool.num_usable)


def _sum(a: Counters, b: Counters) -> Counters:
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in Counters.__slots__})
