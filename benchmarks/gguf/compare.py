"""Compare two sets of greedy answers: python compare.py OURS THEIRS; the last line of stdout is one JSON document.

Answers are compared up to their first difference. There the margin counts: how far our best token is ahead of our
second in log-probability. llama.cpp rounds activations to 8 bits for each product with packed weights, so tokens whose
margin is small may differ.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many prompts and answers are equal, and the margins where answers part."""
    margins: list[float] = []
    equal_tokens = same_prompts = 0
    all_margins: list[float] = []
    for row, other in zip(ours, theirs, strict=True):
        same_prompts += row["prompt"] == other["prompt"]
        pairs = zip(row["tokens"], other["tokens"], strict=False)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        all_margins += [best[0] - best[1] for best in row["best"][:first]]
        equal_tokens += len(row["tokens"]) if first is None else first
        if first is not None:
            best = row["best"][first]
            margins.append(best[0] - best[1])
    return {
        "prompts": len(ours),
        "prompts_tokenized_equally": same_prompts,
        "answers_equal": len(ours) - len(margins),
        "tokens_equal_before_the_first_difference": equal_tokens,
        "margin_at_differences": sorted(round(margin, 4) for margin in margins),
        "median_margin_of_equal_tokens": round(statistics.median(all_margins), 3) if all_margins else None,
    }


def main() -> None:
    """Print the comparison."""
    ours, theirs = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:3])
    print(json.dumps(compare(ours["rows"], theirs["rows"])))


if __name__ == "__main__":
    main()
