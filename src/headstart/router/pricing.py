"""Pricing: the cost of a request at a replica in milliseconds, or at all replicas at once.

The parts: the backlog of pending prefills, the prefill of the tokens that are not cached, and the steps that both need,
which decodes make longer; and the decodes themselves, which each other stream slows down, and each prefill stops.
A full cache makes requests wait for blocks: those of a prompt and of an answer of mean length, for this request and all
in flight. Each stream releases its share of that after the time of such an answer. The backlog is the wait, if that is
longer than the queue of prefills. As many requests come in that time as are in flight (Little's law), and each waits
for the blocks that this one takes: that is counted with the decodes.

`cost_at_each` uses arrays, or compiled code (model/kernels/hashes/prices.cpp), `cost_at_replica` plain numbers, which
is cheaper for few replicas: a test holds their results equal.
"""

from array import array
from collections.abc import Sequence
from math import ceil, inf
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headstart.router.load import GRACE_MS, LATENESS, MAX_AGE, ReplicaLoad
from headstart.router.step_rates import StepRates

EVICTED = 0.75  # share of evicted tokens that will be recomputed; 0.25 to 1.5 were tried
STALE_STEPS = 3.0  # a running step that lasts this many times its expectation, and
STALE_MS = 20.0  # so much longer, is not one: its end was not seen
IS_PACED = 10  # its place in ReplicaLoad.pricing_row
DECODE = 0.06  # share of the delay of decodes, own and others', that counts as delay of a first token
STALL = 0.75  # share of a prefill that counts as much, if all requests there but this one stand still for it

Array = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)


class PriceableReplica(Protocol):
    """A replica to price."""

    @property
    def load(self) -> ReplicaLoad: ...


class PromptCost(NamedTuple, Generic[Numbers]):
    """The cost at one replica, or at each of several, in milliseconds; `factor` is its slowness at present."""

    backlog: Numbers
    prefill: Numbers
    decode: Numbers  # the delay of decodes, and that of later requests for lack of blocks
    factor: Numbers
    wait: Numbers  # for blocks, as far as the backlog is that
    requests: Numbers  # in flight there; 0 where they are not counted

    @property
    def expected_ttft_ms(self) -> Numbers:
        """The expected time to the first token."""
        return (self.backlog + self.prefill) * self.factor

    @property
    def cost_without_evictions(self) -> Numbers:
        """The total plus the cost to decodes, without evictions."""
        return (self.backlog + self.prefill + self.decode) * self.factor

    def extra_stall_cost(self, fewest: float) -> Numbers:
        """The price of answers that stand still, less that of the `fewest` at a replica, which is common to all."""
        share = self.requests / (self.requests + 1.0) - fewest / (fewest + 1.0)
        return STALL * self.prefill * share * self.factor


def cost_at_each(
    endpoints: Sequence[PriceableReplica], prompt_tokens: int, hit_tokens: Sequence[int] | Array, now: float
) -> PromptCost[Array]:
    """Return the costs of a prompt at each replica, of which `hit_tokens` are cached there."""
    learner = endpoints[0].load.learner
    rates, output = learner.rates, learner.mean_output
    loads = [endpoint.load for endpoint in endpoints]
    state = learner.rows.rows_for_loads(loads).T
    if learner.is_contradicted_by_samples:
        rates = StepRates(0.0, 0.0, 0.0, rates.token, 0.0)
    own = np.maximum(prompt_tokens - np.asarray(hit_tokens, dtype=np.float64), 1.0)
    pace: Array = np.ones(len(loads))
    for index in np.flatnonzero(state[IS_PACED]) if not learner.is_contradicted_by_samples else ():
        pace[index] = learner.slowdown_versus_fleet(loads[index].pace, now)
    if learner.prices is not None:
        limits = (STALE_STEPS, STALE_MS, MAX_AGE, LATENESS, GRACE_MS, DECODE, learner.knows_requests_in_flight)
        numbers = array("d", (*rates, output, prompt_tokens, now, not learner.is_contradicted_by_samples, *limits))
        costs = np.empty((len(PromptCost._fields), len(loads)))
        at, own_at, pace_at, to = (part.ctypes.data for part in (state, own, pace, costs))
        learner.prices(len(loads), at, own_at, pace_at, numbers.buffer_info()[0], to)
        return PromptCost(*costs)
    tokens, pairs, pending, streams, resident, prompts, head_tokens, head_pairs, since, started = state[:IS_PACED]
    foreign, foreign_at, mean_prefill_ms, room, size, began_at, now_tokens, now_pairs, *rest = state[IS_PACED + 1 :]
    rest_tokens, rest_pairs, step_tokens, chain, other_streams, other_resident = rest
    is_reported = now - foreign_at <= MAX_AGE
    decoding = streams + np.where(is_reported, other_streams, 0.0)
    attended = resident + np.where(is_reported, other_resident, 0.0)
    step = rates.step + rates.stream * decoding + rates.resident * (attended + decoding * (output / 2))
    steps = np.ceil(tokens / step_tokens)
    head = rates.token * head_tokens + rates.pair * head_pairs + np.ceil(head_tokens / step_tokens) * step
    elapsed = 1e3 * (now - since)
    is_busy = pending > 0
    backlog = rates.token * tokens + rates.pair * pairs + steps * step
    backlog = np.maximum(backlog - np.where(is_busy, np.minimum(np.maximum(elapsed, 0.0), head), 0.0), 0.0)
    backlog += np.where(~is_busy & (streams > 0), 0.5 * step, 0.0)
    if not learner.is_contradicted_by_samples:
        running: Array = step + rates.token * now_tokens + rates.pair * now_pairs
        elapsed: Array = 1e3 * (now - began_at) / pace
        is_seen: NDArray[np.bool_] = (began_at > -inf) & ((streams > 0) | is_busy)
        is_seen &= (streams <= 0) | (elapsed < STALE_STEPS * running + STALE_MS)
        left: Array = rest_tokens - now_tokens
        left_steps: Array = np.maximum(np.ceil(left / step_tokens), chain)
        queued: Array = rates.token * left + rates.pair * (rest_pairs - now_pairs) + left_steps * step
        unseen: Array = np.minimum(np.maximum(elapsed - running, 0.0), np.maximum(head - running, 0.0))
        queued -= np.where(streams <= 0, unseen, 0.0)
        backlog = np.where(is_seen, np.maximum(running - elapsed, 0.0) + np.maximum(queued, 0.0), backlog)
        tokens, steps = np.where(is_seen, left, tokens), np.where(is_seen, left_steps, steps)
    backlog += np.where(is_reported, foreign * mean_prefill_ms, 0.0)
    answers = (streams + pending) * output
    missing = np.where(streams > 0, np.maximum(own + output + answers - room, 0.0), 0.0)
    release_ms = (streams + pending) * output * step / np.maximum(np.maximum(size - room + answers, 1.0) * streams, 1.0)
    wait, later = missing * release_ms, np.where(missing > 0, own * (streams + pending) * release_ms, 0.0)
    backlog = np.maximum(backlog, wait)
    more = np.maximum(np.ceil((tokens + own) / step_tokens) - steps, 0.0)
    prefill = rates.token * own + rates.pair * own * (prompt_tokens - own / 2) + more * step
    decode = _decode_ms(rates, output, decoding + pending, attended + prompts, prompt_tokens) + later
    expected = head + rates.token * np.minimum(state[0] - head_tokens, step_tokens)
    late = np.where(is_busy, 1e3 * (now - started) / (LATENESS * expected + GRACE_MS), 1.0)
    requests = decoding + pending if learner.knows_requests_in_flight else np.zeros(len(loads))
    return PromptCost(backlog, prefill, decode, np.maximum(late, 1.0) * pace, wait, requests)


def cost_at_replica(endpoint: PriceableReplica, prompt_tokens: int, hit_tokens: int, now: float) -> PromptCost[float]:
    """Return the cost of a prompt at one replica, of which `hit_tokens` are cached there: that of `cost_at_each`."""
    load = endpoint.load
    learner = load.learner
    rates, output, is_contradicted = learner.rates, learner.mean_output, learner.is_contradicted_by_samples
    tokens, pairs, pending, streams, resident, prompts, head_tokens, head_pairs, since, started, *rest = (
        load.pricing_row
    )
    is_paced, foreign, foreign_at, mean_prefill_ms, room, size, began_at, now_tokens, now_pairs, *rest = rest
    rest_tokens, rest_pairs, step_tokens, chain, other_streams, other_resident = rest
    is_reported = now - foreign_at <= MAX_AGE
    if not is_reported:
        other_streams = other_resident = 0.0
    if is_contradicted:
        rates = StepRates(0.0, 0.0, 0.0, rates.token, 0.0)
    own = max(prompt_tokens - hit_tokens, 1)
    decoding, attended = streams + other_streams, resident + other_resident
    step = rates.step + rates.stream * decoding + rates.resident * (attended + decoding * (output / 2))
    steps = ceil(tokens / step_tokens)
    head = rates.token * head_tokens + rates.pair * head_pairs + ceil(head_tokens / step_tokens) * step
    backlog = rates.token * tokens + rates.pair * pairs + steps * step
    factor = 1.0
    if pending > 0:
        backlog = max(backlog - min(max(1e3 * (now - since), 0.0), head), 0.0)
        expected = head + rates.token * min(tokens - head_tokens, step_tokens)
        factor = max(1e3 * (now - started) / (LATENESS * expected + GRACE_MS), 1.0)
    else:
        backlog = max(backlog, 0.0)
        if streams > 0:
            backlog += 0.5 * step
    pace = learner.slowdown_versus_fleet(load.pace, now) if is_paced and not is_contradicted else 1.0
    if began_at > -inf and (streams > 0 or pending > 0) and not is_contradicted:
        running = step + rates.token * now_tokens + rates.pair * now_pairs
        elapsed = 1e3 * (now - began_at) / pace
        if streams <= 0 or elapsed < STALE_STEPS * running + STALE_MS:
            tokens = rest_tokens - now_tokens
            steps = max(ceil(tokens / step_tokens), chain)
            queued = rates.token * tokens + rates.pair * (rest_pairs - now_pairs) + steps * step
            if streams <= 0:  # the ends of steps are not seen
                queued -= min(max(elapsed - running, 0.0), max(head - running, 0.0))
            backlog = max(running - elapsed, 0.0) + max(queued, 0.0)
    if is_reported:
        backlog += foreign * mean_prefill_ms
    answers, wait, later = (streams + pending) * output, 0.0, 0.0
    if streams > 0 and own + output + answers > room:
        release_ms = (streams + pending) * output * step / (max(size - room + answers, 1.0) * streams)  # for a token
        wait, later = (own + output + answers - room) * release_ms, own * (streams + pending) * release_ms
        backlog = max(backlog, wait)
    more = max(ceil((tokens + own) / step_tokens) - steps, 0)
    prefill = rates.token * own + rates.pair * own * (prompt_tokens - own / 2) + more * step
    decode = _decode_ms(rates, output, decoding + pending, attended + prompts, prompt_tokens) + later
    return PromptCost(
        backlog, prefill, decode, factor * pace, wait, decoding + pending if learner.knows_requests_in_flight else 0.0
    )


def _decode_ms(rates: StepRates, output: float, streams: Numbers, resident: Numbers, prompt_tokens: int) -> Numbers:
    """Return the weighted delay of decodes: of the request's own by others, and of others' by it."""
    grown = output / 2
    others = rates.stream * streams + rates.resident * (resident + streams * grown)
    own = rates.stream + rates.resident * (prompt_tokens + grown)
    return DECODE * output * (others + own * streams)
