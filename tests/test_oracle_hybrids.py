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
from oracle_killed import compare_killed
from state_bugs import Put, a_slot_reused_too_early, a_state_one_block_late

from headstart.core.batch import Chunk
from headstart.model.recurrent_states import RecurrentStates
from headstart.model.step_inputs import RecurrentState

LONG_REQUESTS = int(os.environ.get("HEADSTART_ORACLE_REQUESTS", "3000"))
EACH = 30  # requests of a run
PLANTED_RUNS = 25  # runs at most, until a planted bug is seen


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
        compare = compare_hybrid if seed % 5 else compare_killed  # a child of the latter is killed three times
        total.add(compare(checkpoints[family], tmp_path / str(seed), seed, min(40, LONG_REQUESTS)))
    print(f"\noracle of {family}: {total}")
    assert total.wrong == []
    assert total.states_read > total.requests // 20 and total.dropped > total.requests
    assert total.preemptions > 0 and total.aborts > 0 and total.accepted > 0 and total.pinned_tokens > 0
    assert total.restarts > 0 and total.store_tokens > 0 and total.corrupt > 0
    assert total.excused <= total.requests // 100


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def a_rejected_draft_stays_in_the_state(put: Put) -> None:
    right = RecurrentStates._advance

    def advance(self: RecurrentStates, chunk: Chunk, begin: int, end: int) -> RecurrentState:
        known = self._states.get(chunk.request_id, {})
        if chunk.start in known:
            known[chunk.start] = known[max(known)]
        return right(self, chunk, begin, end)

    put(RecurrentStates, "_advance", advance)


def a_state_of_another_position_from_the_store(put: Put) -> None:
    """See ConfusedStore."""


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
    bug: Callable[[Put], None],
    family: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch.setattr)
    store_class = ConfusedStore if bug is a_state_of_another_position_from_the_store else FickleStore
    tally = Tally()
    for seed in range(40_000, 40_000 + PLANTED_RUNS):
        tally.add(compare_hybrid(checkpoints[family], tmp_path / str(seed), seed, EACH, store_class))
        if tally.wrong:
            break
    print(f"\n{bug.__name__} in {family}: {tally.requests} requests, {tally.wrong[:2]}")
    assert tally.wrong
