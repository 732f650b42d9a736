"""Silence: gives up attempts that wait for a silent replica, so that they are sent to another one.

A long wait alone proves nothing: a prefill may take a minute, and others may be before it. So a request's wait is never
judged in isolation. A replica is silent if
- MAX_SILENCES probes in a row are not answered, and no byte arrived on any connection since the first of them;
- or UNREADY_LOOKS probes in a row report that it is not ready, and no event and no answer arrived since the first;
- or it is late: no event and no answer arrived for LATE times as long as all requests waiting there take if nothing is
  cached, and for MIN_LATE seconds, while other replicas answered. Since that is an estimate, it applies once per
  request, and never while requests without an expected end are in flight there: those of other routers, and answers
  in one piece of any length.

An attempt is given up only while no part of its answer was relayed, and only if another replica may take the request.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.replicas.replica_monitor import MAX_SILENCES, MonitoredReplica
from headstart.router.filters import filter_endpoints_with_reasons
from headstart.router.rate_learner import YOUNG
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.step_rates import PrefillWork

UNREADY_LOOKS = 2
LATE = 10.0
MIN_LATE = 30.0  # seconds; prefills of 30 to 60 s were seen on CPUs, where rates are known after a few requests
MIN_LATE_YOUNG = 120.0  # for a replica with too few observations to predict its times
TOKEN_SECONDS = 1.0  # an answer in one piece may take this long per token


@dataclass(slots=True, eq=False)
class AwaitedAttempt:
    """One attempt without a part of an answer. `give_up` cancels `task` soon, but not at once."""

    call: ProxiedCall
    decision: RoutedInFlight
    sent_at: float
    num_streams: int  # streams in flight there
    task: "asyncio.Task[Any]"
    num_cancels: int  # cancellations of the task by others, at the start
    is_given_up: bool = False
    is_cancelled: bool = False  # by `give_up`
    _soon: asyncio.Handle | None = None

    def give_up(self) -> None:
        """Cancel the task soon, unless `keep` is called before."""
        self.is_given_up = True
        self._soon = self.task.get_loop().call_soon(self._cancel)

    def undo_give_up(self) -> None:
        """Undo `give_up`, if the task was not cancelled yet."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon, self.is_given_up = None, False

    def absorb_cancel(self) -> bool:
        """Undo the cancellation by `give_up`; return whether there was one, and no other caller cancelled the task.

        Call it once the attempt has ended.
        """
        self.undo_give_up()
        if not self.is_cancelled:
            return False
        self.is_cancelled = False
        return self.task.uncancel() <= self.num_cancels

    def _cancel(self) -> None:
        self._soon, self.is_cancelled = None, True
        self.task.cancel()

    @property
    def prefill_seconds_if_uncached(self) -> float:
        """The expected duration of its prefill if nothing is cached."""
        work = PrefillWork.of(self.decision.view.num_prompt_tokens, 0, self.num_streams)
        return self.decision.endpoint.load.rates.prefill_ms(work, self.decision.endpoint.load.max_step_tokens) / 1e3

    @property
    def max_answer_seconds(self) -> float:
        """The longest time that its answer may take to be generated, if it comes in one piece."""
        if self.call.reading.stream:
            return 0.0
        tokens = self.decision.view.request.max_tokens or self.call.api.default_max_tokens
        return inf if tokens is None else tokens * TOKEN_SECONDS


@dataclass(slots=True, eq=False)
class ReplicaActivity:
    """The last activity of one replica, over all its connections. Times on time.monotonic."""

    heard_at: float = 0.0  # any bytes
    progress_at: float = 0.0  # an event with data, or a complete answer
    waits: dict[AwaitedAttempt, None] = field(default_factory=dict[AwaitedAttempt, None])  # in the order of sending

    def record_response(self, wait: AwaitedAttempt, now: float, *, is_progress: bool = True) -> None:
        """Stop watching an attempt: part of its answer arrived, or a complete refusal, which is no progress."""
        self.heard_at = now
        if is_progress:
            self.progress_at = now
        if self.waits.pop(wait, True) is None and wait.is_given_up:
            wait.undo_give_up()


Watched = tuple[ReplicaActivity, AwaitedAttempt]
"""An attempt that is being watched, and the activity of its replica."""


class SilenceDetector:
    """The activity of all replicas of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._activities: dict[str, ReplicaActivity] = {}

    def begin(self, call: ProxiedCall, decision: RoutedInFlight, now: float) -> Watched:
        """Watch an attempt of the running task that was just sent. The caller must call `end`."""
        task = asyncio.current_task()
        assert task is not None
        wait = AwaitedAttempt(call, decision, now, decision.endpoint.load.num_streams, task, task.cancelling())
        activity = self._activities.get(decision.endpoint.name)
        if activity is None:
            activity = self._activities[decision.endpoint.name] = ReplicaActivity()
        activity.waits[wait] = None
        return activity, wait

    def end(self, activity: ReplicaActivity, wait: AwaitedAttempt) -> None:
        """Stop watching an attempt that has ended, with success or without."""
        activity.waits.pop(wait, None)

    def on_replica_removing(self, name: str) -> None:
        """Forget a removed replica; its attempts may still end."""
        self._activities.pop(name, None)

    def on_probe(self, member: MonitoredReplica) -> None:
        """Judge a replica after a probe, and give up the attempts that wait there in vain."""
        name, now = member.address.url, time.monotonic()
        activity = self._activities.get(name)
        if activity is None or not activity.waits:
            return
        mute = member.num_silences >= MAX_SILENCES and activity.heard_at < member.silent_since
        unready = member.num_unready >= UNREADY_LOOKS and activity.progress_at < member.unready_since
        if mute or unready:
            self._give_up(activity.waits, now)
        elif self._is_late(name, activity, now):
            self._give_up([wait for wait in activity.waits if not wait.call.was_late], now, late=True)

    def _give_up(self, waits: Iterable[AwaitedAttempt], now: float, *, late: bool = False) -> None:
        for wait in list(waits):
            call = wait.call
            if wait.is_given_up or call.committed:
                continue
            found, _ = filter_endpoints_with_reasons(
                self._router.endpoints.values(), call.reading.request, now, frozenset(call.tried)
            )
            if found:
                call.was_late = call.was_late or late
                wait.give_up()

    def _is_late(self, name: str, activity: ReplicaActivity, now: float) -> bool:
        """Return whether an attempt waits far too long there, with everything sent before it taken into account."""
        endpoint = self._router.endpoints.get(name)
        if endpoint is None or endpoint.num_requests(now) > endpoint.load.num_requests:
            return False
        least = MIN_LATE if endpoint.load.learner.num_samples >= YOUNG else MIN_LATE_YOUNG
        work = answer = 0.0
        for wait in activity.waits:
            work += wait.prefill_seconds_if_uncached
            answer = max(answer, wait.max_answer_seconds)
            if now - max(wait.sent_at, activity.progress_at) > max(least, LATE * work) + answer:
                return self._others_answer(name, wait.sent_at)
        return False

    def _others_answer(self, name: str, since: float) -> bool:
        others = [activity for other, activity in self._activities.items() if other != name]
        return any(activity.progress_at > since for activity in others)
