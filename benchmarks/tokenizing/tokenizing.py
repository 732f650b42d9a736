"""Measure the cost of tokenizing a long prompt again, whole and in segments. CPU time of this process, in turn.

python benchmarks/tokenizing/tokenizing.py MODEL_FOLDER > benchmarks/tokenizing/result.json
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer

NUM_TOKENS = 73_000
RUNS = 15
SHORT_CHARS = (20, 200, 1800)
SHORT_REPEATS = 200
DOCS = Path(__file__).parents[2] / "docs"


def main(folder: str) -> None:
    """Print one JSON document: milliseconds of CPU time, the median and the range of all runs."""
    base = Tokenizer.from_folder(folder)
    segmented = SegmentedTokenizer(base)
    assert segmented.is_segmented, "the tokens of this tokenizer's texts were not shown to be those of their parts"
    text = _text(base)
    segmented.encode(text)
    cases: dict[str, Callable[[int], object]] = {
        "whole, with a longer tail": lambda run: base.encode(_longer(text, run)),
        "segments, new": lambda run: segmented.for_domain("", b"domain %d" % run).encode(text),
        "segments, with a longer tail": lambda run: segmented.for_domain("", b"").encode(_longer(text, run)),
    }
    for chars in SHORT_CHARS:
        short = text[1000 : 1000 + chars]
        cases[f"{chars} characters whole, {SHORT_REPEATS} times"] = _repeated(lambda t=short: base.encode(t))
        cases[f"{chars} characters as the server does, {SHORT_REPEATS} times"] = _repeated(
            lambda t=short: segmented.for_domain("", b"").encode(t)
        )
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in range(RUNS):
        for name, work in cases.items():
            start = time.process_time()
            work(run)
            times[name].append((time.process_time() - start) * 1e3)
    for run in range(RUNS):
        assert segmented.encode(_longer(text, run)) == base.encode(_longer(text, run))
    found = {
        "tokens": len(base.encode(text)),
        "chars": len(text),
        "runs": RUNS,
        "cpu_ms": {name: _summary(values) for name, values in times.items()},
        "remembered_bytes_per_domain": segmented.memory.num_bytes // (RUNS + 1),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "model": Path(folder).name,
    }
    print(json.dumps(found, indent=1))


def _text(tokenizer: Tokenizer) -> str:
    """Return this repository's pages, repeated until there are enough tokens."""
    pages = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    text = pages
    while (count := len(tokenizer.encode(text))) < NUM_TOKENS:
        text += pages
    return text[: len(text) * NUM_TOKENS // count]


def _longer(text: str, run: int) -> str:
    return f"{text} and question {run}: what do these pages say about item {run} of the list?"


def _repeated(work: Callable[[], object]) -> Callable[[int], object]:
    return lambda _: [work() for _ in range(SHORT_REPEATS)]


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


if __name__ == "__main__":
    main(sys.argv[1])
