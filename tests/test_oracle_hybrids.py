"""Law 10 for models with states: whatever is evicted, aborted, drafted, pinned or restored, tokens are Transformers'.

HEADSTART_ORACLE_REQUESTS is the number of requests of the long test, per family.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fickle_store import FickleStore
from model.tiny import HYBRIDS, make_checkpoint
from oracle import Tally
from oracle_hybrids import ConfusedStore, compare_hybrid

from headstart.core.batch import Chunk
from headstart.core.cache.checkpoints import Checkpoints
from headstart.core.cache.kv_cache import Hit, KVCache
from headstart.core.request import Sequence
from headstart.model.recurrent_states import RecurrentStates
from headstart.model.step_inputs import RowState

LONG_REQUESTS = int(os.environ.get("HEADSTART_ORACLE_REQUESTS", "3000"))
EACH = 30  # requests of a run
PLANTED_RUNS = 25  # runs at most, until a planted bug is seen

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("oracle")
    return {family: make_checkpoint(family, folder / family, std=0.2) for family in HYBRIDS}


@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_are_those_of_transformers(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tally = compare_hybrid(checkpoints[family], tmp_path / "kv", 0, EACH)
    print(f"\n{family}: {tally}")
    assert tally.wrong == []
    assert tally.states_read > 0 and tally.dropped > 0 and tally.excused <= 2


@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("family", HYBRIDS)
def test_thousands_of_requests(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    total, seed = Tally(), 30_000
    while total.requests < LONG_REQUESTS:
        seed += 1
        total.add(compare_hybrid(checkpoints[family], tmp_path / str(seed), seed, min(40, LONG_REQUESTS)))
    print(f"\noracle of {family}: {total}")
    assert total.wrong == []
    assert total.states_read > total.requests // 20 and total.dropped > total.requests
    assert total.preemptions > 0 and total.aborts > 0 and total.accepted > 0 and total.pinned_tokens > 0
    assert total.restarts > 0 and total.store_tokens > 0 and total.corrupt > 0
    assert total.excused <= total.requests // 100


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def a_state_one_block_late(patch: Patch) -> type[FickleStore]:
    right = Checkpoints._publish

    def publish(self: Checkpoints, seq: Sequence, at: int, pages: tuple[int, ...]) -> None:
        right(self, seq, at - 1 if at > 1 and not self._exists(seq, at - 1) else at, pages)

    patch.setattr(Checkpoints, "_publish", publish)
    return FickleStore


def a_slot_reused_too_early(patch: Patch) -> type[FickleStore]:
    """The pages of a state that a chunk begins from are released as soon as its sequence is planned."""
    begin, end = KVCache._begin_from, Checkpoints.end

    def begin_from(self: KVCache, seq: Sequence, hit: Hit) -> None:
        begin(self, seq, hit)
        self.pool.release(hit.state)

    def ends(self: Checkpoints, seq: Sequence, chunk: Chunk, num_tokens: int) -> None:
        end(self, seq, chunk._replace(state=()), num_tokens)

    patch.setattr(KVCache, "_begin_from", begin_from)
    patch.setattr(Checkpoints, "end", ends)
    return FickleStore


def a_rejected_draft_stays_in_the_state(patch: Patch) -> type[FickleStore]:
    right = RecurrentStates._advance

    def advance(self: RecurrentStates, chunk: Chunk, begin: int, end: int) -> RowState:
        known = self._states.get(chunk.request_id, {})
        if chunk.start in known:
            known[chunk.start] = known[max(known)]
        return right(self, chunk, begin, end)

    patch.setattr(RecurrentStates, "_advance", advance)
    return FickleStore


def a_state_of_another_position_from_the_store(patch: Patch) -> type[FickleStore]:
    return ConfusedStore


@pytest.mark.long
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(
    "bug",
    [
        a_state_one_block_late,
        a_slot_reused_too_early,
        a_rejected_draft_stays_in_the_state,
        a_state_of_another_position_from_the_store,
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[Patch], type[FickleStore]],
    family: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    store_class, tally = bug(monkeypatch), Tally()
    for seed in range(40_000, 40_000 + PLANTED_RUNS):
        tally.add(compare_hybrid(checkpoints[family], tmp_path / str(seed), seed, EACH, store_class))
        if tally.wrong:
            break
    print(f"\n{bug.__name__} in {family}: {tally.requests} requests, {tally.wrong[:2]}")
    assert tally.wrong
