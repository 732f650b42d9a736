"""Trust: decides which published blocks are discarded because a row was not finite.

Blocks that the failed sequence wrote itself lose their hashes at once. Blocks that it shared with others (taken over
from the pool or the store, or published by it under a pinned hash) stay: the sequence is computed once more, from its
first token, in zeroed private blocks that no other sequence can find until the end of the failed chunk is reached.

    The second run passes that point: the shared blocks differ from the computed ones. They are discarded, here and in
    the store, and the blocks of the second run are published in their place.
    The second run fails too: the model is not finite on these tokens. The request fails alone; shared blocks stay.

So a request cannot evict what others wrote by making the model overflow, and a corrupt shared block is discarded after
the first request that fails because of it. A request is computed again at most once, and at most one is at a time.
"""

from headstart.core.cache.kv_cache import KVCache
from headstart.core.cache.transfers import StoreTransfers
from headstart.core.sched.admission import AdmissionControl
from headstart.core.sequence import NonFiniteRecompute, Sequence, SuspectBlock


class SuspectBlockHandler:
    """The decisions about suspect blocks of one cache and its store."""

    def __init__(self, cache: KVCache, transfers: StoreTransfers, admission: AdmissionControl) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._transfers = transfers
        self._admission = admission

    def on_nonfinite_row(self, seq: Sequence, end: int) -> bool:
        """Discard the blocks the sequence wrote itself; return whether the sequence is to be computed again.

        `end` is the end of its failed chunk, in tokens. It is not computed again if it has no shared blocks, or if a
        second copy of the pinned blocks that it uses does not fit; then it fails.
        """
        shared = self._shared(seq)
        found = (self._published(seq, index) for index in sorted(shared))
        states, started = self._cache.checkpoints, () if seq.started_from is None else (seq.started_from,)
        suspects = (*(suspect for suspect in found if suspect is not None), *states.published_pages(started))
        left = states.published_pages(seq.checkpoints)
        self._transfers.discard_corrupt(self._transfers.filter_offered_hashes([page.block_hash for page in left]))
        self._pool.discard_corrupt([page.block for page in left])
        own = [index for index in range(len(seq.block_ids)) if index not in shared]
        block_hashes = [suspect.block_hash for index in own if (suspect := self._published(seq, index)) is not None]
        self._transfers.discard_corrupt(self._transfers.filter_offered_hashes(block_hashes))
        self._pool.discard_corrupt([seq.block_ids[index] for index in own])
        if seq.was_recomputed or not (shared or suspects) or not self._admission.fits_beside_pinned_blocks(seq):
            return False
        seq.was_recomputed = True
        seq.recompute = NonFiniteRecompute(suspects, end)
        return True

    def sequence_has_published_suspects(self, seq: Sequence) -> bool:
        """Return whether any suspect block of the sequence is still published."""
        return seq.recompute is not None and any(map(self._is_there, seq.recompute.suspects))

    def on_finite_rerun_row(self, seq: Sequence) -> bool:
        """Handle a finite row of a second run; return whether the run has now passed the point of failure.

        If so, its suspects are discarded, and it may read and write the cache again.
        """
        recompute = seq.recompute
        assert recompute is not None
        if seq.num_computed_tokens < recompute.until:
            return False
        seq.recompute = None
        self._transfers.discard_corrupt([suspect.block_hash for suspect in recompute.suspects])
        self._pool.discard_corrupt([suspect.block for suspect in recompute.suspects if self._is_there(suspect)])
        return True

    def _shared(self, seq: Sequence) -> set[int]:
        """Return the indices of blocks in its table that others may rely on: taken over, or with a pinned hash."""
        shared = {index for taken in seq.taken for index in taken}
        for index in range(seq.num_published_blocks):
            if self._pool.is_pinned(seq.block_hashes[index]) and self._published(seq, index) is not None:
                shared.add(index)
        return shared

    def _published(self, seq: Sequence, index: int) -> SuspectBlock | None:
        """Return block `index` of its table if that block is published under its hash in the sequence."""
        if index >= seq.num_published_blocks:
            return None
        block_hash, block = seq.block_hashes[index], seq.block_ids[index]
        entry = self._pool.published_entry(block_hash)
        return (
            SuspectBlock(block_hash, block, self._pool.block_version(block))
            if entry is not None and entry[0] == block
            else None
        )

    def _is_there(self, suspect: SuspectBlock) -> bool:
        """Return whether the block is still published under its hash, with unchanged content."""
        entry = self._pool.published_entry(suspect.block_hash)
        return (
            entry is not None
            and entry[0] == suspect.block
            and self._pool.block_version(suspect.block) == suspect.version
        )
