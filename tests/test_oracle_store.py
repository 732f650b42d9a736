"""Law 10 with blocks outside the pool: whatever disk, restarts and siblings do, tokens are Transformers' own."""

from pathlib import Path

import pytest
from fickle_store import LyingStore
from model.tiny import make_checkpoint
from oracle import Tally
from oracle_store import compare_with_store

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2"]
LONG_REQUESTS = 2_000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("oracle")
    return {family: make_checkpoint(family, folder / family, std=0.2) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_same_with_blocks_that_come_back_from_disk(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tally, is_covered = Tally(), False
    for seed in range(12):  # on busy cores the writer's thread may do too little in three runs
        tally.add(compare_with_store(checkpoints[family], tmp_path / str(seed), seed, num_requests=32))
        is_covered = tally.runs_with_loads >= 2 and min(tally.restarts, tally.troubles, tally.overwritten) > 0
        if seed >= 2 and is_covered:
            break
    assert tally.wrong == []
    assert is_covered, tally
    assert tally.excused <= 2


def test_a_store_that_gives_another_blocks_content_is_caught(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(12):  # the writer's thread decides how much there is to load
        room = tmp_path / str(seed)
        tally.add(compare_with_store(checkpoints["llama"], room, seed, num_requests=24, store_class=LyingStore))
        if len(tally.wrong) > 3:
            break
    assert tally.store_tokens > 0 and len(tally.wrong) > 3


def test_models_that_share_a_folder_never_take_each_others_blocks(tmp_path: Path) -> None:
    tally, room = Tally(), tmp_path / "room"
    for seed in (0, 1):  # the same shapes and the same prompts, but other weights
        folder = make_checkpoint("llama", tmp_path / str(seed), std=0.2, seed=seed)
        for number in range(12):  # two, or more on busy cores
            tally.add(compare_with_store(folder, room, seed=1, num_requests=24))
            if number and tally.runs_with_loads > seed:
                break
    assert tally.wrong == []
    assert tally.runs_with_loads >= 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_requests_with_restarts_siblings_and_failing_disks(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    total, seed = Tally(), 20_000
    runs = 0
    while total.requests < LONG_REQUESTS:
        for family in FAMILIES:
            seed, runs = seed + 1, runs + 1
            total.add(compare_with_store(checkpoints[family], tmp_path / str(seed), seed, num_requests=40))
    print(f"\noracle, with a store, {runs} runs: {total}")
    assert total.wrong == []
    assert total.runs_with_loads > runs // 2 and total.restarts > runs // 2 and total.troubles > runs
    assert total.corrupt > runs // 4 and total.overwritten > runs
    assert total.preemptions > 0 and total.evictions > 0 and total.pinned_tokens > 0
    assert total.excused <= total.requests // 100
