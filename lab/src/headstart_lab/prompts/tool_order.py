"""Do canonical tools change answers? The tool that a model calls, with tools in several orders and forms, over seeds.

For each question and order, a server without rules samples calls at temperature 1. The distance between the choices of
two orders (total variation, mean over questions) is compared with that of the same samples with the order forgotten:
the noise of seeds. JSON on stdout.

python -m headstart_lab.prompts.tool_order URL > tool_order.json
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from random import Random
from typing import Any
from urllib.error import HTTPError

from headstart.openai.canonical.canonical_body import CHAT, canonical_body
from headstart_lab.prompts.agent_chats import Body
from headstart_lab.prompts.agent_replay import tool_schemas
from headstart_lab.prompts.behind_router import call

PERMUTATIONS = 2000
MAX_TOKENS = 16  # the name of the tool is among them
RETRIES = 20
_NAME = re.compile(r'"name": "(\w+)"')
_FUNCTIONS = {
    "get_weather": ("Get the weather forecast of a city.", {"city": "string", "day": "string"}),
    "send_email": ("Send an email to a person.", {"to": "string", "text": "string"}),
    "set_timer": ("Start a kitchen timer.", {"minutes": "integer"}),
    "search_flights": ("Search for flights between two cities.", {"origin": "string", "target": "string"}),
    "convert_currency": ("Convert an amount of money to another currency.", {"amount": "number", "to": "string"}),
    "play_music": ("Play a song of an artist.", {"artist": "string", "title": "string"}),
}
QUESTIONS = {
    "Will it rain in Oslo tomorrow?": "get_weather",
    "How warm is it in Madrid on Friday?": "get_weather",
    "Write to Anna that I will be late.": "send_email",
    "Tell my boss by email that the report is done.": "send_email",
    "The eggs need seven minutes.": "set_timer",
    "Remind me of the oven in 20 minutes.": "set_timer",
    "Is there a plane from Rome to Athens tonight?": "search_flights",
    "I want to fly from Berlin to Lisbon.": "search_flights",
    "How much is 50 dollars in euros?": "convert_currency",
    "What are 300 yen in pounds?": "convert_currency",
    "I would like to hear Yesterday by the Beatles.": "play_music",
    "Put on something by Miles Davis.": "play_music",
}


def tools() -> list[Body]:
    found: list[Body] = []
    for name, (text, fields) in _FUNCTIONS.items():
        properties = {field: {"type": kind, "description": f"The {field}."} for field, kind in fields.items()}
        schema = {"type": "object", "properties": properties, "required": list(fields)}
        found.append({"type": "function", "function": {"name": name, "description": text, "parameters": schema}})
    return found


def canonical(body: Body, rules: frozenset[str]) -> Body:
    return dict(canonical_body(CHAT, json.dumps(body).encode(), body, rules).values)


def sampled(url: str, offered: list[Body], question: str, num_seeds: int, seed: int) -> list[str]:
    """Return the names of the tools called with `num_seeds` seeds."""
    body: Body = {
        "messages": [
            {"role": "system", "content": "Call the function that helps the user."},
            {"role": "user", "content": question},
        ],
        "tools": offered,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "n": num_seeds,
        "seed": seed,
    }
    choices = _answer(f"{url}/v1/chat/completions", body)["choices"]
    found = [_NAME.search(choice["message"]["content"] or "") for choice in choices]  # calls are cut behind the name
    return [name[1] if name is not None else "(none)" for name in found]


def _answer(url: str, body: Body) -> Body:
    """Return an answer; a compiler of grammars that is too slow on a loaded machine is asked again."""
    for attempt in range(RETRIES + 1):
        try:
            return json.loads(call(url, body)[0])
        except HTTPError:
            if attempt == RETRIES:
                raise
            time.sleep(1.0)
    raise AssertionError("not reached")


def distance(one: list[list[str]], other: list[list[str]]) -> float:
    """Return the mean total variation distance of two lists of samples per question."""
    total = 0.0
    for mine, others in zip(one, other, strict=True):
        counts, other_counts = Counter(mine), Counter(others)
        names = counts.keys() | other_counts.keys()
        total += sum(abs(counts[n] / len(mine) - other_counts[n] / len(others)) for n in names) / 2
    return total / len(one)


def p_value(one: list[list[str]], other: list[list[str]], rng: Random) -> tuple[float, float]:
    """Return the mean distance under seed noise alone, and the share of permutations with at least the one found."""
    found, total, above = distance(one, other), 0.0, 0
    for _ in range(PERMUTATIONS):
        mixed = [[*mine, *others] for mine, others in zip(one, other, strict=True)]
        for samples in mixed:
            rng.shuffle(samples)
        half = len(one[0])
        null = distance([samples[:half] for samples in mixed], [samples[half:] for samples in mixed])
        total, above = total + null, above + (null >= found - 1e-12)
    return total / PERMUTATIONS, above / PERMUTATIONS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--orders", type=int, default=4, help="shuffled orders")
    given = parser.parse_args()
    rng = Random(19)
    offered: dict[str, list[Body]] = {"sent": tools()}
    for number in range(given.orders):
        offered[f"shuffled {number + 1}"] = rng.sample(tools(), len(_FUNCTIONS))
    reordered: list[Body] = [{"tools": tools()}]
    tool_schemas(reordered, rng)
    offered["keys shuffled"] = reordered[0]["tools"]
    body: Body = {"tools": offered["shuffled 1"]}
    keys = canonical({"tools": offered["keys shuffled"]}, frozenset({"schemas"}))
    offered["schemas"] = keys["tools"]
    offered["tools"] = canonical(body, frozenset({"tools"}))["tools"]
    offered["tools and schemas"] = canonical(body, frozenset({"tools", "schemas"}))["tools"]
    samples: dict[str, list[list[str]]] = {}
    for number, (name, shown) in enumerate([*offered.items(), ("sent, other seeds", offered["sent"])]):
        seed = 1000 * (number + 1)
        samples[name] = [
            sampled(given.url, shown, question, given.seeds, seed + 20 * at) for at, question in enumerate(QUESTIONS)
        ]
        print(name, _accuracy(samples[name]), file=sys.stderr, flush=True)
    rows: dict[str, Any] = {}
    for name, chosen in samples.items():
        noise, p = p_value(samples["sent"], chosen, Random(7)) if name != "sent" else (0.0, 1.0)
        rows[name] = {
            "right_tool": _accuracy(chosen),
            "distance_to_sent": round(distance(samples["sent"], chosen), 4),
            "seed_noise": round(noise, 4),
            "p": round(p, 4),
        }
    print(json.dumps({"questions": len(QUESTIONS), "seeds": given.seeds, "orders": rows}, indent=1))


def _accuracy(chosen: list[list[str]]) -> float:
    right = [name == wanted for names, wanted in zip(chosen, QUESTIONS.values(), strict=True) for name in names]
    return round(sum(right) / len(right), 4)


if __name__ == "__main__":
    main()
