"""llm-d's predicted-latency scheduling as a policy on our index and load. Needs the package xgboost-cpu.

As read in llm-d-router (charts/routerlib, its prefix-cache-affinity filters, latency-scorer and weighted-random-picker)
and llm-d-latency-predictor (training_server.py) in November 2026, with the settings of its chart. Not repeated: the
models of their own for replicas with and without a queue (`is_queued` is a feature), limits per bucket of samples
(500, more than a run has), encoder sizes, and the latency of the prediction server.
"""

from random import Random
from typing import Any, NamedTuple

import numpy as np
import xgboost

from headstart.router.endpoint import Endpoint
from headstart.router.policies.policy import Candidate, PolicyInput, RankedCandidates
from headstart.router.router import RoutedInFlight, Router, RoutingDecision

TREES = {
    **{"max_depth": 6, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 0.8, "min_child_weight": 5, "gamma": 0.2},
    **{"alpha": 0.01, "lambda": 0.1, "tree_method": "hist", "nthread": 1, "seed": 42, "objective": "reg:squarederror"},
}
NUM_TREES = 200
FIRST_SAMPLES, MIN_SAMPLES, INTERVAL = 10, 100, 10.0  # of the first model, of later ones; seconds between them
AFFINITY = (0.99, 0.80)  # shares of a prompt that are cached, of the two filters
MAX_PENALTY = 5.0  # seconds that a replica with the prefix may be expected to take longer
TTFT_WEIGHT, TPOT_WEIGHT = 0.8, 0.2
STEPS = 100  # of a score


class State(NamedTuple):
    """The state of a replica and a prompt, as the models see it."""

    is_queued: float
    kv_usage: float
    prompt_tokens: float
    num_waiting: float
    num_running: float  # in flight, by the router's count
    inflight_tokens: float
    prefix: float  # share that is cached
    uncached_tokens: float
    quarter: float  # of the prefix

    @classmethod
    def of(cls, view: PolicyInput, candidate: Candidate) -> "State":
        """Return the state of a candidate, from its last scrape and the router's own counts."""
        endpoint, tokens = candidate.endpoint, view.num_prompt_tokens
        report, blocks = endpoint.reported, len(view.request.prompt.block_hashes(endpoint.block_size))
        waiting, usage = (0, 0.0) if report is None else (report.waiting, report.kv_usage)
        prefix = candidate.hit_blocks / blocks if blocks else 0.0
        return cls(
            is_queued=float(waiting > 0),
            kv_usage=usage,
            prompt_tokens=tokens,
            num_waiting=waiting,
            num_running=endpoint.load.num_requests,
            inflight_tokens=endpoint.load.inflight_tokens,
            prefix=prefix,
            uncached_tokens=(1 - prefix) * tokens,
            quarter=min(int(4 * prefix), 3),
        )


class Model:
    """Trees that are trained again from all samples every INTERVAL seconds."""

    def __init__(self) -> None:
        self._states: list[State] = []
        self._seconds: list[float] = []
        self._trees: xgboost.Booster | None = None
        self._trained_at = 0.0

    def add(self, state: State, seconds: float) -> None:
        self._states.append(state)
        self._seconds.append(seconds)

    def predict(self, states: list[State], now: float) -> list[float] | None:
        """Return seconds; None before the first model."""
        count = len(self._seconds)
        is_due = count >= MIN_SAMPLES and now >= self._trained_at + INTERVAL
        if is_due or (self._trees is None and count >= FIRST_SAMPLES):
            samples = xgboost.DMatrix(np.array(self._states), 1e3 * np.array(self._seconds))
            self._trees, self._trained_at = xgboost.train(TREES, samples, NUM_TREES), now
        if self._trees is None:
            return None
        found: list[float] = self._trees.inplace_predict(np.array(states)).tolist()
        return [milliseconds / 1e3 for milliseconds in found]


class PredictedLatencyPolicy:
    """Replicas with the prefix, of which one is drawn by predicted latency. `attach` it to its router.

    `streaming` False, the chart's default: the end of an answer is predicted, and no time per token.
    """

    name = "llm-d predicted"

    def __init__(self, seed: int = 0, *, streaming: bool = False) -> None:
        self._streaming = streaming
        self._first, self._per_token = Model(), Model()
        self._random = Random(seed)

    def attach(self, router: Router) -> None:
        """Replace the router's policy and learn from its responses."""
        router.policy = self
        sent, first_token, finished = router.record_sent, router.record_first_token, router.record_finished
        states = dict[int, State]()  # by identity of the request in flight

        def record_sent(decision: RoutingDecision, now: float, endpoint: str | None = None) -> RoutedInFlight:
            in_flight = sent(decision, now, endpoint)
            memo = decision.choice.memo
            assert isinstance(memo, dict)
            states[id(in_flight)] = memo[in_flight.endpoint.name]
            return in_flight

        def record_first_token(in_flight: RoutedInFlight, now: float, *rest: Any) -> None:
            first_token(in_flight, now, *rest)
            if self._streaming:
                self._first.add(states[id(in_flight)], now - in_flight.sent_at)

        def record_finished(in_flight: RoutedInFlight, now: float, *rest: Any, num_output: int = 0) -> None:
            finished(in_flight, now, *rest, num_output=num_output)
            state = states.pop(id(in_flight))
            if not self._streaming:
                self._first.add(state, now - in_flight.sent_at)
            elif num_output > 1 and in_flight.first_token is not None:
                self._per_token.add(state, (now - in_flight.first_token) / (num_output - 1))

        router.record_sent, router.record_first_token = record_sent, record_first_token  # type: ignore[method-assign]
        router.record_finished = record_finished  # type: ignore[method-assign]

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Filter by prefix and by predicted seconds, then draw by score; the others follow by score."""
        candidates = list(view.candidates)
        states = [State.of(view, one) for one in candidates]
        first, per_token = (model.predict(states, view.now) for model in (self._first, self._per_token))
        kept = list(range(len(candidates)))
        for share in AFFINITY:
            kept = _with_prefix(kept, states, first, share)
        if first is None:
            scores = dict(zip(kept, _composite([states[i] for i in kept]), strict=True))
        else:
            idle = [i for i in kept if not states[i].num_running] or kept
            parts = [(TTFT_WEIGHT, [first[i] for i in idle])]
            if per_token is not None:
                parts.append((TPOT_WEIGHT, [per_token[i] for i in idle]))
            scores = dict(zip(idle, _blended(parts), strict=True))
        chosen = self._random.choices(list(scores), list(scores.values()))[0]
        order = sorted(range(len(candidates)), key=lambda i: (i != chosen, -scores.get(i, 0.0)))
        memo = {one.name: state for one, state in zip(candidates, states, strict=True)}
        ranked = tuple(candidates[i] for i in order)
        return RankedCandidates(ranked, tuple(scores.get(i, 0.0) for i in order), "drawn by predicted latency", memo)

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Do nothing: samples come with responses."""


def _with_prefix(kept: list[int], states: list[State], seconds: list[float] | None, share: float) -> list[int]:
    """Return those with this share of the prompt, unless there are none or they are expected to be too late."""
    sticky = [i for i in kept if states[i].prefix >= share]
    others = [i for i in kept if states[i].prefix < share]
    if not sticky or not others or seconds is None:
        return sticky or kept
    return kept if min(seconds[i] for i in sticky) - min(seconds[i] for i in others) > MAX_PENALTY else sticky


def _blended(parts: list[tuple[float, list[float]]]) -> list[float]:
    """Return scores of 1 to 101 hundredths: the sooner, the more. Seconds that are equal everywhere have no weight."""
    late, weights = np.zeros(len(parts[0][1])), 0.0
    for weight, seconds in parts:
        spread = max(seconds) - min(seconds)
        if spread > 1e-12:
            late += weight * (np.array(seconds) - min(seconds)) / spread
            weights += weight
    return [(int(STEPS * (1 - one)) + 1) / STEPS for one in late / (weights or 1.0)]


def _composite(states: list[State]) -> list[float]:
    """Return scores before the first model: free blocks, short queue and prefix, a third each."""
    longest = max(state.num_waiting for state in states)
    return [
        (1 - state.kv_usage + (1 - state.num_waiting / longest if longest else 1.0) + state.prefix) / 3
        for state in states
    ]
