"""The decision log on disk: lines that can be decided again."""

import json
from pathlib import Path

import pytest
from router.fleets import ask, endpoint, serve

from headstart.core.errors import ConfigError
from headstart.http.decision_log_writer import DecisionLog
from headstart.router.decision_log import DecisionRecord
from headstart.router.router import Router


def test_decisions_are_lines_that_can_be_read_and_routed_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        log = DecisionLog(path)
        router = Router(log=log.enqueue)
        router.add(endpoint("r0"))
        serve(router, ask(1, 2, 3))
        log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2, "an existing log is added to"
    again = DecisionRecord.from_dict(lines[0])
    assert again.endpoint == "r0" and again.to_routing_request().prompt.num_tokens == ask(1, 2, 3).prompt.num_tokens


def test_a_log_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decision log"):
        DecisionLog(tmp_path / "no" / "log")
