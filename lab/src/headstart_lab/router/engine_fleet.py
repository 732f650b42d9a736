"""A fleet of real engines in virtual time behind a real router; the engines report their actual cache hits.

Scheduler, block pool, eviction and token accounting are the engine's own; only the computation is left out, and a step
takes the time given by a `StepCost`. A call of a session is sent at its arrival time or, if later, after the answer to
the previous one, as an agent does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from headstart.core.batch import RequestStepOutput
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import ReportedTokenUsage, RoutingRequest
from headstart_lab.runners.null_executor import NullExecutor
from headstart_lab.runners.virtual_time import StepCost


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a session: its tokens for the engine, the same prompt for the router, tokens to generate."""

    at: float
    session: str
    request: Request
    routing_request: RoutingRequest


class Served(NamedTuple):
    """The prediction for a call, and the usage that the engine reported."""

    pick: RoutedInFlight
    usage: ReportedTokenUsage


@dataclass(slots=True, eq=False)
class _Flight:
    """A call in flight."""

    call: Call
    decision: RoutedInFlight
    output: list[int]


def make_engine(num_blocks: int, block_size: int, vocab_size: int, eviction_policy: str, limits: Limits) -> Engine:
    """Return an engine of `num_blocks` usable blocks that computes nothing."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks + 1, block_size, limits, policy="lpm", eviction_policy=eviction_policy, tenant_floor=0.0
        )
    )
    return Engine(scheduler, NullExecutor(num_blocks + 1, block_size, vocab_size))


class EngineReplica:
    """One engine, its calls in flight, and whether it is to be flushed once idle."""

    def __init__(self, name: str, engine: Engine, cost: StepCost) -> None:
        self.name = name
        self.engine = engine
        self.cost = cost
        self.flights: dict[str, _Flight] = {}
        self.is_busy = False
        self.to_flush = False
        self.num_flushes = 0

    def flush(self) -> None:
        """Clear the prefix cache as soon as no call is in flight."""
        self.to_flush = True
        if not self.is_busy and self.engine.reset_prefix_cache():
            self.to_flush = False
            self.num_flushes += 1


class EngineFleet:
    """Replicas, one router, and the events between them in time order.

    `tells_output`: the router receives the tokens of answers. `after` schedules a callback by number of sent calls.
    """

    def __init__(self, replicas: Sequence[EngineReplica], router: Router, *, tells_output: bool = True) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.router = router
        self.tells_output = tells_output
        self.served: list[Served] = []  # in completion order
        self.num_sent = 0
        self._after: dict[int, Callable[[], None]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._sessions: dict[str, deque[Call]] = {}

    def after(self, num_calls: int, act: Callable[[], None]) -> None:
        """Schedule a callback after `num_calls` sent calls; one callback per number."""
        self._after[num_calls] = act

    def run(self, calls: Sequence[Call]) -> list[Served]:
        """Serve all calls, given in arrival order; return the prediction and the reported usage of each."""
        for call in calls:
            self._sessions.setdefault(call.session, deque()).append(call)
        for session in list(self._sessions):
            self._next(session, 0.0)
        while self._events:
            now, _, act = heappop(self._events)
            act(now)
        assert not self._sessions, f"{len(self._sessions)} sessions are left over"
        return self.served

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._order), act))

    def _next(self, session: str, now: float) -> None:
        """Schedule the next call of a session, or end the session."""
        waiting = self._sessions[session]
        if not waiting:
            del self._sessions[session]
            return
        call = waiting.popleft()
        self._at(max(call.at, now), lambda then: self._send(call, then))

    def _send(self, call: Call, now: float) -> None:
        decision = self.router.pick(call.routing_request, now)
        decision = self.router.record_sent(decision, now)
        self.num_sent += 1
        replica = self.replicas[decision.endpoint.name]
        replica.flights[call.request.request_id] = _Flight(call, decision, [])
        replica.engine.add_request(call.request)
        if not replica.is_busy:
            self._step(replica, now)
        act = self._after.pop(self.num_sent, None)
        if act is not None:
            act()

    def _step(self, replica: EngineReplica, now: float) -> None:
        """Start a step; its outputs are delivered at its end."""
        engine = replica.engine
        replica.is_busy = engine.has_work
        if not replica.is_busy:
            if replica.to_flush:
                replica.flush()
            return
        before = engine.scheduler.counters.computed_tokens
        outputs = engine.step(now)
        seconds = replica.cost.seconds(engine.scheduler.counters.computed_tokens - before)
        self._at(now + seconds, lambda then: self._deliver(replica, outputs, then))

    def _deliver(self, replica: EngineReplica, outputs: Sequence[RequestStepOutput], now: float) -> None:
        for output in outputs:
            flight = replica.flights[output.request_id]
            first = not flight.output
            flight.output += output.token_ids
            if output.finish_reason is None:
                if first:
                    self.router.record_first_token(flight.decision, now)
                continue
            assert output.error is None, output.error
            usage = ReportedTokenUsage(output.num_prompt_tokens, output.num_cached_tokens)
            output_ids = flight.output if self.tells_output else ()
            self.router.record_finished(flight.decision, now, usage, output_ids)
            del replica.flights[output.request_id]
            self.served.append(Served(flight.decision, usage))
            self._next(flight.call.session, now)
        self._step(replica, now)


def sampling(output: int) -> SamplingParams:
    """Return greedy parameters for exactly `output` tokens."""
    return SamplingParams(max_tokens=output, temperature=0.0)
