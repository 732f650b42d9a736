"""A twin of the simulator for serial prefills: an engine's block pool per replica, behind a real router.

A replica is an engine's block pool and a queue of prefills, run one after the other; answers are generated in parallel
at a fixed pace and hold their blocks until they end. So a replica evicts what an engine evicts, admits when it has free
blocks, and reports its actual hits. Only the router's view of it can be wrong.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, takewhile

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import ReportedTokenUsage, RoutingRequest
from headstart.router.step_rates import PrefillWork, StepRates
from headstart.workload.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a virtual workload; `output` in tokens."""

    at: float
    request: RoutingRequest
    output: int


@dataclass(slots=True, eq=False)
class _Job:
    """One request inside a replica."""

    pick: RoutedInFlight
    arrival: Arrival
    block_hashes: list[BlockHash]
    number: int
    blocks: list[int] = field(default_factory=list[int])
    num_found: int = 0  # blocks that were cached
    cached_tokens: int = 0
    first_token: float = 0.0


class VirtualReplica:
    """One simulated engine. `rates` models the duration of a prefill; `token_ms` is the time of an output token."""

    def __init__(
        self, name: str, num_blocks: int, block_size: int, rates: StepRates, token_ms: float, policy: str = "lru"
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.rates = rates
        self.token_ms = token_ms
        self.slow_down = 1.0
        self.policy = policy
        self.pool = BlockPool(num_blocks + 1, eviction_policy=policy, history_pools=1)
        self.waiting: deque[_Job] = deque()
        self.prefilling: _Job | None = None
        self.num_streams = 0
        self.num_served = 0

    def flush(self) -> None:
        """Clear the prefix cache; requests in flight continue."""
        self.pool.clear_published()

    def restart(self, num_blocks: int, block_size: int) -> None:
        """Restart with an empty cache of other sizes. Only when no request is in flight."""
        assert not (self.waiting or self.prefilling or self.num_streams), "there are requests in flight"
        self.block_size = block_size
        self.pool = BlockPool(num_blocks + 1, eviction_policy=self.policy, history_pools=1)

    def begin(self) -> tuple[_Job, float] | None:
        """Start the next prefill and return it with its seconds; None if none waits or its blocks are not available."""
        if self.prefilling is not None or not self.waiting:
            return None
        job, pool = self.waiting[0], self.pool
        found = [entry[0] for entry in takewhile(bool, map(pool.published_entry, job.block_hashes)) if entry]
        prompt_tokens = job.arrival.request.prompt.num_tokens
        total = -(-(prompt_tokens + job.arrival.output) // self.block_size)
        assert total <= pool.usable_capacity, f"a request of {total} blocks never fits into {pool.usable_capacity}"
        if total - len(found) > pool.num_available_after_acquire(found):
            return None
        self.waiting.popleft()
        pool.acquire(found)
        job.blocks = found + pool.allocate(total - len(found))
        job.num_found = len(found)
        job.cached_tokens = min(len(found) * self.block_size, prompt_tokens - 1)
        self.prefilling = job
        work = PrefillWork.of(prompt_tokens, job.cached_tokens, self.num_streams)
        return job, self.rates.prefill_ms(work) * self.slow_down / 1e3

    def answer(self, now: float) -> tuple[_Job, float]:
        """End the running prefill; return its request and the seconds that the rest of the answer takes."""
        job = self.prefilling
        assert job is not None, "no prefill is running"
        for index in range(job.num_found, len(job.block_hashes)):
            parent = job.block_hashes[index - 1] if index else BlockHash(b"")
            self.pool.publish(job.blocks[index], job.block_hashes[index], parent, b"")
        self.prefilling = None
        self.num_streams += 1
        job.first_token = now
        return job, max(job.arrival.output - 1, 0) * self.token_ms * self.slow_down / 1e3

    def end(self, job: _Job) -> None:
        """End a request and release its blocks."""
        self.num_streams -= 1
        self.num_served += 1
        self.pool.release(job.blocks)


class VirtualFleet:
    """Replicas, one or more routers, and the events between them in time order.

    `at` schedules a callback: a flush, a slow replica, a report.
    """

    def __init__(self, replicas: Sequence[VirtualReplica], *, reports_usage: bool = True) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.reports_usage = reports_usage
        self.records: list[RequestRecord] = []
        self.picks: list[RoutedInFlight] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self.now = 0.0

    def at(self, time: float, act: Callable[[float], None]) -> None:
        """Schedule a callback, which receives the time."""
        heappush(self._events, (time, next(self._order), act))

    def run(self, arrivals: Sequence[Arrival], routers: Sequence[Router]) -> list[RequestRecord]:
        """Send each request at its arrival time, to the routers in turn; return the records in completion order."""
        for number, arrival in enumerate(arrivals):
            router = routers[number % len(routers)]
            self.at(arrival.at, lambda now, a=arrival, r=router, n=number: self._arrive(a, r, n, now))
        while self._events:
            self.now, _, act = heappop(self._events)
            act(self.now)
        return self.records

    def _arrive(self, arrival: Arrival, router: Router, number: int, now: float) -> None:
        pick = router.pick(arrival.request, now)
        pick = router.record_sent(pick, now)
        self.picks.append(pick)
        replica = self.replicas[pick.endpoint.name]
        block_hashes = arrival.request.prompt.block_hashes(replica.block_size)
        replica.waiting.append(_Job(pick, arrival, block_hashes, number))
        self._advance(replica, router, now)

    def _advance(self, replica: VirtualReplica, router: Router, now: float) -> None:
        begun = replica.begin()
        if begun is not None:
            self.at(now + begun[1], lambda then: self._answer(replica, router, then))

    def _answer(self, replica: VirtualReplica, router: Router, now: float) -> None:
        job, seconds = replica.answer(now)
        router.record_first_token(job.pick, now)
        self.at(now + seconds, lambda then: self._end(replica, router, job, then))
        self._advance(replica, router, now)

    def _end(self, replica: VirtualReplica, router: Router, job: _Job, now: float) -> None:
        replica.end(job)
        prompt_tokens = job.arrival.request.prompt.num_tokens
        usage = ReportedTokenUsage(prompt_tokens, job.cached_tokens) if self.reports_usage else None
        router.record_finished(job.pick, now, usage, num_output=job.arrival.output)
        self.records.append(
            RequestRecord(
                request_id=str(job.number),
                arrival=job.arrival.at,
                first_token=job.first_token,
                finish=now,
                prompt_tokens=prompt_tokens,
                cached_tokens=job.cached_tokens,
                output_tokens=job.arrival.output,
            )
        )
        self._advance(replica, router, now)
