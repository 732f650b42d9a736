"""Checkpoints: recurrent states after whole blocks of tokens, each in a list of ordinary blocks of the pool.

The pages of a checkpoint are published under hashes derived from that of its last block of tokens, so they live as all
blocks do: scratch, idle, referenced, evicted, cleared, charged to a tenant. A checkpoint exists while all its pages are
published. What a state is only the executor knows. Nothing waits or is preempted for a checkpoint: it is kept if blocks
are free. Listeners (the store) hear of the end of a sequence so far when it ends, of the others when they are left.

Places: the end of each prompt; the boundary that its request states; the end of the sequence so far, in place of the
last such; junctions, where others have computed more keys and values than there is a checkpoint for; and, in between,
every `spacing` blocks.

A sequence that ends has used all its places: their pages are released among its blocks of tokens, so a prefix that
stays has its checkpoints, and one that leaves is found in part. Where blocks are short and checkpoints take more than
`MAX_SHARE` of the pool, those are discarded first from which one sequence went on to a later one, in this order. Those
from which several have, boundaries, spaced ones, and the last one of a sequence leave as other blocks do.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from headstart.core.batch import Chunk, Saves
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash, checkpoint_page_hash
from headstart.core.sequence import Sequence, SuspectBlock

MAX_SHARE = 0.15  # of a pool that is full
SPACED_SHARE = 0.05  # of the bytes of a long prompt, which its spaced checkpoints take


class RecurrentCheckpoints:
    """The checkpoints of one pool, `num_pages` blocks each; 0: the model has no recurrent layers and needs none."""

    def __init__(self, pool: BlockPool, block_size: int, num_pages: int) -> None:
        self.num_pages = num_pages
        self._pool, self._size = pool, block_size
        self._spacing = max(int(num_pages * (1 / SPACED_SHARE - 1)), 1)  # blocks
        self._inner: OrderedDict[BlockHash, None] = OrderedDict()  # from which one sequence went on; next to go first
        self._branches = set[BlockHash]()  # from which several have

    def page_hashes_of_checkpoint(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the names of the pages of the checkpoint behind a block, whether there is one or not."""
        return [checkpoint_page_hash(block_hash, index) for index in range(self.num_pages)]

    def find_deepest(self, block_hashes: list[BlockHash], depth: int) -> tuple[int, tuple[int, ...]]:
        """Return the deepest checkpoint after at most `depth` blocks: their number, and its pages. Changes nothing."""
        published = self._pool.published_hashes
        for at in range(depth, 0, -1):
            if checkpoint_page_hash(block_hashes[at - 1], 0) in published:
                pages = self._pages(block_hashes[at - 1])
                if pages:
                    return at, pages
        return 0, ()

    def new_checkpoint_block_positions(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Return the numbers of blocks after which a chunk `[start, end)` of a sequence leaves a checkpoint."""
        return [at for at in self._places(seq, start, end) if not self._exists(seq, at)]

    def touch_earlier(self, seq: Sequence, depth: int) -> None:
        """Make the checkpoints before the one after `depth` blocks, from which a sequence begins, the last used."""
        for _, pages in self._used(seq, depth):
            self._pool.acquire(pages)
            self._pool.release(pages)

    def table_with_acquired_pages(self, seq: Sequence) -> "array[int]":
        """Return the block table of a sequence to be released, with the pages of its places, which are acquired."""
        table, done = array("i"), 0
        for at, pages in self._used(seq, seq.num_computed_tokens // self._size):
            self._pool.acquire(pages)
            table += seq.block_ids[done:at]
            table.extend(pages)
            done = at
        return table + seq.block_ids[done:]

    def _used(self, seq: Sequence, depth: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the checkpoints after at most `depth` blocks that a sequence keeps in use, with their pages."""
        hashes, started = seq.block_hashes[:depth], seq.started_from
        places = {hashes.index(started) + 1} if started is not None and started in hashes else set[int]()
        for at in sorted(places.union(self._places(seq, 0, len(hashes) * self._size))):
            yield at, self._pages(hashes[at - 1])

    def _places(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Return the places of a chunk `[start, end)` in blocks, whether there is a checkpoint or not."""
        size, num_prompt = self._size, len(seq.request.prompt)
        first, last = start // size + 1, end // size
        found = {(num_prompt - 1) // size, num_prompt // size, seq.request.boundary // size, seq.junction}
        found.update(range(-(-first // self._spacing) * self._spacing, last + 1, self._spacing))
        if end > num_prompt:
            found.add(last)
        return sorted(at for at in found if first <= at <= last)

    def allocate_pages(self, seq: Sequence, start: int, end: int) -> Saves:
        """Return the places in a chunk `[start, end)`, in tokens, with the pages to write the states to."""
        request, saves = seq.request, list[tuple[int, tuple[int, ...]]]()
        for at in reversed(self.new_checkpoint_block_positions(seq, start, end)):  # of few pages the deepest gets them
            if self._pool.num_available_after_acquire((), request.tenant) < self.num_pages:
                break
            pages = self._pool.allocate(self.num_pages, request.tenant, by=request.request_id, states=True)
            saves.append((at * self._size, tuple(pages)))
        return tuple(reversed(saves))

    def finish_chunk(self, seq: Sequence, chunk: Chunk, num_tokens: int) -> None:
        """Publish the checkpoints that a computed chunk has left, or free their pages; release what it has read.

        What is behind `num_tokens` of the sequence has failed, or is of drafts that were rejected.
        """
        for position, pages in chunk.saves:
            at = position // self._size
            if position <= num_tokens and at <= len(seq.block_hashes) and not self._exists(seq, at):
                self._publish(seq, at, pages)
            self._pool.release(pages, seq.request.retention)
        self._pool.release(chunk.state, seq.request.retention)

    def published_pages(self, block_hashes: Iterable[BlockHash]) -> list[SuspectBlock]:
        """Return the pages of the checkpoints behind these hashes that are published now."""
        return [
            SuspectBlock(name, block, self._pool.block_version(block))
            for block_hash in block_hashes
            for name, block in zip(self.page_hashes_of_checkpoint(block_hash), self._pages(block_hash), strict=False)
        ]

    def announce_last_checkpoint(self, seq: Sequence) -> None:
        """Tell the listeners of the end of a sequence that ends or is queued again."""
        if seq.last_checkpoint is not None:
            self._tell(seq.last_checkpoint)

    def _publish(self, seq: Sequence, at: int, pages: tuple[int, ...]) -> None:
        block_hash, tokens = seq.block_hashes[at - 1], seq.token_ids[(at - 1) * self._size : at * self._size].tobytes()
        for name, block in zip(self.page_hashes_of_checkpoint(block_hash), pages, strict=True):
            old = self._pool.published_entry(name)  # of a checkpoint that has lost other pages
            if old is not None:
                self._pool.discard_replaced([old[0]])
            self._pool.publish(block, name, block_hash, tokens, seq.request.tenant)
        before = seq.checkpoints[-1] if seq.checkpoints else seq.started_from
        if block_hash not in seq.checkpoints:  # it has left this one before, which was evicted since
            seq.checkpoints.append(block_hash)
        boundary, spacing = seq.request.boundary // self._size, self._spacing
        kept = seq.block_hashes[spacing - 1 :: spacing] + seq.block_hashes[boundary - 1 : boundary]
        if before is not None and before != block_hash and before not in kept:
            self._went_on(before)
        if at * self._size <= len(seq.request.prompt) or not seq.block_ids:
            self._tell(block_hash)
        if at * self._size <= len(seq.request.prompt):
            return
        last = seq.last_checkpoint
        if last is not None and last != block_hash:
            if not self._pool.is_pinned(checkpoint_page_hash(last, 0)):
                self._pool.discard_replaced(self._pages(last))
            seq.checkpoints.remove(last)
        seq.last_checkpoint = block_hash

    def _went_on(self, block_hash: BlockHash) -> None:
        """Note a checkpoint behind which a sequence has left a later one, and discard some such if blocks are short."""
        pool, inner = self._pool, self._inner
        if block_hash in inner or block_hash in self._branches:
            inner.pop(block_hash, None)
            self._branches.add(block_hash)
        else:
            inner[block_hash] = None
        most = pool.usable_capacity if pool.num_scratch >= self.num_pages else MAX_SHARE * pool.usable_capacity
        while inner and pool.num_pages > most:
            oldest, _ = inner.popitem(last=False)
            if not pool.is_pinned(checkpoint_page_hash(oldest, 0)):
                pool.discard_replaced(self._pages(oldest))
        if (len(inner) + len(self._branches)) * self.num_pages > 2 * pool.usable_capacity:  # most of them were evicted
            self._inner = OrderedDict.fromkeys(known for known in inner if self._pages(known))
            self._branches = {known for known in self._branches if self._pages(known)}

    def _exists(self, seq: Sequence, at: int) -> bool:
        """Return whether there is a checkpoint after `at` blocks of a sequence; of output not hashed yet: False."""
        return 0 < at <= len(seq.block_hashes) and bool(self._pages(seq.block_hashes[at - 1]))

    def _pages(self, block_hash: BlockHash) -> tuple[int, ...]:
        """Return the pages of a checkpoint, none if one of them is gone."""
        entries = map(self._pool.published_entry, self.page_hashes_of_checkpoint(block_hash))
        pages = tuple(entry[0] for entry in entries if entry is not None and entry[1] == block_hash)
        return pages if len(pages) == self.num_pages else ()

    def _tell(self, block_hash: BlockHash) -> None:
        """Tell the listeners of pages of a checkpoint, if it is still there."""
        for name in self.page_hashes_of_checkpoint(block_hash) if self._pages(block_hash) else ():
            entry = self._pool.published_entry(name)
            assert entry is not None, "a checkpoint has all its pages"
            for listener in self._pool.page_listeners:
                listener.on_block_published(entry[0], name, entry[1], entry[2])
