"""Trust: which published blocks are given up because a row was not finite.

Blocks that the failed sequence wrote itself lose their names at once. Blocks that it shared with others (taken over
from the pool or the store, or published by it under a pinned name) stay: the sequence is computed once more, from its
first token, in zeroed blocks of its own which nobody else can find until the end of the chunk that failed is reached.

    The second run passes that point: the shared blocks differ from what computing gives. They are given up, here and
    in the store, and the blocks of the second run are published in their place.
    The second run fails too: the model is not finite on these tokens. The request fails alone; shared blocks stay.

So a request cannot evict what others wrote by making the model overflow, and a corrupt shared block is gone after the
first request that fails because of it. A request is computed again at most once, and at most one is at a time.
"""

from headstart.core.cache.kv_cache import KVCache
from headstart.core.cache.transfers import Transfers
from headstart.core.request import Recompute, Sequence, Suspect
from headstart.core.sched.admission import Admission


class Trust:
    """The verdicts over the blocks of one cache and its store."""

    def __init__(self, cache: KVCache, transfers: Transfers, room: Admission) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._transfers = transfers
        self._room = room

    def row_failed(self, seq: Sequence, end: int) -> bool:
        """Give up what the sequence wrote itself; return whether it is to be computed again.

        `end` is where its failed chunk ends, in tokens. Without shared blocks there is nothing to find out, and without
        room for a second copy of the pinned blocks that it uses no way to; then it fails.
        """
        shared = self._shared(seq)
        found = (self._published(seq, index) for index in sorted(shared))
        suspects = tuple(suspect for suspect in found if suspect is not None)
        own = [index for index in range(len(seq.block_ids)) if index not in shared]
        names = [suspect.name for index in own if (suspect := self._published(seq, index)) is not None]
        self._transfers.distrust(self._transfers.offered(names))
        self._pool.distrust([seq.block_ids[index] for index in own])
        if seq.was_recomputed or not shared or not self._room.holds_copy(seq):
            return False
        seq.was_recomputed = True
        seq.recompute = Recompute(suspects, end)
        return True

    def is_open(self, seq: Sequence) -> bool:
        """Whether any block is still there that a second run of the sequence could convict."""
        return seq.recompute is not None and any(map(self._is_there, seq.recompute.suspects))

    def row_passed(self, seq: Sequence) -> bool:
        """Take in a finite row of a second run; return whether it has passed the failure now.

        Then its suspects are given up, and it may read and write the cache again.
        """
        recompute = seq.recompute
        assert recompute is not None
        if seq.num_computed_tokens < recompute.until:
            return False
        seq.recompute = None
        self._transfers.distrust([suspect.name for suspect in recompute.suspects])
        self._pool.distrust([suspect.block for suspect in recompute.suspects if self._is_there(suspect)])
        return True

    def _shared(self, seq: Sequence) -> set[int]:
        """Indices of the blocks of its table that others may rely on: taken over, or of a pinned name."""
        shared = {index for taken in seq.taken for index in taken}
        for index in range(seq.num_published_blocks):
            if self._pool.is_pinned(seq.block_hashes[index]) and self._published(seq, index) is not None:
                shared.add(index)
        return shared

    def _published(self, seq: Sequence, index: int) -> Suspect | None:
        """Block `index` of its table, if that is what is published under the name it has in the sequence."""
        if index >= seq.num_published_blocks:
            return None
        name, block = seq.block_hashes[index], seq.block_ids[index]
        entry = self._pool.entry(name)
        return Suspect(name, block, self._pool.version(block)) if entry is not None and entry[0] == block else None

    def _is_there(self, suspect: Suspect) -> bool:
        """Whether the block is still published under its name with the content that it had."""
        entry = self._pool.entry(suspect.name)
        return entry is not None and entry[0] == suspect.block and self._pool.version(suspect.block) == suspect.version
