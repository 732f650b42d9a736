"""The policy `oracle`: the earliest first token of one request, from the exact state of simulated replicas.

It reads what no router can know: the contents of every pool, the progress of every sequence, the true step cost, the
present speed of a machine, the time left of the step that is running, and the lengths of outputs. It is greedy: what it
evicts and which decodes it slows down has no price, so a policy that considers that may be better: no bound for fleets.
"""

from collections.abc import Mapping

from headstart.core.cache.hashing import BlockHash
from headstart.core.sequence import Sequence
from headstart.router.policies.policy import Candidate, Policy, PolicyInput, RankedCandidates, rank_by_number
from headstart.sim.sim_replica import SimReplica
from headstart.sim.step_cost import StepWork

ORACLE = "oracle"


class OraclePolicy(Policy):
    """The earliest first token of a fleet whose state is read. `replicas` is the fleet's own mapping."""

    name = ORACLE

    def __init__(self, replicas: Mapping[str, SimReplica]) -> None:
        self._replicas = replicas

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by the time to the first token."""
        numbers = [self._seconds(view, candidate) for candidate in view.candidates]
        return rank_by_number(view, [1e3 * seconds for seconds in numbers], "earliest first token")

    def _seconds(self, view: PolicyInput, candidate: Candidate) -> float:
        """Return the expected seconds to the first token at a replica, without the noise of steps to come."""
        replica = self._replicas[candidate.name]
        size = replica.profile.block_size
        block_hashes = view.request.prompt.block_hashes(size)
        queue = ReplicaQueue(replica)
        cached = min(queue.num_cached_blocks(block_hashes) * size, view.num_prompt_tokens - 1)
        new = queue.tokens + view.num_prompt_tokens - cached
        pairs = queue.pairs + (view.num_prompt_tokens - cached) * (view.num_prompt_tokens + cached) / 2
        num_steps = -(-new // replica.profile.max_batched_tokens)
        step = StepWork(queue.streams, queue.resident, round(new / num_steps), pairs / num_steps)
        seconds = num_steps * replica.profile.cost.seconds(step) * replica.speed.factor
        blocks = -(-view.num_prompt_tokens // size) - cached // size
        return max(replica.step_ends - view.now, 0.0) + seconds + queue.block_wait_seconds(blocks)


class ReplicaQueue:
    """The work of a replica when its running step has ended."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self.tokens = self.streams = self.resident = 0
        self.pairs = 0.0
        self._blocks = 0  # that waiting sequences will take
        self._coming: set[BlockHash] = set()  # to be published by sequences in flight
        self._left: list[tuple[int, int]] = []  # (output tokens to come, blocks) of decoding sequences
        size = replica.profile.block_size
        for seq in replica.scheduler.running:
            self._add(seq, seq.num_computed_tokens + seq.num_scheduled_tokens, len(seq.block_ids))
        for seq in replica.scheduler.waiting:
            hit = min(self.num_cached_blocks(seq.block_hashes) * size, len(seq.token_ids) - 1)
            self._add(seq, hit, 0)
            self._blocks += -(-len(seq.token_ids) // size) - hit // size

    def num_cached_blocks(self, block_hashes: list[BlockHash]) -> int:
        """Return the number of leading blocks that are cached, or will be when what is queued has run."""
        contains, coming = self._replica.pool.contains, self._coming
        known = 0
        while known < len(block_hashes) and (contains(block_hashes[known]) or block_hashes[known] in coming):
            known += 1
        return known

    def block_wait_seconds(self, num_blocks: int) -> float:
        """Return the seconds until enough decodes have ended for so many more blocks."""
        missing = self._blocks + num_blocks - self._replica.pool.num_free
        if missing <= 0:
            return 0.0
        cost, factor = self._replica.profile.cost, self._replica.speed.factor
        step = cost.seconds(StepWork(self.streams, self.resident)) * factor
        for left, blocks in sorted(self._left):
            missing -= blocks
            if missing <= 0:
                return left * step
        return max((left for left, _ in self._left), default=0) * step

    def _add(self, seq: Sequence, done: int, blocks: int) -> None:
        total = len(seq.token_ids)
        new = total - done  # 0: the running step samples its next token
        left = seq.request.sampling.max_tokens - seq.num_output_tokens
        if seq.num_published_blocks < len(seq.block_hashes):
            self._coming.update(seq.block_hashes)
        if new <= 1 and left == 1 and seq.num_scheduled_tokens:
            return  # it ends with the running step
        self._left.append((left, blocks))
        if new <= 1 and done >= len(seq.request.prompt) - 1:
            self.streams += 1
            self.resident += total
            return
        self.tokens += new
        self.pairs += new * (done + new / 2)
