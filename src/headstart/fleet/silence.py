"""Silence: attempts that wait for a replica which has gone silent as a whole are given up, and sent elsewhere.

A long wait proves nothing: a prefill may take a minute, and others may be before it. So one request's waiting is never
judged by itself. A replica is silent if
- its looks are not answered, MAX_SILENCES in a row, and no byte came over any connection since the first of them;
- or it says that it is not ready, UNREADY_LOOKS in a row, and no event and no answer came since the first of them;
- or it is late: no event and no answer came for LATE times as long as all that waits there takes if nothing is cached,
  and for MIN_LATE seconds, while others answered. Since that is a guess, it is made once per request, and never where
  requests are under way whose end is not to be expected: other routers' ones, and answers in one piece of any length.

Attempts are given up only while nothing of an answer was passed on, and only if another replica may take the request.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from headstart.fleet.call import Call
from headstart.fleet.members import MAX_SILENCES, Member
from headstart.router.filters import eligible
from headstart.router.pick import Pick
from headstart.router.rates import YOUNG, Work
from headstart.router.router import Router

UNREADY_LOOKS = 2
LATE = 10.0
MIN_LATE = 30.0  # seconds; prefills of 30 to 60 s were seen on CPUs, where rates are known after some requests
MIN_LATE_YOUNG = 120.0  # of a replica of which too little was seen to expect anything
TOKEN_SECONDS = 1.0  # an answer in one piece may take so long per token
DEFAULT_TOKENS = {"/v1/completions": 16}  # of an answer whose request does not say


@dataclass(slots=True, eq=False)
class Wait:
    """One attempt without a part of an answer. `scope` is the timeout around it, which is not set."""

    call: Call
    sent_at: float
    work_seconds: float  # expected, if nothing is cached
    answer_seconds: float  # to generate it, if it comes in one piece
    scope: asyncio.Timeout
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class Voice:
    """What was heard of one replica, over all its connections. Times on time.monotonic."""

    heard_at: float = 0.0  # any bytes
    progress_at: float = 0.0  # an event with data, or a whole answer
    waits: dict[Wait, None] = field(default_factory=dict[Wait, None])  # in the order in which they were sent

    def settle(self, wait: Wait, now: float, *, is_progress: bool = True) -> None:
        """A part of its answer is there, or all of a refusal, which is no progress: it is given up no more."""
        self.heard_at = now
        if is_progress:
            self.progress_at = now
        if self.waits.pop(wait, True) is None and wait.is_given_up:
            wait.scope.reschedule(None)
            wait.is_given_up = False


class Silence:
    """The voices of all replicas of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._voices: dict[str, Voice] = {}

    def begin(self, call: Call, pick: Pick, scope: asyncio.Timeout, now: float) -> tuple[Voice, Wait]:
        """Watch an attempt that was just sent. Whoever calls this calls `end`."""
        load, view = pick.endpoint.load, pick.view
        work = Work.of(view.prompt_tokens, 0, load.num_streams)
        answer = 0.0
        if not call.reading.stream:
            tokens = view.ask.max_tokens or DEFAULT_TOKENS.get(call.path)
            answer = inf if tokens is None else tokens * TOKEN_SECONDS
        wait = Wait(call, now, load.rates.prefill_ms(work) / 1e3, answer, scope)
        voice = self._voices.setdefault(pick.endpoint.name, Voice())
        voice.waits[wait] = None
        return voice, wait

    def end(self, voice: Voice, wait: Wait) -> None:
        """The attempt is over, well or not."""
        voice.waits.pop(wait, None)

    def removed(self, name: str) -> None:
        """Forget a replica that is no more; its attempts may still end."""
        self._voices.pop(name, None)

    def looked(self, member: Member) -> None:
        """Judge a replica after a look at it, and give up what waits there in vain."""
        name, now = member.address.url, time.monotonic()
        voice = self._voices.get(name)
        if voice is None or not voice.waits:
            return
        mute = member.num_silences >= MAX_SILENCES and voice.heard_at < member.silent_since
        unready = member.num_unready >= UNREADY_LOOKS and voice.progress_at < member.unready_since
        if mute or unready:
            self._give_up(voice.waits, now)
        elif self._is_late(name, voice, now):
            self._give_up([wait for wait in voice.waits if not wait.call.was_late], now, late=True)

    def _give_up(self, waits: Iterable[Wait], now: float, *, late: bool = False) -> None:
        for wait in list(waits):
            call = wait.call
            if wait.is_given_up or call.committed:
                continue
            found, _ = eligible(self._router.endpoints.values(), call.reading.ask, now, frozenset(call.tried))
            if found:
                call.was_late = call.was_late or late
                wait.is_given_up = True
                wait.scope.reschedule(asyncio.get_running_loop().time())

    def _is_late(self, name: str, voice: Voice, now: float) -> bool:
        """Whether something waits far too long there, with all that was sent before it taken into account."""
        endpoint = self._router.endpoints.get(name)
        if endpoint is None or endpoint.num_requests(now) > endpoint.load.num_requests:
            return False
        least = MIN_LATE if endpoint.load.learner.num_own >= YOUNG else MIN_LATE_YOUNG
        work = answer = 0.0
        for wait in voice.waits:
            work += wait.work_seconds
            answer = max(answer, wait.answer_seconds)
            if now - max(wait.sent_at, voice.progress_at) > max(least, LATE * work) + answer:
                return self._others_answer(name, wait.sent_at)
        return False

    def _others_answer(self, name: str, since: float) -> bool:
        others = [voice for other, voice in self._voices.items() if other != name]
        return any(voice.progress_at > since for voice in others)
