"""Attention over work items against dense attention in float64, in Triton's interpreter."""

import numpy as np
import pytest
import torch
from attention_cases import Case, make_case, run_case

pytestmark = pytest.mark.long
CASES = {
    "decodes": ([(5, 1), (150, 1), (0, 1)], {}, {}),
    "prefill": ([(0, 20), (17, 13)], {}, {"processors": 1}),
    "few tiles, so keys are cut": ([(90, 20)], {}, {}),
    "mixed": ([(5, 1), (70, 3), (150, 1), (0, 17)], {}, {}),
    "a shared prefix": ([(140, 1), (155, 1), (139, 1), (20, 1)], {1: (0, 8), 2: (0, 7)}, {}),
    "padded": ([(70, 1), (80, 1), (66, 1)], {1: (0, 4), 2: (0, 4)}, {"padded": 4}),
    "short prefills behind a prefix": ([(130, 3), (128, 4), (140, 2)], {1: (0, 8), 2: (0, 8)}, {"processors": 1}),
    "exact": ([(5, 1), (70, 3), (150, 1), (0, 17)], {}, {"exact": True}),
    "long": ([(2100, 1)], {}, {}),
}
SCORINGS = {"plain": {}, "window": {"window": 40}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": True}}


def error(case: Case, out: torch.Tensor) -> float:
    return float((out[: len(case.expected)].double() - case.expected).norm() / case.expected.norm())


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_dense_attention(name: str, scoring: str) -> None:
    chunks, shared, options = CASES[name]
    case = make_case(chunks, shared=shared, seed=len(name), **SCORINGS[scoring])
    layout, out = run_case(case, **options)
    assert error(case, out) < 1e-5
    assert layout.needs_no_merge_pass == (name == "decodes")


@pytest.mark.parametrize(("heads", "dim"), [((2, 2), 64), ((6, 2), 80), ((3, 1), 96), ((4, 2), 128), ((2, 1), 256)])
def test_any_number_and_size_of_heads(heads: tuple[int, int], dim: int) -> None:
    case = make_case([(70, 1), (20, 18)], queries=heads[0], kvs=heads[1], dim=dim)
    assert error(case, run_case(case)[1]) < 1e-5


def test_a_row_alone_is_a_row_behind_a_shared_prefix() -> None:
    case = make_case([(140, 1), (155, 1)], shared={1: (0, 8)})
    _, together = run_case(case)
    spare = len(case.kv) - 1  # as if the second row had another first block, of equal content
    case.kv[spare] = case.kv[case.rows.blocks[0]]
    case.rows.blocks[case.rows.table_ptr[1]] = spare
    layout, apart = run_case(case)
    assert layout.num_tiles == 0
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)  # on a GPU the bits are the same: gpu_checks.py


def test_rows_of_many_parts() -> None:
    case = make_case([(8_400, 1), (600, 1)])
    layout, out = run_case(case, split=32)
    assert layout.longest == 263
    assert error(case, out) < 1e-5


@pytest.mark.parametrize("seed", range(25))
def test_random_steps_are_those_of_dense_attention(seed: int) -> None:
    random = np.random.default_rng(seed)
    for step in range(20):
        count = int(random.integers(1, 5))
        chunks = [
            (int(random.integers(0, 150)), 1 if random.random() < 0.6 else int(random.integers(2, 20)))
            for _ in range(count)
        ]
        most = [min(chunks[0][0], start) // 16 for start, _ in chunks]
        shared = {row: (0, most[row]) for row in range(1, count) if random.random() < 0.5 and most[row]}
        heads = [(4, 2), (2, 2), (3, 1)][int(random.integers(3))]
        scoring = list(SCORINGS.values())[int(random.integers(len(SCORINGS)))]
        dim = int(random.choice([16, 24, 32]))
        case = make_case(
            chunks, shared=shared, queries=heads[0], kvs=heads[1], dim=dim, seed=100 * seed + step, **scoring
        )
        options = {"exact": bool(random.integers(2)), "processors": int(random.choice([1, 132]))}
        assert error(case, run_case(case, **options)[1]) < 1e-5, (chunks, shared, heads, dim, scoring, options)
