"""Fixtures of tests with an engine in its own process."""

from pathlib import Path

import pytest
from server.fake_engine import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")
