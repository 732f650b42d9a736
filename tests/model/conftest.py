"""Which cases of a kernel test run in `make test` and which in `make test-long`: see `left_for_long`."""

from collections import defaultdict
from collections.abc import Sequence

import pytest

from headstart.model.kernels.library import runnable_variants


def left_for_long(num_cases: int, variants: Sequence[str], variant: str) -> set[int]:
    """Return which cases of one test `make test` leaves out on a variant of the kernels, by their number.

    The best variant, which has the most code, runs all. Each case runs on one of the others too, and each test on
    every variant.
    """
    others = [name for name in variants if name != variants[0]]
    if variant not in others:
        return set()
    place = others.index(variant)
    return {case for case in range(num_cases) if case % len(others) != place and case != place % num_cases}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `left_for_long` names; `-m "not long or long(of_a_variant=True)"` runs that too."""
    variants = runnable_variants()
    cases: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        values = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        for variant in (value for value in values if isinstance(value, str) and value in variants):
            cases[item.nodeid.partition("[")[0], variant].append(item)
    for (_, variant), found in cases.items():
        for case in left_for_long(len(found), variants, variant):
            found[case].add_marker(pytest.mark.long(of_a_variant=True))
