"""Scorers of the policy `weighted`: each gives every candidate a number from 0 to 1, the largest for the best.

They follow the gateway's (llm-d, formerly the endpoint picker of gateway-api-inference-extension), with its names or
similar ones, and are independent of their weights. A stateful scorer, such as `session`, gets its memo and the chosen
replica in `record_pick`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from headstart.router.endpoint import Endpoint
from headstart.router.policies.policy import Candidate, PolicyInput

MAX_INFLIGHT_TOKENS = 4_194_304
MAX_SESSIONS = 65_536


class Scorer(Protocol):
    """One criterion for preferring a replica."""

    def score(self, view: PolicyInput) -> tuple[Sequence[float], object]:
        """Return a number for each candidate, and a memo for `record_pick`. Changes nothing."""
        ...

    def record_pick(self, memo: object, endpoint: Endpoint) -> None:
        """Record that the request is sent to this replica."""
        ...


class _Stateless:
    """A scorer that is a function of the view."""

    def __init__(self, function: Callable[[PolicyInput], Sequence[float]]) -> None:
        self._function = function

    def score(self, view: PolicyInput) -> tuple[Sequence[float], object]:
        return self._function(view), None

    def record_pick(self, memo: object, endpoint: Endpoint) -> None:
        """Do nothing."""


class SessionScorer:
    """Scores 1 for the replica that served the session last. The oldest sessions are dropped."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._last: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def score(self, view: PolicyInput) -> tuple[Sequence[float], object]:
        """Score each candidate; the memo is the session."""
        session = view.request.session
        last = None if session is None else self._last.get(session)
        return [float(candidate.name == last) for candidate in view.candidates], session

    def record_pick(self, memo: object, endpoint: Endpoint) -> None:
        """Record the replica of the session."""
        if isinstance(memo, str):
            self._last[memo] = endpoint.name
            self._last.move_to_end(memo)
            if len(self._last) > self._max_sessions:
                self._last.popitem(last=False)


def _prefix(view: PolicyInput) -> list[float]:
    """Return the share of the prompt's tokens that are cached."""
    total = max(view.num_prompt_tokens, 1)
    return [candidate.hit_tokens / total for candidate in view.candidates]


def _queue(view: PolicyInput) -> list[float]:
    """Return 1 for the shortest queue, 0 for the longest, linear between; 1 each if all are equal."""
    waiting = [candidate.endpoint.waiting(view.now) for candidate in view.candidates]
    least, most = min(waiting), max(waiting)
    return [1.0 if most == least else (most - number) / (most - least) for number in waiting]


def _kv_usage(view: PolicyInput) -> list[float]:
    """Return the reported share of the replica's blocks not in use; 1 without a report."""
    reports = [candidate.endpoint.recent_report(view.now) for candidate in view.candidates]
    return [1.0 if report is None else min(max(1.0 - report.kv_usage, 0.0), 1.0) for report in reports]


def _inflight_tokens(view: PolicyInput) -> list[float]:
    """Return how far below a fixed number the tokens in flight would be, as a share."""

    def score(candidate: Candidate) -> float:
        tokens = candidate.endpoint.load.inflight_tokens + view.num_prompt_tokens - candidate.hit_tokens
        return max(1.0 - tokens / MAX_INFLIGHT_TOKENS, 0.0)

    return [score(candidate) for candidate in view.candidates]


def _lora(view: PolicyInput) -> list[float]:
    """Return 1 for a loaded adapter or no adapter, 0.8 for a free slot, 0.6 for an adapter being loaded, else 0."""
    adapter = view.request.adapter

    def score(endpoint: Endpoint) -> float:
        report = endpoint.recent_report(view.now)
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
