from dataclasses import replace

from headstart_lab.router.decision_cost import QUICK, run_pick


def test_the_index_is_bounded_after_prompts_without_repeats() -> None:
    config = replace(QUICK, blocks=128, long_prompt=256, short_prompt=64, decisions=20, unique=2000)
    report = run_pick(0, config)
    assert report.values["blocks_after"] <= config.replicas * config.blocks
    assert report.problems == []
    assert report.values["cost_pick_p99_us"] > 0 and report.values["requests_per_second"] > 0
