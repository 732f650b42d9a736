"""KVCache: hash, match, extend, publish and release the blocks of one sequence.

The only place where tokens become blocks. A reused prefix is contiguous from position 0, consists of whole blocks, and
leaves at least one token to compute (invariant 3). Leading blocks that belong to a public pinned prefix have hashes
without an isolation domain; all blocks after them are hashed with the request's domain.
"""

from array import array
from collections.abc import Container, Iterable
from typing import NamedTuple

from headstart.core.batch import Saves
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.checkpoints import RecurrentCheckpoints
from headstart.core.cache.events import BlockEventLog
from headstart.core.cache.hashing import (
    BlockHash,
    HashChain,
    checkpoint_page_hash,
    extend_block_hashes,
    private_parent_hash_for_domain,
    root_hash,
)
from headstart.core.request import CacheMode, Request
from headstart.core.sequence import Sequence, empty_block_table


class PrefixHit(NamedTuple):
    """Published blocks that can replace a sequence's own from block `start_block` on.

    `num_tokens` is the number of its tokens that are computed after that. With recurrent layers they end at a
    checkpoint, whose pages are `state`, and blocks behind it are not written again.
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    start_block: int = 0
    state: tuple[int, ...] = ()


NO_HIT = PrefixHit()


class KVCache:
    """The block tables over one pool. `enabled` False: nothing is hashed, found or published."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        model: bytes = b"",
        enabled: bool = True,
        chain: HashChain | None = None,
        state_pages: int = 0,
    ) -> None:
        self.pool = pool
        self.checkpoints = RecurrentCheckpoints(pool, block_size, state_pages)
        self.block_size = block_size
        self.enabled = enabled
        self.public_hashes: Container[BlockHash] = frozenset()  # block hashes of public pinned prefixes
        self.event_log: BlockEventLog | None = None
        self._model = model
        self._chain = chain

    def new_sequence(self, request: Request, order: int) -> Sequence:
        """Create a sequence with its blocks hashed: on arrival, outside the step."""
        root = root_hash(self._model, adapter=request.adapter, domain=request.domain)
        seq = Sequence(request, request.prompt[:], root, root, order)
        if self.enabled and request.cache is not CacheMode.BYPASS:
            if request.domain and self.public_hashes:
                self._hash_public_blocks(seq)
            self.hash_blocks(seq)
        return seq

    def hash_blocks(self, seq: Sequence, until: int | None = None) -> None:
        """Hash every full block of `token_ids[:until]` that has no hash yet."""
        hashes = seq.block_hashes
        at_border = len(hashes) == seq.num_public_blocks
        parent = seq.region if at_border else None
        extend_block_hashes(
            hashes, seq.token_ids, self.block_size, seq.root, until=until, parent=parent, chain=self._chain
        )

    def match_prefix(self, seq: Sequence) -> PrefixHit:
        """Return the longest run of published blocks from the first still needed on. Changes nothing.

        For a waiting sequence that is a prefix. For one in mid prefill it is what others have published meanwhile;
        taking it over drops its last block if that is partly filled. When every token is cached, the hit includes the
        last block but not its last token, which is recomputed for its logits and not written.
        """
        if not self.may_read_cache(seq):
            return NO_HIT
        start, block_hashes = seq.next_start, seq.block_hashes
        index = start // self.block_size
        if index >= len(block_hashes) or not self.pool.contains(block_hashes[index]):
            return NO_HIT
        blocks = self._lookup(seq, index)
        if self.checkpoints.num_pages:
            most = min(index + len(blocks), (len(seq.token_ids) - 1) // self.block_size)
            depth, state = self.checkpoints.find_deepest(seq.block_hashes, most)
            num_tokens = depth * self.block_size
            if num_tokens <= start:  # a sequence that begins still takes over the blocks that it need not write
                return NO_HIT if start else PrefixHit(tuple(blocks))
            return PrefixHit(tuple(blocks), num_tokens, index, state)
        num_tokens = min((index + len(blocks)) * self.block_size, len(seq.token_ids) - 1)
        return PrefixHit(tuple(blocks), num_tokens, index) if num_tokens > start else NO_HIT

    def num_new_blocks(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> int:
        """Return the number of blocks to allocate so that the table covers `num_tokens`. Changes nothing."""
        covered = hit.start_block + len(hit.block_ids) if hit.block_ids else len(seq.block_ids)
        return max(-(-num_tokens // self.block_size) - covered, 0)

    def num_available_after_hit(self, seq: Sequence, hit: PrefixHit, *, last_resort: bool = False) -> int:
        """Return the free blocks left after the hit is taken over: an idle hit is not also free (vLLM #3402)."""
        return self.pool.num_available_after_acquire(
            hit.block_ids + hit.state, seq.request.tenant, last_resort=last_resort
        )

    def adopt_hit_and_extend_table(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, *, last_resort: bool = False
    ) -> bool:
        """Take over `hit` and extend the table to cover `num_tokens`; otherwise return False and change nothing.

        `last_resort` permits the eviction of other tenants' protected blocks.
        """
        if not hit.block_ids and num_tokens <= len(seq.block_ids) * self.block_size:
            return True
        new = self.num_new_blocks(seq, hit, num_tokens)
        dropped = seq.block_ids[hit.start_block :] if hit.block_ids else empty_block_table()
        own = min(max(len(seq.block_ids) - seq.num_published_blocks, 0), len(dropped))  # the others are in the hit too
        enough = new <= self.pool.num_scratch  # scratch blocks count against no share and are in no hit
        if not enough and new > self.num_available_after_hit(seq, hit, last_resort=last_resort) + own:
            return False
        if hit.block_ids:
            found = array("i", hit.block_ids)
            self.pool.acquire(found)
            if hit.state:
                self.pool.acquire(hit.state)
                self.checkpoints.touch_earlier(seq, hit.num_tokens // self.block_size)
            if dropped:
                assert own <= 1, "only a partial block may go"
                self.pool.release(dropped)
            self._begin_from(seq, hit)
            seq.block_ids[hit.start_block :] = found
            seq.num_computed_tokens = hit.num_tokens
            seq.num_published_blocks = len(seq.block_ids)
            seq.taken.append(range(hit.start_block, len(seq.block_ids)))
        if new:
            request = seq.request
            zeroed = seq.recompute is not None  # no NaN of an earlier owner may reach the second run
            new_blocks = self.pool.allocate(
                new, request.tenant, by=request.request_id, last_resort=last_resort, zeroed=zeroed
            )
            seq.block_ids.extend(new_blocks)
        return True

    def _begin_from(self, seq: Sequence, hit: PrefixHit) -> None:
        """Note what the next chunk reads its state from, and where a checkpoint was missed."""
        depth, found = hit.num_tokens // self.block_size, hit.start_block + len(hit.block_ids)
        seq.state = hit.state
        seq.started_from = seq.block_hashes[depth - 1] if hit.state else None
        seq.junction = found if self.checkpoints.num_pages and found > depth else 0

    def assign_chunk_state_blocks(self, seq: Sequence, start: int, end: int) -> tuple[tuple[int, ...], Saves]:
        """Return the blocks that a planned chunk reads its state from, and those that it keeps states in.

        They are held until `checkpoints.end`.
        """
        state, seq.state = seq.state, ()
        return state, self.allocate_saves(seq, start, end)

    def allocate_saves(self, seq: Sequence, start: int, end: int) -> Saves:
        """Return the places in `[start, end)`, in tokens, where a state is kept, and blocks for it."""
        return (
            self.checkpoints.allocate_pages(seq, start, end)
            if self.checkpoints.num_pages and self.may_publish(seq)
            else ()
        )

    def publish_full_blocks(self, seq: Sequence) -> None:
        """Publish blocks that are now full and computed. Call only after the forward pass has returned."""
        if seq.num_computed_tokens // self.block_size <= seq.num_published_blocks:
            return
        if self.event_log is not None:
            self.event_log.set_publishing_request(seq)
        self._publish_until(seq, seq.num_computed_tokens, ahead=False)

    def publish_ahead(self, seq: Sequence) -> list[int]:
        """Publish the blocks that will be full when the steps in flight have ended, for the next step to read.

        Return them: each is to be confirmed (`confirm_published`) or withdrawn when that step has ended.
        """
        return self._publish_until(seq, seq.next_start, ahead=True)

    def confirm_published(self, seq: Sequence, block_ids: Iterable[int]) -> None:
        """Tell the listeners of the pool that blocks published ahead are computed now."""
        if self.event_log is not None:
            self.event_log.set_publishing_request(seq)
        for block in block_ids:
            self.pool.confirm_published(block)

    def share_equal_blocks(self, seq: Sequence) -> None:
        """Replace full blocks of its own by equal ones that others have published meanwhile.

        For a sequence that reads the cache but has computed what was cached: pinned blocks fit in the pool once only.
        """
        if not self.may_read_cache(seq):
            return
        for index in range(min(seq.num_computed_tokens // self.block_size, len(seq.block_hashes))):
            key, own = self.block_key(seq, index), seq.block_ids[index]
            entry = self.pool.published_entry(key.block_hash)
            if entry is None or entry[0] == own or (entry[1], entry[2]) != (key.parent, key.tokens):
                continue
            self.pool.acquire([entry[0]])
            self.pool.release([own])
            seq.block_ids[index] = entry[0]
            seq.taken.append(range(index, index + 1))

    def publish_block(self, seq: Sequence, index: int, block: int, page: int | None = None) -> bool:
        """Publish `block`, which is not in the block table, as block `index` of the sequence.

        With `page` it is that page of the checkpoint behind this block. Return False if an equal block is published
        already; then this one stays private.
        """
        if page is not None:
            return self.pool.publish(block, *self.block_key(seq, index, page), seq.request.tenant)
        if self.event_log is not None:
            self.event_log.set_publishing_request(seq)
        return self._publish(seq, index, block)

    def block_key(self, seq: Sequence, index: int, page: int | None = None) -> BlockKey:
        """Return the full identity of one hashed block, or of one page of the checkpoint behind it."""
        start = index * self.block_size
        tokens = seq.token_ids[start : start + self.block_size].tobytes()
        if page is not None:
            return BlockKey(checkpoint_page_hash(seq.block_hashes[index], page), seq.block_hashes[index], tokens)
        return BlockKey(seq.block_hashes[index], self.parent_hash(seq, index), tokens)

    def trim_table(self, seq: Sequence) -> None:
        """Release the blocks behind its tokens, which rejected drafts have needed."""
        needed = -(-len(seq.token_ids) // self.block_size)
        if len(seq.block_ids) > needed:
            self.pool.release(seq.block_ids[needed:])
            del seq.block_ids[needed:]

    def release_table(self, seq: Sequence) -> None:
        """Release the whole block table."""
        self.pool.release(self.detach_table(seq), seq.request.retention)

    def detach_table(self, seq: Sequence) -> "array[int]":
        """Return the whole block table, which the caller releases, and leave the sequence without blocks.

        The pages of its checkpoints are among them, each after the blocks whose state it is.
        """
        self.checkpoints.announce_last_checkpoint(seq)
        table = self.checkpoints.table_with_acquired_pages(seq) if self.checkpoints.num_pages else seq.block_ids
        seq.block_ids = empty_block_table()
        seq.taken = []
        assert not seq.state, f"{seq.request_id} holds pages of a state that it has not read"
        seq.started_from, seq.junction = None, 0
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0
        return table

    def may_read_cache(self, seq: Sequence) -> bool:
        """Return whether it reuses cached blocks. Log-probabilities of the prompt have to be computed."""
        request = seq.request
        if not self.enabled or seq.recompute is not None:
            return False
        return request.cache is not CacheMode.BYPASS and request.sampling.prompt_logprobs is None

    def may_publish(self, seq: Sequence) -> bool:
        """Return whether others may reuse what it computes."""
        return self.enabled and seq.recompute is None and seq.request.cache is CacheMode.READ_WRITE

    def num_leading_pinned(self, block_hashes: list[BlockHash]) -> int:
        """Return the number of leading `block_hashes` that are pinned."""
        return next(
            (index for index, block_hash in enumerate(block_hashes) if not self.pool.is_pinned(block_hash)),
            len(block_hashes),
        )

    def parent_hash(self, seq: Sequence, index: int) -> BlockHash:
        """Return the parent hash of one hashed block."""
        if index == seq.num_public_blocks:
            return seq.region
        return seq.block_hashes[index - 1] if index else seq.root

    def _publish_until(self, seq: Sequence, num_tokens: int, *, ahead: bool) -> list[int]:
        """Publish the full blocks of the first `num_tokens` tokens; return those to which no published one is equal."""
        full = num_tokens // self.block_size
        if full <= seq.num_published_blocks or not self.may_publish(seq):
            return []
        self.hash_blocks(seq, until=full * self.block_size)
        indices = range(seq.num_published_blocks, full)
        seq.num_published_blocks = full
        return [seq.block_ids[i] for i in indices if self._publish(seq, i, seq.block_ids[i], ahead=ahead)]

    def _publish(self, seq: Sequence, index: int, block: int, *, ahead: bool = False) -> bool:
        owner = seq.request.tenant if index >= seq.num_public_blocks else ""
        return self.pool.publish(block, *self.block_key(seq, index), owner, ahead=ahead)

    def _hash_public_blocks(self, seq: Sequence) -> None:
        """Hash leading blocks without a domain for as long as they belong to a public pinned prefix."""
        size, public = self.block_size, self.public_hashes
        root = root_hash(self._model, adapter=seq.request.adapter)
        hashes = seq.block_hashes
        for end in range(size, len(seq.token_ids) + 1, size):
            extend_block_hashes(hashes, seq.token_ids, size, root, until=end)
            if hashes[-1] not in public:
                hashes.pop()
                break
        if hashes:
            seq.root, seq.num_public_blocks = root, len(hashes)
            seq.region = private_parent_hash_for_domain(hashes[-1], seq.request.domain)

    def _lookup(self, seq: Sequence, index: int) -> list[int]:
        """Return verified blocks from block `index` on; the region hash is the first private block's parent."""
        block_hashes, border = seq.block_hashes, seq.num_public_blocks
        raw, stride = seq.token_ids.tobytes(), self.block_size * seq.token_ids.itemsize
        if not index and not border:
            return self.pool.match_prefix(block_hashes, seq.root, raw, stride)
        found: list[int] = []
        for start, end in ((index, border), (max(index, border), len(block_hashes))):
            if start < end:
                tokens = raw[start * stride : end * stride]
                found += self.pool.match_prefix(block_hashes[start:end], self.parent_hash(seq, start), tokens, stride)
                if len(found) < end - index:
                    break
        return found
