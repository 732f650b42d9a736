"""The int8 lab: its measures on hand-made logits, and whole runs on a tiny model and on the bundled one."""

import math

import pytest
import torch

from headstart.measurement.runner import EngineSetup
from headstart_lab.engine.int8 import QUICK, Difference, Int8Config, run_int8


def unbuilt(*_: object, **__: object) -> None:
    raise AssertionError("this lab builds no engine")


def test_equal_logits_do_not_differ() -> None:
    difference, logits = Difference(), torch.randn(5, 9)
    difference.add(logits, logits)
    assert difference.values() == {
        "greatest_difference": 0.0,
        "mean_difference": 0.0,
        "divergence_nats": 0.0,
        "same_top_token": 1.0,
    }


def test_differences_are_averaged_over_positions_added_in_turns() -> None:
    difference = Difference()
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    difference.add(expected[:1] + torch.tensor([0.0, math.log(3)]), expected[:1])  # 1/4, 3/4 for 1/2, 1/2
    difference.add(expected[1:], expected[1:])
    found = difference.values()
    assert found["greatest_difference"] == pytest.approx(math.log(3))
    assert found["mean_difference"] == pytest.approx(math.log(3) / 4)
    assert found["divergence_nats"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert found["same_top_token"] == 0.5


def test_a_tiny_model_differs_more_in_int8_than_in_bfloat16(tiny: str) -> None:
    report = run_int8(EngineSetup(unbuilt, tiny, "tiny", threads=1), Int8Config(prompts=3, tokens=40))  # type: ignore[arg-type]
    values = report.values
    assert values["positions"] == 120 and report.problems == []
    assert 0 < values["bfloat16_mean_difference"] < values["int8_mean_difference"] < values["logits_deviation"]
    assert 0 < values["bfloat16_divergence_nats"] < values["int8_divergence_nats"]
    assert 0 < values["int8_same_top_token"] <= values["bfloat16_same_top_token"] <= 1
    assert "int8_exact_answers" not in values


@pytest.mark.long
def test_the_bundled_model_is_asked_for_answers_too() -> None:
    values = run_int8(EngineSetup(unbuilt, "", "bundled", threads=1), QUICK).values  # type: ignore[arg-type]
    assert values["positions"] > 0
    assert {f"{name}_exact_answers" for name in ("float32", "bfloat16", "int8")} <= values.keys()
    assert values["int8_same_top_token"] > 0.9
