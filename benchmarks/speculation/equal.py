"""Answers with drafts against answers without, in float32: `python equal.py --traces DIR [--model MODEL]`.

Prompts are pieces of recorded outputs of agents, each twice in a row so that there is something to guess; every second
request is sampled at temperature 0.8 with a seed of its own. The last line of stdout is JSON: requests, those whose
tokens differ, and drafts. Exit code 1 if any differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headstart import LLM
from headstart.engine.llm import Completion

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--model", default="", help="default: the bundled model")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--words", type=int, default=20, help="of a piece")
    parser.add_argument("--max-tokens", type=int, default=32)
    asked = parser.parse_args()
    prompts = pieces(asked.traces, asked.requests, asked.words)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "num_blocks": 4096}
    differing: list[int] = []
    num_tokens = 0
    speculation = {"speculative_config": {"method": "ngram"}}
    with LLM(asked.model, **options) as plain, LLM(asked.model, **options, **speculation) as drafted:
        for start in range(0, len(prompts), BATCH):
            numbers = range(start, min(start + BATCH, len(prompts)))
            for sampled in (False, True):
                mine = [number for number in numbers if number % 2 == sampled]
                expected = answers(plain, prompts, mine, sampled, asked.max_tokens)
                found = answers(drafted, prompts, mine, sampled, asked.max_tokens)
                for number, one, other in zip(mine, expected, found, strict=True):
                    num_tokens += len(one.token_ids)
                    if (one.token_ids, one.finish_reason) != (other.token_ids, other.finish_reason):
                        differing.append(number)
            print(f"{numbers.stop} requests, {len(differing)} differ", file=sys.stderr, flush=True)
        counters = drafted.engine.stats().counters
    result = {
        "model": asked.model or "bundled",
        "requests": len(prompts),
        "output_tokens": num_tokens,
        "differing": differing,
        "draft_tokens": counters.num_draft_tokens,
        "accepted_tokens": counters.num_accepted_tokens,
    }
    print(json.dumps(result))
    return 1 if differing or not counters.num_accepted_tokens else 0


def pieces(traces: Path, count: int, words: int) -> list[str]:
    """Return `count` different prompts."""
    found: dict[str, None] = {}
    for name in ("agent_miniswe.jsonl", "agent_taubench.jsonl"):
        for line in (traces / name).read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["output"].split()
            for at in range(0, len(text) - words, words // 2):
                piece = " ".join(text[at : at + words])
                found[f"{piece}\n{piece[: len(piece) // 2]}"] = None
    return list(found)[:count]


def answers(llm: LLM, prompts: list[str], numbers: list[int], sampled: bool, max_tokens: int) -> list[Completion]:
    """Return the answers to some of the prompts, served together."""
    params = [
        {"max_tokens": max_tokens, "temperature": 0.8 if sampled else 0.0, "ignore_eos": True}
        | ({"seed": number} if sampled else {})
        for number in numbers
    ]
    if not sampled:
        return llm.generate([prompts[number] for number in numbers], params[0], progress=False)
    return [
        llm.generate([prompts[number]], one, progress=False)[0] for number, one in zip(numbers, params, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
