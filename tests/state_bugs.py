"""Bugs of checkpoints to plant in core/: `put(owner, name, value)` is setattr, or that of a test that undoes it.

tests/laws/test_planted_bugs.py plants all of them. Against Transformers only two are planted: an executor on a CPU
reads all states of a step before it writes anything, so a state released before it is read changes no token there, and
few of its drafts end where a checkpoint is kept.
"""

from collections.abc import Callable

from headstart.core.batch import Chunk, Saves
from headstart.core.cache.checkpoints import RecurrentCheckpoints
from headstart.core.cache.kv_cache import KVCache, PrefixHit
from headstart.core.sequence import Sequence

Put = Callable[[type, str, object], None]


def a_state_one_block_late(put: Put) -> None:
    """A state is published under the name of the block before its own."""
    right = RecurrentCheckpoints._publish

    def publish(self: RecurrentCheckpoints, seq: Sequence, at: int, pages: tuple[int, ...]) -> None:
        right(self, seq, at - 1 if at > 1 and not self._exists(seq, at - 1) else at, pages)

    put(RecurrentCheckpoints, "_publish", publish)


def a_state_released_before_it_is_read(put: Put) -> None:
    """The pages of a state that a chunk begins from are released as soon as its sequence is planned."""
    begin, end = KVCache._begin_from, RecurrentCheckpoints.finish_chunk

    def begin_from(self: KVCache, seq: Sequence, hit: PrefixHit) -> None:
        begin(self, seq, hit)
        self.pool.release(hit.state)

    def ends(self: RecurrentCheckpoints, seq: Sequence, chunk: Chunk, num_tokens: int) -> None:
        end(self, seq, chunk._replace(state=()), num_tokens)

    put(KVCache, "_begin_from", begin_from)
    put(RecurrentCheckpoints, "finish_chunk", ends)


def a_slot_reused_too_early(put: Put) -> None:
    """The pages that a state is to be written to are released as soon as its sequence is planned."""
    allocate, end = RecurrentCheckpoints.allocate_pages, RecurrentCheckpoints.finish_chunk

    def allocates(self: RecurrentCheckpoints, seq: Sequence, start: int, stop: int) -> Saves:
        saves = allocate(self, seq, start, stop)
        for _, pages in saves:
            self._pool.release(pages)
        return saves

    def ends(self: RecurrentCheckpoints, seq: Sequence, chunk: Chunk, num_tokens: int) -> None:
        unused = tuple(save for save in chunk.saves if set(save[1]) <= set(self._pool._scratch))
        for page in (page for _, pages in unused for page in pages):
            self._pool._scratch.remove(page)
            self._pool._refs[page] = 1
        end(self, seq, chunk._replace(saves=unused), num_tokens)

    put(RecurrentCheckpoints, "allocate_pages", allocates)
    put(RecurrentCheckpoints, "finish_chunk", ends)


def a_state_of_rejected_drafts_is_kept(put: Put) -> None:
    """A state behind drafts that were rejected is published when the sequence has as many tokens."""
    end, left = RecurrentCheckpoints.finish_chunk, RecurrentCheckpoints.announce_last_checkpoint
    kept: dict[tuple[str, int], tuple[int, ...]] = {}

    def ends(self: RecurrentCheckpoints, seq: Sequence, chunk: Chunk, num_tokens: int) -> None:
        for position, pages in chunk.saves:
            if position > num_tokens and (chunk.request_id, position) not in kept:
                for page in pages:
                    self._pool._refs[page] += 1
                kept[chunk.request_id, position] = pages
        reached = [key for key in kept if key[0] == chunk.request_id and key[1] <= num_tokens]
        saves = tuple((key[1], kept.pop(key)) for key in reached)
        end(self, seq, chunk._replace(saves=saves + chunk.saves), num_tokens)

    def lefts(self: RecurrentCheckpoints, seq: Sequence) -> None:
        for key in [key for key in kept if key[0] == seq.request.request_id]:
            self._pool.release(kept.pop(key))
        left(self, seq)

    put(RecurrentCheckpoints, "finish_chunk", ends)
    put(RecurrentCheckpoints, "on_sequence_left", lefts)


STATE_BUGS = (
    a_state_one_block_late,
    a_state_released_before_it_is_read,
    a_slot_reused_too_early,
    a_state_of_rejected_drafts_is_kept,
)
