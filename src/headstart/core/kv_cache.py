"""KVCache: match, extend, publish and release the blocks of one sequence.

The only place where tokens become blocks. Reuse is contiguous from position 0 or it is nothing, in whole blocks, and
leaves at least one token to compute (law 3).
"""

from typing import NamedTuple

from headstart.core.blocks import BlockPool
from headstart.core.hashing import extend_hashes
from headstart.core.request import CacheMode, Sequence


class Hit(NamedTuple):
    """Published blocks a sequence could take over, and how many of its tokens they save."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


NO_HIT = Hit()


class KVCache:
    """The block tables over one pool. `enabled` False: nothing is hashed, found or published."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled

    def name_blocks(self, seq: Sequence) -> None:
        """Names every full block of the sequence that has no name yet; called on arrival, off the step's path."""
        if self.enabled and seq.request.cache is not CacheMode.BYPASS:
            extend_hashes(seq.block_hashes, seq.token_ids, self.block_size, seq.root)

    def match(self, seq: Sequence) -> Hit:
        """The longest published prefix of a sequence that has no blocks. Changes nothing but the names it lacks.

        When every token is cached, the last block is in the hit and its last token is not: that one is recomputed
        without being written, because its logits are needed.
        """
        if not self._reads(seq):
            return NO_HIT
        self.name_blocks(seq)
        raw = seq.token_ids.tobytes()
        stride = self.block_size * seq.token_ids.itemsize
        blocks = self.pool.lookup(seq.block_hashes, seq.root, raw, stride)
        num_tokens = min(len(blocks) * self.block_size, len(seq.token_ids) - 1)
        return Hit(tuple(blocks), num_tokens) if num_tokens > 0 else NO_HIT

    def num_new_blocks(self, seq: Sequence, hit: Hit, num_tokens: int) -> int:
        """Blocks to allocate so that the table covers `num_tokens`. Changes nothing."""
        return max(-(-num_tokens // self.block_size) - len(seq.block_ids) - len(hit.block_ids), 0)

    def num_available(self, hit: Hit) -> int:
        """Free blocks that are left once the hit is taken over: an idle hit is not also free (vLLM #3402)."""
        return self.pool.num_free - self.pool.num_idle(hit.block_ids)

    def extend(self, seq: Sequence, hit: Hit, num_tokens: int) -> bool:
        """Takes over `hit` and makes the table cover `num_tokens`; or changes nothing and says False."""
        new = self.num_new_blocks(seq, hit, num_tokens)
        if not new and not hit.block_ids:
            return True
        if new > self.num_available(hit):
            return False
        if hit.block_ids:
            assert not seq.block_ids, f"{seq.request_id} takes over a prefix but has blocks already"
            self.pool.acquire(hit.block_ids)
            seq.block_ids.extend(hit.block_ids)
            seq.num_computed_tokens = hit.num_tokens
            seq.num_published_blocks = len(hit.block_ids)
        seq.block_ids += self.pool.allocate(new)
        return True

    def publish(self, seq: Sequence) -> None:
        """Publishes what has become full and computed. Only after the forward pass that wrote it has returned."""
        full = seq.num_computed_tokens // self.block_size
        if full <= seq.num_published_blocks or not self._writes(seq):
            return
        extend_hashes(seq.block_hashes, seq.token_ids, self.block_size, seq.root, until=full * self.block_size)
        size = self.block_size
        for index in range(seq.num_published_blocks, full):
            parent = seq.block_hashes[index - 1] if index else seq.root
            tokens = seq.token_ids[index * size : (index + 1) * size].tobytes()
            self.pool.publish(seq.block_ids[index], seq.block_hashes[index], parent, tokens)
        seq.num_published_blocks = full

    def release(self, seq: Sequence, *, failed: bool = False) -> None:
        """Gives the whole table back. `failed`: its content may not be finite, so nobody may find it again."""
        blocks = seq.block_ids
        if failed:
            self.pool.distrust(blocks)
        self.pool.release(blocks)
        seq.block_ids = []
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0

    def _reads(self, seq: Sequence) -> bool:
        request = seq.request
        return self.enabled and request.cache is not CacheMode.BYPASS and request.sampling.prompt_logprobs is None

    def _writes(self, seq: Sequence) -> bool:
        return self.enabled and seq.request.cache is CacheMode.READ_WRITE
