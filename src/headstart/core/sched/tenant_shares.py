"""TenantShares: what each tenant gets while several have requests: of a step, of the places, and of the blocks.

A tenant alone has everything, and its sequences are ordered as if there were no tenants. With n tenants each has the
n-th part of the places (`max_seqs`) and of the blocks, may use more while no other below its share waits for them, and
gives them back then. Of a step a tenant gets the time that the one with the least to compute would need alone, so that
a step takes a tenant at most about n times as long as without the others. Beside a short decode step the least chunk of
a prompt may take longer than that: then its tenant owes the difference, and its next chunk waits until later steps have
made up for it. Within that time, the prompt tokens of a step are divided by deficit round robin: in rounds of a
quantum, the tenant with the fewest tokens computed first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.sched.admission import is_non_preemptible
from headstart.core.sched.limits import Limits
from headstart.core.sched.step_time import LEAST_SECONDS, LEAST_TOKENS, StepTimes
from headstart.core.sched.waiting_queue import OrderedSequences
from headstart.core.sequence import Sequence

PRESENT_SECONDS = 10.0  # a tenant's steps stay short for so long after the last request of another one
PRESENT_STEPS = 4.0  # in decode steps: their bound, so that its next request waits for no long one


class TenantStepDemand(NamedTuple):
    """The possible work of a tenant in a step: its decodes, and the tokens of prompts that run or wait."""

    num_decodes: int = 0
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class RemainingStepShare:
    """The unused part of a tenant's share of a step. `num_rows`: of decodes, and of prompts that are cached whole."""

    num_rows: int
    num_prompt_tokens: int


class TenantShares:
    """The tenants that have requests, or had some shortly before; their places, blocks, and tokens computed."""

    def __init__(self, limits: Limits, num_blocks: int, times: StepTimes) -> None:
        self._limits = limits
        self._num_blocks = num_blocks
        self._times = times
        self._num_sequences: dict[str, int] = {}
        self._left_at: dict[str, float] = {}
        self._served: dict[str, int] = {}  # tokens computed while others had requests too
        self._owed: dict[str, float] = {}  # seconds of the last chunk that were beyond the tenant's share
        self._places: Counter[str] = Counter()  # of running sequences, while a step is planned
        self._blocks: Counter[str] = Counter()

    @property
    def num_tenants(self) -> int:
        """The number of tenants with requests."""
        return len(self._num_sequences)

    def on_arrived(self, seq: Sequence) -> None:
        """Count a request. A tenant that had none begins as the one with the fewest tokens computed."""
        tenant = seq.request.tenant
        self._left_at.pop(tenant, None)
        if tenant not in self._num_sequences:
            self._served[tenant] = min(self._served.values(), default=0)
        self._num_sequences[tenant] = self._num_sequences.get(tenant, 0) + 1

    def on_finished(self, seq: Sequence, now: float) -> None:
        """Count a request that has ended."""
        tenant = seq.request.tenant
        self._num_sequences[tenant] -= 1
        if not self._num_sequences[tenant]:
            del self._num_sequences[tenant], self._served[tenant]
            self._owed.pop(tenant, None)
            self._left_at[tenant] = now

    def has_several_recent_tenants(self, now: float) -> bool:
        """Return whether several tenants have requests, or had some within PRESENT_SECONDS."""
        self._left_at = {name: at for name, at in self._left_at.items() if now - at < PRESENT_SECONDS}
        return len(self._num_sequences) + len(self._left_at) > 1

    # --------------------------------------------------------------------------------------- places and blocks

    def recount_usage(self, running: Iterable[Sequence]) -> None:
        """Count places and blocks, before a step is planned."""
        self._places.clear()
        self._blocks.clear()
        for seq in running:
            self.on_admitted(seq)

    def on_admitted(self, seq: Sequence) -> None:
        """Count a sequence that is admitted while a step is planned."""
        self._places[seq.request.tenant] += 1
        self._blocks[seq.request.tenant] += len(seq.block_ids)

    def on_preempted(self, seq: Sequence) -> None:
        """Count a sequence that is preempted while a step is planned, before it releases its blocks."""
        self._places[seq.request.tenant] -= 1
        self._blocks[seq.request.tenant] -= len(seq.block_ids)

    def record_planned_tokens(self, seq: Sequence, num_tokens: int) -> None:
        """Count planned tokens."""
        self._served[seq.request.tenant] += num_tokens

    def tenant_order_key(self, tenant: str) -> tuple[float, ...]:
        """Return the order of the tenants: those below their share first, then by the tokens computed for them."""
        return self.reaches_place_or_block_share(tenant), self._served[tenant]

    def reaches_place_or_block_share(self, tenant: str) -> bool:
        """Return whether a tenant uses its share of the places or of the blocks, or more."""
        return self._places[tenant] >= self._max_places or self.exceeds_block_share(tenant)

    def exceeds_block_share(self, tenant: str, more: int = 0) -> bool:
        """Return whether a tenant's running sequences, with `more` blocks, hold more than its share of the blocks."""
        return self._blocks[tenant] + more > self._num_blocks // self.num_tenants

    def last_sequence_above_share(self, running: OrderedSequences, *, needs_place: bool) -> Sequence | None:
        """Return the last running sequence of a tenant with more places, or more blocks, than its share."""
        for index in range(len(running) - 1, -1, -1):
            seq = running[index]
            tenant = seq.request.tenant
            is_above = self._places[tenant] > self._max_places if needs_place else self.exceeds_block_share(tenant)
            if is_above and not is_non_preemptible(seq):
                return seq
        return None

    @property
    def _max_places(self) -> int:
        return max(self._limits.max_seqs // self.num_tenants, 1)

    # ---------------------------------------------------------------------------------------------------- steps

    def step_shares(self, demands: Mapping[str, TenantStepDemand], num_prompts: int) -> dict[str, RemainingStepShare]:
        """Return the share of each tenant in a step. `num_prompts`: that run or wait."""
        max_tokens = self._limits.max_batched_tokens
        num_decodes = sum(demand.num_decodes for demand in demands.values())
        row, token = self._times.marginal_decode_seconds(num_decodes), self._times.seconds_per_token
        seconds = min(self._seconds_alone(demand, row) for demand in demands.values())
        if self._left_at and self._times.bound is not None:
            seconds = min(seconds, max(PRESENT_STEPS * self._times.decode_step_seconds(1), LEAST_SECONDS))
        rows = {name: max_tokens for name in demands}
        wants = {name: demand.num_prompt_tokens for name, demand in demands.items()}
        for name, demand in demands.items():
            prompts = min(token * min(demand.num_prompt_tokens, LEAST_TOKENS), seconds / 2)
            if row:
                rows[name] = max(int((seconds - prompts) / row), 1)
            if token and demand.num_prompt_tokens:
                left = max(seconds - row * min(demand.num_decodes, rows[name]), prompts)
                wants[name] = self._affordable(name, left, demand.num_prompt_tokens)
        if not any(wants.values()) and not any(demand.num_decodes for demand in demands.values()):
            first = min(demands, key=lambda name: self._served[name])  # no step is empty
            wants[first] = min(demands[first].num_prompt_tokens, LEAST_TOKENS)
        num_rows = sum(min(demand.num_decodes, rows[name]) for name, demand in demands.items())
        most = self._times.max_prompt_tokens(num_rows, num_prompts)
        total = max_tokens - num_rows
        tokens = self._divided(total if most is None else min(total, most), wants)
        return {name: RemainingStepShare(rows[name], tokens[name]) for name in demands}

    def _affordable(self, name: str, left: float, num_prompt_tokens: int) -> int:
        """Return the prompt tokens for `left` seconds, less what the tenant owes: at least a chunk, or none."""
        token, left = self._times.seconds_per_token, left - self._owed.pop(name, 0.0)
        num = min(num_prompt_tokens, max(int(left / token), LEAST_TOKENS)) if left >= 0 else 0
        if num * token > left:
            self._owed[name] = num * token - left
        return num

    def _seconds_alone(self, demand: TenantStepDemand, row: float) -> float:
        """Return the duration of a step with the tokens of one tenant; 0 while nothing is known."""
        most = self._times.max_prompt_tokens(demand.num_decodes)
        num_tokens = min(demand.num_prompt_tokens, self._limits.max_batched_tokens if most is None else most)
        one, prompts = self._times.decode_step_seconds(1), self._times.seconds_per_token * num_tokens
        return one + row * (demand.num_decodes - 1) + prompts if demand.num_decodes else max(one, prompts)

    def _divided(self, total: int, wants: Mapping[str, int]) -> dict[str, int]:
        """Divide prompt tokens in rounds of at most LEAST_TOKENS; what one does not want goes to the others."""
        found = dict.fromkeys(wants, 0)
        order: list[str] = [name for name in sorted(wants, key=lambda name: self._served[name]) if wants[name]]
        while total and order:
            quantum = min(max(total // len(order), 1), LEAST_TOKENS)
            for name in order:
                num = min(quantum, wants[name] - found[name], total)
                found[name] += num
                total -= num
            order = [name for name in order if found[name] < wants[name]]
        return found
