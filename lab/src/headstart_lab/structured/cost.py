"""The cost of schemas: cost.py [--model llama-100m] [--rounds 8] [--report FILE].

32 requests decode at once, without a grammar and with 32 different schemas that were never seen before, by turns. A
schema is compiled in its turn, so the compilation counts. Every turn generates the same number of tokens from prompts
of the same length, each new. The figures are seconds per output token, elapsed and of the process's CPU time (which
other work on the machine hardly affects), as ratios to the turn without grammar of the same round.

kinds:  text     one long string: nearly every token is sampled under a mask
        mixed    an array of numbers, short strings, words of an enum and objects
        forced   long names and constants: the grammar forces most tokens

The last line of stdout is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from headstart import LLM
from headstart.bench.cli.cli_run import resolve_or_create_bench_model
from headstart.core.request import Request, SamplingParams
from headstart.openai.structured.grammar_process import build
from headstart.openai.structured.grammar_text import json_schema_grammar
from headstart.openai.structured.structured_fields import read_json_schema

PROMPT_TOKENS = 32
MAX_RATIO = 1.15  # of the kinds that force few tokens
Json = dict[str, Any]


class Turn(NamedTuple):
    """One turn of all streams."""

    elapsed: float  # seconds per output token
    cpu: float  # seconds per output token
    forced: float  # share of the output tokens


def text(nonce: str) -> Json:
    """Return a schema of one long string. Only the quotation mark is forced."""
    return {"type": "string", "minLength": 1000 + int(nonce)}


def mixed(nonce: str) -> Json:
    """Return a schema of a long array of small values."""
    value = {
        "anyOf": [
            {"type": "integer", "minimum": -999, "maximum": 9999},
            {"type": "string", "maxLength": 12},
            {"enum": [f"{word} {nonce}" for word in ("red", "green", "blue")]},
            _object({"x": {"type": "number"}, f"k{nonce}": {"type": "boolean"}}),
        ]
    }
    return _object({f"values_{nonce}": {"type": "array", "minItems": 500, "items": value}})


def forced(nonce: str) -> Json:
    """Return a schema whose names and constants are most of the answer."""
    names = {f"the name of the property number {number} of {nonce}": {"enum": [0, 1]} for number in range(100)}
    return _object(names)


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


KINDS: dict[str, Callable[[str], Json]] = {"text": text, "mixed": mixed, "forced": forced}


class Bench:
    """One model, and the turns on it."""

    def __init__(self, model: str, streams: int, max_tokens: int) -> None:
        blocks = streams * (-(-(PROMPT_TOKENS + max_tokens) // 16) + 1) + 64
        self._llm = LLM(model, num_blocks=blocks, max_num_seqs=streams, enable_prefix_caching=False)
        self._streams, self._max_tokens = streams, max_tokens
        self._numbers = count()

    def check_seconds(self) -> dict[str, float]:
        """Return the median CPU seconds of the server's check of one new schema, by kind."""
        text = (Path(self._llm.info.model) / "tokenizer.json").read_text(encoding="utf-8")
        check = build((text, self._llm.info.vocab_size, (), 1.0))
        return {kind: statistics.median(_seconds(check, kind, 10_000 + at) for at in range(20)) for kind in KINDS}

    def turn(self, kind: str | None) -> Turn:
        """Run all streams once, with new schemas of this kind, or without grammar."""
        engine = self._llm.engine
        before = engine.stats().counters
        requests = [self._request(kind) for _ in range(self._streams)]
        elapsed, cpu = time.perf_counter(), time.process_time()
        for request in requests:
            engine.add_request(request)
        failures: list[str] = []
        while engine.has_work:
            failures += [str(output.error) for output in engine.step(time.monotonic()) if output.error]
        elapsed, cpu = time.perf_counter() - elapsed, time.process_time() - cpu
        after = engine.stats().counters
        tokens = after.generation_tokens - before.generation_tokens
        assert not failures and tokens == self._streams * self._max_tokens, (failures, tokens)
        return Turn(elapsed / tokens, cpu / tokens, (after.forced_tokens - before.forced_tokens) / tokens)

    def _request(self, kind: str | None) -> Request:
        number = next(self._numbers)
        grammar = None if kind is None else new_grammar(kind, number)
        sampling = SamplingParams(max_tokens=self._max_tokens, seed=number, grammar=grammar)  # without stop tokens
        vocab = self._llm.info.vocab_size
        prompt = array("i", [10 + (number * 7919 + at * 104_729) % (vocab - 20) for at in range(PROMPT_TOKENS)])
        return Request(f"cost-{number}", prompt, sampling, arrival=time.monotonic())


def new_grammar(kind: str, number: int) -> str:
    """Return the grammar of a schema that differs from those of all other numbers."""
    return json_schema_grammar(read_json_schema("schema", KINDS[kind](f"{number:05d}")))


def _seconds(check: Callable[[str], str], kind: str, number: int) -> float:
    grammar = new_grammar(kind, number)
    began = time.process_time()
    check(grammar)
    return time.process_time() - began


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Return the figures of `rounds` rounds of turns, in an order that changes from round to round."""
    names = [None, *KINDS]
    for name in names:
        bench.turn(name)  # warm up
    turns: dict[str | None, list[Turn]] = {name: [] for name in names}
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order if number % 2 else order[::-1]:
            turns[name].append(bench.turn(name))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    plain = turns[None]
    report: dict[str, Any] = {"none": {"elapsed_ms": _ms(plain, "elapsed"), "cpu_ms": _ms(plain, "cpu")}}
    for kind in KINDS:
        own = turns[kind]
        report[kind] = {
            "forced_share": round(statistics.mean(turn.forced for turn in own), 3),
            "elapsed_ms": _ms(own, "elapsed"),
            "cpu_ms": _ms(own, "cpu"),
            "elapsed_ratio": _spread([one.elapsed / other.elapsed for one, other in zip(own, plain, strict=True)]),
            "cpu_ratio": _spread([one.cpu / other.cpu for one, other in zip(own, plain, strict=True)]),
        }
    return report


def _ms(turns: list[Turn], field: str) -> float:
    return round(statistics.median(getattr(turn, field) for turn in turns) * 1e3, 3)


def _spread(ratios: list[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest."""
    return {name: round(of(ratios), 3) for name, of in (("median", statistics.median), ("min", min), ("max", max))}


def is_valid(kinds: dict[str, Any]) -> bool:
    """Return whether masks cost at most MAX_RATIO, and forced tokens are faster than sampled ones, in CPU time."""
    masked = all(kinds[kind]["cpu_ratio"]["median"] <= MAX_RATIO for kind in ("text", "mixed"))
    return masked and kinds["forced"]["cpu_ratio"]["median"] < 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m", help="a folder, or a shape with random weights")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--report", type=Path, help="also write the report here")
    options = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "bench-models"
    bench = Bench(resolve_or_create_bench_model(options.model, cache), options.streams, options.max_tokens)
    kinds = measure(bench, options.rounds)
    checks = bench.check_seconds()
    document = {
        "date": date.today().isoformat(),
        "llguidance": version("llguidance"),
        "model": options.model,
        "cores": os.cpu_count(),
        "streams": options.streams,
        "tokens_per_stream": options.max_tokens,
        "rounds": options.rounds,
        "valid": is_valid(kinds),
        "check_cpu_ms": {kind: round(seconds * 1e3, 2) for kind, seconds in checks.items()},
        "kinds": kinds,
    }
    if options.report:
        options.report.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if document["valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
