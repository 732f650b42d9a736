"""A plugin of pytest: `--examples 0.4` runs two fifths of the examples of each property test, at least 10.

`make test` does so, and `make test-long` runs them all. State machines (tests/laws) are left as they are.
"""

import pytest
from hypothesis import settings

MIN_EXAMPLES = 10
SETTINGS = "_hypothesis_internal_use_settings"  # there is no public way to change those of a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples", type=float, default=1.0, metavar="SHARE", help="run this share of a property's examples"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.option.examples
    tests = {getattr(item.obj, "__func__", item.obj) for item in items if isinstance(item, pytest.Function)}
    for test in tests if share < 1 else ():
        before: settings | None = getattr(test, SETTINGS, None)
        if before is not None and before.max_examples > MIN_EXAMPLES:
            wanted = max(MIN_EXAMPLES, round(before.max_examples * share))
            setattr(test, SETTINGS, settings(before, max_examples=wanted))
