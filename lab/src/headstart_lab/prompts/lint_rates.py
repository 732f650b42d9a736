"""Rates at which `headstart lint` names the mistakes: python -m headstart_lab.prompts.lint_rates (JSON on stdout)."""

import json
from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import Any

from headstart.reuse.log_report import LogReport, lint_report
from headstart.reuse.logged_prompt import parse_log
from headstart_lab.prompts.prompt_mistakes import (
    ENGINE_MISTAKES,
    MISTAKES,
    UNKNOWN_FORMS,
    Body,
    clean_log,
    in_place_log,
    log_with,
)


def report(bodies: list[Body]) -> LogReport:
    return lint_report(parse_log(map(json.dumps, bodies)).prompts)


def causes(bodies: list[Body]) -> set[str]:
    return {cost.cause for cost in report(bodies).causes}


def single_rates(num_logs: int) -> dict[str, float]:
    """The share of logs with one mistake for which exactly that one is named."""
    return {
        cause: sum(causes(log_with([cause], seed)) == {cause} for seed in range(num_logs)) / num_logs
        for cause in (*MISTAKES, *ENGINE_MISTAKES)
    }


def pair_rate(num_logs: int) -> tuple[float, int]:
    """The share of logs with two mistakes for which exactly these two are named, and the number of logs."""
    pairs = [pair for pair in combinations(MISTAKES, 2) for _ in range(num_logs)]
    right = sum(causes(log_with(list(pair), f"pair {seed}")) == set(pair) for seed, pair in enumerate(pairs))
    return right / len(pairs), len(pairs)


def clean_blamed(num_logs: int, make: Callable[[Random], list[Body]] = clean_log) -> tuple[int, int]:
    """The clean prompts of logs for which anything was blamed, and all prompts."""
    logs = [make(Random(f"clean {seed}")) for seed in range(num_logs)]
    return sum(len(log) for log in logs if causes(log)), sum(map(len, logs))


def unknown_forms(num_logs: int) -> dict[str, dict[str, float]]:
    """For forms that the doctor was not written for: how often the cause is named, and how often a loss is found."""
    found: dict[str, dict[str, float]] = {}
    for name, (cause, make) in UNKNOWN_FORMS.items():
        named = lost = 0
        for seed in range(num_logs):
            rng = Random(f"{name} {seed}")
            bodies = clean_log(rng)
            make(rng)(bodies, rng)
            blamed = causes(bodies)
            named += blamed == {cause}
            lost += bool(blamed)
        found[name] = {"named": named / num_logs, "loss_found": lost / num_logs}
    return found


def rates(num_logs: int) -> dict[str, Any]:
    blamed, num_clean = clean_blamed(num_logs)
    blamed_in_place, num_in_place = clean_blamed(num_logs, in_place_log)
    pairs, num_pairs = pair_rate(max(num_logs // 10, 1))
    return {
        "logs_per_cause": num_logs,
        "single": single_rates(num_logs),
        "pairs": {"share": pairs, "logs": num_pairs},
        "clean_prompts": num_clean,
        "clean_prompts_blamed": blamed,
        "clean_prompts_in_place": num_in_place,
        "clean_prompts_in_place_blamed": blamed_in_place,
        "unknown_forms": unknown_forms(num_logs),
    }


if __name__ == "__main__":
    print(json.dumps(rates(50), indent=1))
