"""Does the doctor name mistakes injected into recorded agent traces? JSON on stdout; counts only.

python -m headstart_lab.prompts.agent_doctor TRACE... > benchmarks/prompts/doctor.json
"""

import argparse
import copy
import json
import sys
import time
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from headstart.reuse.log_report import lint_report
from headstart.reuse.logged_prompt import parse_log
from headstart_lab.prompts.agent_chats import Body, Call, agent, bodies_of, recorded_chats
from headstart_lab.prompts.prompt_mistakes import MISTAKES, UNKNOWN_FORMS


def log_of(chat: list[Call], seed: object, max_calls: int) -> list[Body]:
    """Return the first requests of a conversation, and those of the same conversation held again by the same agent."""
    rng = Random(f"log {seed}")
    own = agent(rng)
    return bodies_of(chat[:max_calls], rng, own)


def blamed(bodies: list[Body]) -> set[str]:
    return {cost.cause for cost in lint_report(parse_log(map(json.dumps, bodies)).prompts).causes}


def can_have(cause: str, bodies: list[Body]) -> bool:
    """Return whether a mistake makes sense for a log: dropping history needs several questions."""
    if cause == "history_truncated":
        return sum(message["role"] == "user" for message in bodies[-1]["messages"]) >= 6
    if cause == "json_order":
        return any(message["role"] == "tool" for message in bodies[-1]["messages"])
    return True


def injected(bodies: list[Body], causes: tuple[str, ...], seed: object) -> list[Body]:
    rng = Random(f"{causes} {seed}")
    found = copy.deepcopy(bodies)
    for cause in causes:
        MISTAKES[cause](rng)(found, rng)
    return found


def rate(results: list[bool]) -> dict[str, Any]:
    return {"cases": len(results), "right": sum(results), "share": round(sum(results) / max(len(results), 1), 4)}


def measure_clean(chats: list[list[Call]], max_calls: int) -> dict[str, int]:
    """Return the clean prompts of conversations, and those of conversations in which anything is blamed."""
    logs = [log_of(chat, seed, max_calls) for seed, chat in enumerate(chats)]
    return {
        "clean_prompts": sum(map(len, logs)),
        "clean_prompts_blamed": sum(len(log) for log in logs if blamed(log)),
    }


def measure(chats: list[list[Call]], max_calls: int, num_pairs: int) -> dict[str, Any]:
    logs = [log_of(chat, seed, max_calls) for seed, chat in enumerate(chats)]
    single: dict[str, Any] = {}
    for cause in MISTAKES:
        fitting = [(seed, log) for seed, log in enumerate(logs) if can_have(cause, log)]
        results = [blamed(injected(log, (cause,), seed)) for seed, log in fitting]
        single[cause] = rate([found == {cause} for found in results]) | {
            "named_among_others": sum(cause in found for found in results)
        }
        print(cause, single[cause], file=sys.stderr, flush=True)
    pairs: list[bool] = []
    both_named: list[bool] = []
    rng = Random("pairs")
    for pair in combinations(MISTAKES, 2):
        fitting = [(seed, log) for seed, log in enumerate(logs) if all(can_have(cause, log) for cause in pair)]
        for seed, log in rng.sample(fitting, min(num_pairs, len(fitting))):
            found = blamed(injected(log, pair, seed))
            pairs.append(found == set(pair))
            both_named.append(set(pair) <= found)
    unknown: dict[str, Any] = {}
    for name, (cause, make) in UNKNOWN_FORMS.items():
        found_causes = []
        for seed, log in enumerate(logs):
            own = Random(f"{name} {seed}")
            bodies = copy.deepcopy(log)
            make(own)(bodies, own)
            found_causes.append(blamed(bodies))
        unknown[name] = {
            "cases": len(found_causes),
            "named": sum(found == {cause} for found in found_causes),
            "loss_found": sum(map(bool, found_causes)),
        }
    num_single = sum(one["cases"] for one in single.values())
    return {
        "conversations": len(chats),
        **measure_clean(chats, max_calls),
        "one_mistake": {
            "cases": num_single,
            "share": round(sum(one["right"] for one in single.values()) / num_single, 4),
            "by_cause": single,
        },
        "two_mistakes": rate(pairs) | {"both_among_others": sum(both_named)},
        "unknown_forms": unknown,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--max-calls", type=int, default=12, help="of each conversation")
    parser.add_argument("--conversations", type=int, default=1000, help="at most, of each trace")
    parser.add_argument("--pairs", type=int, default=4, help="conversations for each pair of mistakes")
    parser.add_argument("--clean-only", action="store_true", help="no mistakes")
    given = parser.parse_args()
    began = time.process_time()
    found = {
        path.stem: measure_clean(chats, given.max_calls)
        if given.clean_only
        else measure(chats, given.max_calls, given.pairs)
        for path in given.traces
        for chats in [list(recorded_chats(path))[: given.conversations]]
    }
    print(
        json.dumps(found | {"max_calls": given.max_calls, "cpu_seconds": round(time.process_time() - began)}, indent=1)
    )


if __name__ == "__main__":
    main()
