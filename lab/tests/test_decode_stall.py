from collections.abc import Callable
from itertools import pairwise

import pytest

from headstart.core.batch import Batch, StepResult
from headstart.core.sched.step_time import DECODE_STEPS, LEAST_TOKENS
from headstart.measurement.runner import EngineSetup
from headstart_lab.engine.decode_stall import StallConfig, run_stall
from headstart_lab.runners.null_executor import NullExecutor
from headstart_lab.runners.virtual_time import StepCost, VirtualClock, VirtualExecutor

MakeSetup = Callable[..., EngineSetup]
SMALL = StallConfig(decodes=4, context=16, prompt=3000, calm=4, caps=(128, 512), cap=256, runs=1)
CLOCK_COST = StepCost(step=0.010, token=0.001)


def run(make_setup: MakeSetup, config: StallConfig) -> dict:
    """Figures in virtual time: exact, whatever else the machine does."""
    clock = VirtualClock()

    class Virtual(NullExecutor):
        def execute(self, batch: Batch) -> StepResult:
            return VirtualExecutor(self.num_blocks, self.block_size, self.vocab_size, CLOCK_COST, clock).execute(batch)

    report = run_stall(make_setup(Virtual), config, clock=clock)
    assert report.problems == []
    return report.values


def test_a_cap_bounds_what_decodes_wait_and_makes_the_prompt_take_more_steps(make_setup: MakeSetup) -> None:
    values = run(make_setup, SMALL)
    unloaded = CLOCK_COST.seconds(4)
    assert values["unloaded_p99_ms"] == pytest.approx(1e3 * unloaded)
    assert values["tpot_p99_over_unloaded_cap"] == pytest.approx(CLOCK_COST.seconds(4 + 256) / unloaded)
    by_cap = {row["cap"]: row for row in values["bounds"] if row["max_step_time"] == 0}
    assert [by_cap[cap]["steps"] for cap in (0, 512, 256, 128)] == [2, 6, 12, 24]
    ratios = [by_cap[cap]["tpot_p99_over_unloaded"] for cap in (0, 512, 256, 128)]
    assert all(larger > smaller for larger, smaller in pairwise(ratios))
    assert values["ttft_cap_ms"] > values["ttft_no_bound_ms"]


def test_by_default_no_step_lasts_longer_than_six_decode_steps(make_setup: MakeSetup) -> None:
    values = run(make_setup, SMALL)
    unloaded = CLOCK_COST.seconds(4)
    (default,) = [row for row in values["bounds"] if row["max_step_time"] is None]
    fitting = int((DECODE_STEPS - 1) * unloaded / CLOCK_COST.token) // LEAST_TOKENS * LEAST_TOKENS
    assert values["tpot_p99_over_unloaded"] == pytest.approx(CLOCK_COST.seconds(4 + fitting) / unloaded, rel=1e-3)
    assert values["tpot_p99_over_unloaded"] <= DECODE_STEPS
    assert default["steps"] == -(-SMALL.prompt // fitting)


def test_the_reported_cap_is_measured_even_if_no_other_is(make_setup: MakeSetup) -> None:
    config = StallConfig(decodes=2, context=16, prompt=600, calm=2, caps=(), cap=128, runs=1)
    assert [row["cap"] for row in run(make_setup, config)["bounds"]] == [0, 0, 128]


def test_nothing_is_left_behind(make_setup: MakeSetup) -> None:
    engines = []
    setup = make_setup()

    def build(*args: object, **extra: object) -> object:
        engines.append(setup.build(*args, **extra))
        return engines[-1]

    run_stall(EngineSetup(build, "", "null"), SMALL)
    assert engines and all(not engine.has_work for engine, _ in engines)
