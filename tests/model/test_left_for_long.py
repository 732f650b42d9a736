"""The choice of kernel tests for `make test`: each case on the best variant and one other, each test on all."""

import pytest
from model.conftest import left_for_long

VARIANTS = ["best", "second", "third", "last"]


@pytest.mark.parametrize("num_cases", [1, 2, 3, 4, 7, 39])
def test_every_case_runs_on_the_best_variant_and_another_and_every_test_on_all(num_cases: int) -> None:
    run = {name: set(range(num_cases)) - left_for_long(num_cases, VARIANTS, name) for name in VARIANTS}
    assert run["best"] == set().union(*(run[name] for name in VARIANTS[1:])) == set(range(num_cases))
    assert all(run.values()) and sum(map(len, run.values())) <= 2 * num_cases + 2


def test_a_processor_with_one_variant_leaves_nothing_out() -> None:
    assert left_for_long(7, ["only"], "only") == set()
