"""The page-aligned lab: what the budget loses by hand, and a report that adds up."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from headstart.measurement.runner import EngineSetup
from headstart_lab.engine.aligned_prefill import BLOCK_SIZE, LIMITS, MODES, Mix, budget_lost, steps
from headstart_lab.engine.page_aligned import AlignedConfig, run_page_aligned
from headstart_lab.runners.null_executor import NullExecutor

SMALL = AlignedConfig(
    runs=2, budget_prompts=12, write_prompts=8, write_blocks=300, write_steps=2, whole_prompts=3, whole_outputs=2
)
MakeSetup = Callable[..., EngineSetup]


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        ("off", 0.0),
        ("exact", 10 / 90),  # 5 blocks of 16 of a budget of 90
        ("ceil", 10 / 90),
    ],
)
def test_budget_lost_by_one_long_prompt_is_what_no_block_fits_into(mode: str, lost: float) -> None:
    limits = replace(MODES[mode], max_batched_tokens=90, max_seqs=8)
    assert budget_lost(limits, Mix(1000, 1000, 1), seed=0, num_prompts=1) == pytest.approx(lost)


def test_ceil_also_loses_what_the_last_block_of_each_prompt_leaves_free() -> None:
    mix = Mix(17, 17, 1)  # 2 blocks, charged 32
    found = {
        mode: budget_lost(replace(limits, max_batched_tokens=170, max_seqs=150), mix, seed=0, num_prompts=100)
        for mode, limits in MODES.items()
    }
    assert found["off"] == 0
    assert found["exact"] == 0  # ten whole prompts fill a step
    assert found["ceil"] == pytest.approx(1 - 85 / 170, abs=0.05)  # five of them


def test_only_steps_with_prompts_waiting_are_pressed() -> None:
    found = [
        (step.num_tokens, step.pressed) for step in steps(LIMITS, Mix(1500, 1500, 2), 0, num_prompts=2, num_blocks=400)
    ]
    assert found[0] == (2048, True)
    assert all(not pressed for _, pressed in found[1:])


def test_aligned_modes_really_align() -> None:
    for limits in (MODES["exact"], MODES["ceil"]):
        for step in steps(limits, Mix(900, 1100, 2), 1, num_prompts=5, num_blocks=500):
            for chunk in step.batch.chunks:
                assert chunk.num_logits or (chunk.start + len(chunk.token_ids)) % BLOCK_SIZE == 0


def test_the_report_has_its_keys_and_spreads(make_setup: MakeSetup) -> None:
    report = run_page_aligned(make_setup(), SMALL)
    assert report.problems == []
    keys = ["write_us_off", "write_us_on", "budget_lost_exact", "budget_lost_ceil"]
    assert list(report.values)[:4] == keys
    assert all(report.values[key] > 0 for key in keys)
    assert report.values["budget_lost_off"] == 0
    assert {*keys, "write_us_by_token", "wide_write_us_on", "whole_s_off", "whole_s_ceil"} <= report.spread.keys()
    assert report.values["differing_tokens"] == 0


def test_other_tokens_with_the_flag_invalidate_the_run(make_setup: MakeSetup, forgetful: type[NullExecutor]) -> None:
    assert "other tokens" in run_page_aligned(make_setup(forgetful), SMALL).problems[0]
