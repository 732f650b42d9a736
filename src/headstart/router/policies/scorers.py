"""Scorers of the policy `weighted`: each gives every candidate a number from 0 to 1, the largest for the best.

The gateway's (llm-d, formerly the endpoint picker of source 004), by their names there or nearly. Weights are not
theirs to know. A scorer that remembers something, as `session` does, is told who was picked and given its memo back.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from headstart.router.endpoint import Endpoint
from headstart.router.policies.policy import Candidate, View

MAX_INFLIGHT_TOKENS = 4_194_304
MAX_SESSIONS = 65_536


class Scorer(Protocol):
    """One reason to prefer a replica."""

    def score(self, view: View) -> tuple[Sequence[float], object]:
        """A number for each candidate, and a memo that `picked` is given back. Changes nothing."""
        ...

    def picked(self, memo: object, endpoint: Endpoint) -> None:
        """The request went to this one."""
        ...


class _Stateless:
    """A scorer that is a function of the view."""

    def __init__(self, function: Callable[[View], Sequence[float]]) -> None:
        self._function = function

    def score(self, view: View) -> tuple[Sequence[float], object]:
        return self._function(view), None

    def picked(self, memo: object, endpoint: Endpoint) -> None:
        """Nothing to remember."""


class SessionScorer:
    """1 for the replica that served the session last. The oldest sessions are forgotten."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._last: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def score(self, view: View) -> tuple[Sequence[float], object]:
        """Its memo is the session."""
        session = view.ask.session
        last = None if session is None else self._last.get(session)
        return [float(candidate.name == last) for candidate in view.candidates], session

    def picked(self, memo: object, endpoint: Endpoint) -> None:
        """Remembers where the session is."""
        if isinstance(memo, str):
            self._last[memo] = endpoint.name
            self._last.move_to_end(memo)
            if len(self._last) > self._max_sessions:
                self._last.popitem(last=False)


def _prefix(view: View) -> list[float]:
    """The share of the prompt's blocks that are cached."""
    total = max(view.prompt_tokens, 1)
    return [candidate.hit_tokens / total for candidate in view.candidates]


def _queue(view: View) -> list[float]:
    """Least waiting 1, most waiting 0; all the same: 1 each."""
    waiting = [candidate.endpoint.waiting(view.now) for candidate in view.candidates]
    least, most = min(waiting), max(waiting)
    return [1.0 if most == least else (most - number) / (most - least) for number in waiting]


def _kv_usage(view: View) -> list[float]:
    """The share of the replica's blocks that no request uses, by its own account; 1 if it gives none."""
    reports = [candidate.endpoint.fresh(view.now) for candidate in view.candidates]
    return [1.0 if report is None else min(max(1.0 - report.kv_usage, 0.0), 1.0) for report in reports]


def _inflight_tokens(view: View) -> list[float]:
    """How far it would be from a fixed number of tokens under way."""

    def score(candidate: Candidate) -> float:
        tokens = candidate.endpoint.load.inflight_tokens + view.prompt_tokens - candidate.hit_tokens
        return max(1.0 - tokens / MAX_INFLIGHT_TOKENS, 0.0)

    return [score(candidate) for candidate in view.candidates]


def _lora(view: View) -> list[float]:
    """Adapter loaded 1, room for it 0.8, on its way 0.6, else 0; of a request without one 1."""
    adapter = view.ask.adapter

    def score(endpoint: Endpoint) -> float:
        report = endpoint.fresh(view.now)
        if adapter is None or (report is not None and adapter in report.adapters):
            return 1.0
        if report is None:
            return 0.0
        if len(report.adapters) + len(report.waiting_adapters) < report.max_adapters:
            return 0.8
        return 0.6 if adapter in report.waiting_adapters else 0.0

    return [score(candidate.endpoint) for candidate in view.candidates]


SCORERS: dict[str, Callable[[], Scorer]] = {
    "prefix": lambda: _Stateless(_prefix),
    "queue": lambda: _Stateless(_queue),
    "kv-usage": lambda: _Stateless(_kv_usage),
    "inflight-tokens": lambda: _Stateless(_inflight_tokens),
    "session": SessionScorer,
    "lora": lambda: _Stateless(_lora),
}
