"""VirtualFleet: simulated replicas behind real routers, and the events between them in time order.

A router sees what it sees in reality: the first token of an answer, its end with the number of cached tokens, the queue
lengths of each replica at every probe, refused connections and broken answers; with `relays_tokens` every later token
too, as behind all fronts but an Envoy whose picker sees no answers. Only the replicas' step times are modelled. Events
at the same time are processed in the order in which they were scheduled, so a run is a function of its inputs.

Not modelled: the network, HTTP, tokenization, and the router's own queue limits.

SharedCores: the end times of steps whose replicas share the cores of one machine, in virtual time.

Steps that run at the same time advance at the same speed, as under a fair scheduler of an operating system with short
time slices. Priorities, migrations and the time of a switch are not modelled.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from headstart.core.batch import PromptTokenBreakdown, RequestStepOutput
from headstart.core.errors import NoReplicaError, RequestTooLargeError
from headstart.core.sched.ideal_cache import IdealCache
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import ReportedTokenUsage, RoutingPrompt, RoutingRequest
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_request import SimRequest
from headstart.workload.request_record import RequestRecord

NOTHING = PromptTokenBreakdown()
MAX_ATTEMPTS = 3  # of one request, at different replicas
Act = Callable[[float], None]


@dataclass(slots=True, eq=False)
class _RunningStep:
    left: float  # seconds at full speed
    act: Act


class SharedCores:
    """The cores of all replicas. `at` schedules a callback, which receives the time.

    `speeds[n - 1]` is the speed of each step while `n` run, relative to a step alone. More steps than speeds share the
    total speed of the last entry equally. Without speeds every replica has cores of its own.
    """

    def __init__(self, speeds: Sequence[float], at: Callable[[float, Act], None]) -> None:
        self._speeds = speeds
        self._at = at
        self._steps: list[_RunningStep] = []
        self._now = 0.0  # time of the last change
        self._num_changes = 0

    def start(self, seconds: float, act: Act, now: float) -> None:
        """Start a step of `seconds` at full speed; `act` is called at its end."""
        if not self._speeds:
            self._at(now + seconds, act)
            return
        self._advance(now)
        self._steps.append(_RunningStep(seconds, act))
        self._schedule_next(now)

    def _speed(self) -> float:
        """Return the present speed of each step."""
        num, known = len(self._steps), len(self._speeds)
        return self._speeds[min(num, known) - 1] * min(known / num, 1.0)

    def _advance(self, now: float) -> None:
        if self._steps:
            done = (now - self._now) * self._speed()
            for step in self._steps:
                step.left -= done
        self._now = now

    def _schedule_next(self, now: float) -> None:
        """Schedule the next end, which is the next event unless a step starts before it."""
        self._num_changes += 1
        if self._steps:
            number, step = self._num_changes, min(self._steps, key=lambda one: one.left)
            self._at(now + max(step.left, 0.0) / self._speed(), lambda then: self._end(step, number, then))

    def _end(self, step: _RunningStep, number: int, now: float) -> None:
        if number != self._num_changes:
            return  # a step started or ended in the meantime
        self._advance(now)
        self._steps.remove(step)
        self._schedule_next(now)
        step.act(now)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Conditions of a run. Intervals in seconds; 0: never."""

    probe_interval: float = 2.0  # after which a router reads the queue lengths and the health of every replica
    relays_tokens: bool = True  # routers see every token of an answer; the picker of an Envoy may not
    token_spacing: float = 0.0  # seconds between the tokens of one step, on their way to the router
    reports_usage: bool = True  # answers state their cached tokens
    tells_output: bool = False  # a request's max_tokens is the length of its output; else it is not known
    speeds: tuple[float, ...] = ()  # of steps on one machine (shared_cores.py); empty: each replica has its own cores


DEFAULTS = FleetOptions()


class SimRecord(NamedTuple):
    """The record of one request, and where it was served."""

    record: RequestRecord
    replica: str  # the last one; empty: none was available
    breakdown: PromptTokenBreakdown  # sources of the prompt's KV
    num_attempts: int


@dataclass(slots=True, eq=False)
class _Call:
    """One request on its way through the fleet."""

    number: int
    request: SimRequest
    router: Router
    due: float  # when it came
    num_awaited: int  # requests whose answers it needs
    routing: RoutingRequest | None = None
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    in_flight: RoutedInFlight | None = None
    replica: SimReplica | None = None
    first_token: float | None = None
    breakdown: PromptTokenBreakdown = NOTHING
    cached_tokens: int = 0
    tried: frozenset[str] = frozenset()

    @property
    def request_id(self) -> str:
        return str(self.number)


class VirtualFleet:
    """Replicas, routers, and the events between them. One run per fleet."""

    def __init__(
        self, replicas: Iterable[SimReplica], routers: Sequence[Router], options: FleetOptions = DEFAULTS
    ) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.routers = routers
        self.options = options
        self.records: list[SimRecord] = []  # in order of completion
        self.now = 0.0
        self.is_halted = False  # set by a caller that has seen enough: the run ends
        self.on_record: Callable[[SimRecord], None] | None = None  # called with every finished request
        self._calls: dict[str, _Call] = {}
        self._num_open = 0  # requests that have not ended, arrived or not
        self._waiting: defaultdict[int, list[_Call]] = defaultdict(list)  # for the request of this number
        self._events: list[tuple[float, int, Act]] = []
        self._num_events = 0
        self._cores = SharedCores(options.speeds, self.at)
        self._ideal = IdealCache(1 << 62)
        self.ideal_tokens = 0  # prompt tokens that one perfect, infinite cache for the whole fleet would compute

    def at(self, time: float, act: Act) -> None:
        """Schedule a callback, which receives the time."""
        heappush(self._events, (time, self._num_events, act))
        self._num_events += 1

    def run(self, requests: Sequence[SimRequest]) -> list[SimRecord]:
        """Send each request at its time, to the routers in turn; return the records in completion order.

        Requests that come after others are sent when these have ended and their pause is over.

        The run ends with the last request; later events are dropped.
        """
        self._num_open = len(requests)
        for number, request in enumerate(requests):
            call = _Call(number, request, self.routers[number % len(self.routers)], request.at, len(request.after))
            for before in request.after:
                self._waiting[before].append(call)
            if not request.after:
                self.at(request.at, lambda now, call=call: self._arrive(call, now))
        if self.options.probe_interval > 0:
            self.at(self.options.probe_interval, self._probe)
        while self._num_open and not self.is_halted:
            assert self._events, f"{self._num_open} requests have not ended, and nothing is left to happen"
            self.now, _, act = heappop(self._events)
            act(self.now)
        return self.records

    def add(self, replica: SimReplica) -> None:
        """Add a replica to the fleet and to every router."""
        self.replicas[replica.name] = replica
        for router in self.routers:
            router.add(make_endpoint(replica))

    def stop_replica(self, name: str, now: float) -> None:
        """Stop a replica at once: its requests break off, and new ones are refused until it is restarted."""
        self.replicas[name].kill(now)
        lost = [call for call in self._calls.values() if call.replica is not None and call.replica.name == name]
        for call in lost:
            self._broken(call, now)

    def restart(self, name: str, now: float) -> None:
        """Let a stopped or draining replica serve again; routers notice at their next probe."""
        self.replicas[name].restart(now)

    def drain(self, name: str) -> None:
        """Let a replica finish what it has and refuse what is new."""
        self.replicas[name].is_draining = True

    def remove(self, name: str, now: float) -> None:
        """Stop a replica and remove it from every router; its figures stay."""
        self.stop_replica(name, now)
        for router in self.routers:
            router.remove(name)

    def begin_step_if_idle(self, replica: SimReplica, now: float) -> None:
        """Begin a step if the replica has work and none is running."""
        seconds = replica.begin_step(now)
        if seconds is not None:
            epoch = replica.epoch
            self._cores.start(seconds, lambda then: self._stepped(replica, epoch, then), now)

    # ------------------------------------------------------------------------------------------------------------

    def _arrive(self, call: _Call, now: float) -> None:
        """Tokenize a request and route it."""
        request = call.request
        call.due = now
        call.tokens = request.prompt_token_ids()
        sizes = {endpoint.block_size for endpoint in call.router.endpoints.values()}
        prompt = request.routing_prompt(call.tokens, sizes)
        max_tokens = request.output_tokens if self.options.tells_output else 0
        call.routing = RoutingRequest(prompt, session=request.session, max_tokens=max_tokens)
        self._calls[call.request_id] = call
        self._count_ideal(prompt, min(sizes, default=0))
        self._route(call, now)

    def _count_ideal(self, prompt: RoutingPrompt, block_size: int) -> None:
        """Count what a perfect cache for the whole fleet would compute of a prompt: at least one token."""
        block_hashes = prompt.block_hashes(block_size) if block_size else []
        known = self._ideal.num_cached_prefix_blocks(block_hashes)
        self._ideal.record_use(block_hashes)
        self.ideal_tokens += max(prompt.num_tokens - known * block_size, 1)

    def _route(self, call: _Call, now: float) -> None:
        """Send a request to a replica; to another one while it is refused and attempts are left."""
        assert call.routing is not None
        error = f"{MAX_ATTEMPTS} attempts failed"
        while len(call.tried) < MAX_ATTEMPTS:
            try:
                decision = call.router.pick(call.routing, now, tried=call.tried, before=call.in_flight)
            except NoReplicaError:
                error = "no replica"
                break
            in_flight = call.in_flight = call.router.record_sent(decision, now)
            replica = call.replica = self.replicas[decision.endpoint.name]
            call.tried |= {replica.name}
            if not replica.is_up or replica.is_draining:
                self._refused(call, in_flight, replica, now)
                continue
            try:
                replica.submit(call.request_id, call.tokens, call.request.output_tokens, now)
            except RequestTooLargeError as refusal:
                call.router.record_failed(in_flight, now, blame=False)
                error = str(refusal)
                break
            call.tokens = array("i")  # the scheduler has them
            self.begin_step_if_idle(replica, now)
            return
        self._ended(call, now, error)

    def _refused(self, call: _Call, in_flight: RoutedInFlight, replica: SimReplica, now: float) -> None:
        """Report a refused connection, or an answer that the replica is draining."""
        if replica.is_up:
            in_flight.endpoint.health.record_unavailable(now, draining=True)
        call.router.record_failed(in_flight, now, refused=not replica.is_up, blame=not replica.is_up)

    def _stepped(self, replica: SimReplica, epoch: int, now: float) -> None:
        """End a step: pass its outputs to the routers, and begin the next one."""
        if replica.epoch != epoch:
            return
        for number, output in enumerate(replica.end_step(now if self.options.speeds else None)):
            if self.options.token_spacing:
                self.at(now + number * self.options.token_spacing, self._later(output, replica, epoch))
            else:
                self._output(output, now)
        self.begin_step_if_idle(replica, now)

    def _later(self, output: RequestStepOutput, replica: SimReplica, epoch: int) -> Act:
        def act(now: float) -> None:
            if replica.epoch == epoch:
                self._output(output, now)

        return act

    def _output(self, output: RequestStepOutput, now: float) -> None:
        """Tell the router of an output, and end its request with the last one."""
        call = self._calls[output.request_id]
        if self.options.relays_tokens and call.first_token is not None:
            assert call.in_flight is not None
            call.router.record_later_token(call.in_flight, now)
        if output.breakdown is not None or output.finish_reason is not None:
            self._first_or_last(call, output, now)

    def _first_or_last(self, call: _Call, output: RequestStepOutput, now: float) -> None:
        assert call.in_flight is not None
        if output.breakdown is not None:
            call.breakdown = output.breakdown
            call.cached_tokens = output.num_cached_tokens
            call.first_token = now
            call.router.record_first_token(call.in_flight, now)
        if output.finish_reason is not None:
            usage = (
                ReportedTokenUsage(output.num_prompt_tokens, call.cached_tokens) if self.options.reports_usage else None
            )
            call.router.record_finished(call.in_flight, now, usage, num_output=call.request.output_tokens)
            self._ended(call, now)

    def _broken(self, call: _Call, now: float) -> None:
        """Fail a request whose replica stopped: it is routed again unless a client has seen a part of its answer."""
        assert call.in_flight is not None
        call.router.record_failed(call.in_flight, now)
        if call.first_token is not None:
            self._ended(call, now, "the replica stopped")
            return
        call.tokens = call.request.prompt_token_ids()
        self._route(call, now)

    def _ended(self, call: _Call, now: float, error: str | None = None) -> None:
        del self._calls[call.request_id]
        self._num_open -= 1
        request, is_served = call.request, error is None
        record = RequestRecord(
            request_id=call.request_id,
            arrival=call.due,
            first_token=call.first_token,
            finish=now if is_served else None,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=call.cached_tokens,
            output_tokens=request.output_tokens if is_served else 0,
            error=error,
        )
        name = "" if call.replica is None else call.replica.name
        found = SimRecord(record, name, call.breakdown, len(call.tried))
        self.records.append(found)
        if self.on_record is not None:
            self.on_record(found)
        for waiting in self._waiting.pop(call.number, ()):
            waiting.num_awaited -= 1
            if not waiting.num_awaited:
                self.at(now + waiting.request.pause, lambda then, call=waiting: self._arrive(call, then))

    def _probe(self, now: float) -> None:
        """Let every router read the state of every replica."""
        for replica in self.replicas.values():
            reported = replica.report(now) if replica.is_up else None
            for router in self.routers:
                endpoint = router.endpoints.get(replica.name)
                if endpoint is None:
                    continue
                if reported is None or replica.is_draining:
                    endpoint.health.record_unavailable(now, absent=reported is None, draining=reported is not None)
                else:
                    endpoint.health.record_ready()
                    endpoint.reported = reported
        self.at(now + self.options.probe_interval, self._probe)


def make_endpoint(replica: SimReplica, num_blocks: int = 0) -> Endpoint:
    """Return the router's state for a new replica; its index believes in `num_blocks` blocks, 0: the true number."""
    profile = replica.profile
    allow = (lambda granted, wanted: max(granted, wanted)) if profile.offload is not None else None
    size = num_blocks or profile.num_blocks
    index = ApproximateIndex(size, eviction_policy=profile.eviction_policy, allow=allow)
    return Endpoint(replica.name, index, block_size=profile.block_size)
