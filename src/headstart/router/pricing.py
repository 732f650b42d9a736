"""Pricing: the cost of a request at a replica in milliseconds, or at all replicas at once.

The parts: the backlog of pending prefills, the prefill of the tokens that are not cached, and the steps that both need,
which decodes make longer; and the decodes themselves, in which every stream makes each step longer for all others.

`price_all` uses arrays, `price_one` plain numbers, which is cheaper for few replicas: a test holds their results equal.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headstart.router.load import GRACE_MS, LATENESS, MAX_AGE, Load
from headstart.router.step_rates import STEP_TOKENS, StepRates

EVICTED = 0.75  # share of evicted tokens that will be recomputed; 0.25 to 1.5 were tried
DECODE = 0.08  # share of the delay of decodes, own and others', that counts as delay of a first token

Array = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)


class Priced(Protocol):
    """A replica to price."""

    @property
    def load(self) -> Load: ...


class Price(NamedTuple):
    """The cost at one replica, in milliseconds; `factor` is the slowness of the replica at present."""

    backlog: float
    prefill: float
    decode: float
    factor: float

    @property
    def total(self) -> float:
        """The expected time to the first token."""
        return (self.backlog + self.prefill) * self.factor

    @property
    def price(self) -> float:
        """The total plus the cost to decodes, without evictions."""
        return (self.backlog + self.prefill + self.decode) * self.factor


class Costs(NamedTuple):
    """One value per replica, in milliseconds; `factor` is the slowness of the replica at present."""

    backlog: Array
    prefill: Array
    decode: Array
    factor: Array

    @property
    def total(self) -> Array:
        """The expected time to the first token."""
        return (self.backlog + self.prefill) * self.factor

    @property
    def price(self) -> Array:
        """The total plus the cost to decodes, without evictions."""
        return (self.backlog + self.prefill + self.decode) * self.factor


def price_all(endpoints: Sequence[Priced], prompt_tokens: int, hit_tokens: Sequence[int], now: float) -> Costs:
    """Return the costs of a prompt at each replica, of which `hit_tokens` are cached there."""
    learner = endpoints[0].load.learner
    rates, output = learner.rates, learner.mean_output
    loads = [endpoint.load for endpoint in endpoints]
    state = learner.rows.of(loads).T
    tokens, pairs, pending, streams, resident, prompts, head_tokens, head_pairs, since, started = state[:10]
    is_paced, waiting, waiting_at, mean_prefill_ms = state[10:]
    if learner.is_doubtful:
        rates = StepRates(0.0, 0.0, 0.0, rates.token, 0.0)
    own = np.maximum(prompt_tokens - np.array(hit_tokens, dtype=np.float64), 1.0)
    step = rates.step + rates.stream * streams + rates.resident * (resident + streams * (output / 2))
    steps = np.ceil(tokens / STEP_TOKENS)
    head = rates.token * head_tokens + rates.pair * head_pairs + step
    elapsed = 1e3 * (now - since)
    is_busy = pending > 0
    backlog = rates.token * tokens + rates.pair * pairs + steps * step
    backlog = np.maximum(backlog - np.where(is_busy, np.minimum(np.maximum(elapsed, 0.0), head), 0.0), 0.0)
    backlog += np.where(~is_busy & (streams > 0), 0.5 * step, 0.0)
    foreign = np.where(now - waiting_at <= MAX_AGE, np.maximum(waiting - pending, 0.0), 0.0)  # of other routers
    backlog += foreign * mean_prefill_ms
    more = np.ceil((tokens + own) / STEP_TOKENS) - steps
    prefill = rates.token * own + rates.pair * own * (prompt_tokens - own / 2) + more * step
    decode = _decode_ms(rates, output, streams + pending, resident + prompts, prompt_tokens)
    expected = head + rates.token * np.minimum(tokens - head_tokens, STEP_TOKENS)
    late = np.where(is_busy, 1e3 * (now - started) / (LATENESS * expected + GRACE_MS), 1.0)
    factor = np.maximum(late, 1.0)
    if not learner.is_doubtful:
        for index in np.flatnonzero(is_paced):
            factor[index] *= loads[index].pace.factor(now)
    return Costs(backlog, prefill, decode, factor)


def price_one(endpoint: Priced, prompt_tokens: int, hit_tokens: int, now: float) -> Price:
    """Return the cost of a prompt at one replica, of which `hit_tokens` are cached there: that of `price_all`."""
    load = endpoint.load
    learner = load.learner
    rates, output, is_doubtful = learner.rates, learner.mean_output, learner.is_doubtful
    tokens, pairs, pending, streams, resident, prompts, head_tokens, head_pairs, since, started, *rest = load.row
    is_paced, waiting, waiting_at, mean_prefill_ms = rest
    if is_doubtful:
        rates = StepRates(0.0, 0.0, 0.0, rates.token, 0.0)
    own = max(prompt_tokens - hit_tokens, 1)
    step = rates.step + rates.stream * streams + rates.resident * (resident + streams * (output / 2))
    steps = ceil(tokens / STEP_TOKENS)
    head = rates.token * head_tokens + rates.pair * head_pairs + step
    backlog = rates.token * tokens + rates.pair * pairs + steps * step
    factor = 1.0
    if pending > 0:
        backlog = max(backlog - min(max(1e3 * (now - since), 0.0), head), 0.0)
        expected = head + rates.token * min(tokens - head_tokens, STEP_TOKENS)
        factor = max(1e3 * (now - started) / (LATENESS * expected + GRACE_MS), 1.0)
    else:
        backlog = max(backlog, 0.0)
        if streams > 0:
            backlog += 0.5 * step
    if now - waiting_at <= MAX_AGE:
        backlog += max(waiting - pending, 0.0) * mean_prefill_ms
    more = ceil((tokens + own) / STEP_TOKENS) - steps
    prefill = rates.token * own + rates.pair * own * (prompt_tokens - own / 2) + more * step
    decode = _decode_ms(rates, output, streams + pending, resident + prompts, prompt_tokens)
    if is_paced and not is_doubtful:
        factor *= load.pace.factor(now)
    return Price(backlog, prefill, decode, factor)


def _decode_ms(rates: StepRates, output: float, streams: Numbers, resident: Numbers, prompt_tokens: int) -> Numbers:
    """Return the weighted delay of decodes: of the request's own by others, and of others' by it."""
    grown = output / 2
    others = rates.stream * streams + rates.resident * (resident + streams * grown)
    own = rates.stream + rates.resident * (prompt_tokens + grown)
    return DECODE * output * (others + own * streams)
