"""Law 10 on real models: greedy output with reuse = without = Transformers `generate`, token for token, in fp32."""

from pathlib import Path

import pytest
from model.tiny import make_checkpoint
from oracle import Tally, compare, compare_everything, corrupted_blocks_noticed

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2"]
LONG_REQUESTS = 2_000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("oracle")
    return {family: make_checkpoint(family, folder / family, std=0.2) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_output_with_reuse_equals_without_equals_transformers(family: str, checkpoints: dict[str, Path]) -> None:
    tally = compare(checkpoints[family], seed=1, num_requests=24)
    assert tally.wrong == []
    assert tally.cached_tokens > 0 and tally.full_pool_steps > 0, "the pool was never under pressure"
    assert tally.excused <= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_same_with_everything_switched_on_together(family: str, checkpoints: dict[str, Path]) -> None:
    tally = Tally()
    for seed in range(3):
        tally.add(compare_everything(checkpoints[family], seed, num_requests=24))
    assert tally.wrong == []
    assert tally.promise_skips > 0 and tally.evictions > 0 and tally.cached_tokens > 0
    assert tally.excused <= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_corrupted_block_is_noticed(family: str, checkpoints: dict[str, Path]) -> None:
    assert corrupted_blocks_noticed(checkpoints[family], seed=2, cases=20) >= 0.95


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_requests_over_random_trees_chunks_and_preemptions(checkpoints: dict[str, Path]) -> None:
    total, seed = Tally(), 100
    while total.requests < LONG_REQUESTS:
        for family in FAMILIES:
            seed += 1
            total.add(compare(checkpoints[family], seed, num_requests=40))
    print(f"\noracle: {total}")
    assert total.wrong == []
    assert total.preemptions > 0 and total.evictions > 0 and total.full_pool_steps > 0
    assert total.excused <= total.requests // 100


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_requests_with_everything_switched_on(checkpoints: dict[str, Path]) -> None:
    total, seed = Tally(), 10_000
    while total.requests < LONG_REQUESTS:
        for family in FAMILIES:
            seed += 1
            total.add(compare_everything(checkpoints[family], seed, num_requests=40))
    print(f"\noracle, everything on: {total}")
    assert total.wrong == []
    assert total.preemptions > 0 and total.evictions > 0 and total.full_pool_steps > 0
    assert total.promise_skips > 0 and total.adoptions > 0 and total.pinned_tokens > 0
    assert total.excused <= total.requests // 100


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_corrupted_blocks_are_noticed_over_many_cases(family: str, checkpoints: dict[str, Path]) -> None:
    assert corrupted_blocks_noticed(checkpoints[family], seed=3, cases=200) >= 0.95
