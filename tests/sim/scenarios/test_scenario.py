"""Scenario files: what they may say, and what is refused with the entry and the field."""

import json
from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart.sim.scenario import AutoscalerSettings, ScenarioEvent, parse_scenario, read_scenario
from headstart.sim.sim_store import OffloadTier

TOML = """
[[event]]
at = 5.0
kind = "slow"
replica = ["r0", "r1"]
factor = 2.5

[[event]]
at = 1
kind = "jump"
factors = [1.0, 3.0]
every = 4.0

[autoscale]
min = 2
max = 8
high = 20.0
low = 4.0

[offload]
blocks = 100
tokens_per_s = 5000.0
"""


def test_a_file_becomes_values(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(TOML)
    found = read_scenario(path)
    assert found.events == (
        ScenarioEvent(5.0, "slow", ("r0", "r1"), 2.5),
        ScenarioEvent(1.0, "jump", ("*",), factors=(1.0, 3.0), every=4.0),
    )
    assert found.autoscale == AutoscalerSettings(2, 8, 20.0, 4.0)
    assert found.offload == OffloadTier(100, 5000.0)


def test_json_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({"event": [{"at": 3, "kind": "stop", "replica": "r1"}]}))
    assert read_scenario(path).events == (ScenarioEvent(3.0, "stop", ("r1",)),)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "a scenario is a table"),
        ({"events": []}, "no field 'events'"),
        ({"event": {"at": 1}}, r"write \[\[event\]\]"),
        ({"event": [{"at": 1, "kind": "explode"}]}, "event 1: kind is 'explode'"),
        ({"event": [{"kind": "stop"}]}, "event 1: a stop needs at"),
        ({"event": [{"at": 1, "kind": "stop"}, {"at": -1, "kind": "stop"}]}, "event 2: at is -1"),
        ({"event": [{"at": True, "kind": "stop"}]}, "at is True"),
        ({"event": [{"at": 1, "kind": "stop", "factor": 2}]}, "no field 'factor'"),
        ({"event": [{"at": 1, "kind": "slow"}]}, "a slow needs factor"),
        ({"event": [{"at": 1, "kind": "slow", "factor": 0}]}, "above 0"),
        ({"event": [{"at": 1, "kind": "jump", "factors": [], "every": 1}]}, "factors is"),
        ({"event": [{"at": 1, "kind": "jump", "factors": [1], "every": 0}]}, "every is 0"),
        ({"event": [{"at": 1, "kind": "stop", "replica": 3}]}, "replica is 3"),
        ({"autoscale": {"min": 1, "max": 2, "high": 3}}, "low is missing"),
        ({"autoscale": {"min": 3, "max": 2, "high": 3, "low": 1}}, "min must not exceed max"),
        ({"autoscale": {"min": 1.5, "max": 2, "high": 3, "low": 1}}, "whole number"),
        ({"offload": {"blocks": 3}}, "tokens_per_s is missing"),
        ({"offload": 3}, "must be a table"),
    ],
)
def test_what_makes_no_sense_is_refused(document: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_scenario(document)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text("at = = 3")
    with pytest.raises(ConfigError, match=r"scenario\.toml"):
        read_scenario(path)
