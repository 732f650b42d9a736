from dataclasses import replace

import pytest

from headstart.core.errors import ConfigError
from headstart_lab.engine import queue_cost as lab_order
from headstart_lab.engine.queue_cost import OrderConfig, run_order

SMALL = OrderConfig(waiting=40, prompt=512, steps=8, cap=64, runs=1)


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
def test_each_form_admits_what_it_says(policy: str) -> None:
    config = replace(SMALL, policy=policy)
    report = run_order(0, config)
    assert report.problems == []  # a form that admitted another number would be here
    forms = [row["form"] for row in report.values["forms"]]
    assert len(forms) == len(set(forms)) == 7


def test_the_worst_form_gives_the_figure() -> None:
    values = run_order(0, SMALL).values
    assert values["order_us_per_step"] == max(row["order_us"] for row in values["forms"])
    assert values["worst_form"] in [row["form"] for row in values["forms"]]


def test_admissions_where_nothing_should_fit_invalidate_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_order, "_held", lambda decodes: 10_000)
    problems = run_order(0, SMALL).problems
    assert problems and all("none admitted" in problem for problem in problems)


def test_a_queue_that_would_run_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="--waiting 8"):
        run_order(0, OrderConfig(waiting=8, steps=8))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="lpm"):
        run_order(0, OrderConfig(policy="sjf"))
