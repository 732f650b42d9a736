"""Run llguidance on hostile grammars, each in a process with a time limit: probe.py TOKENIZER [--drawn 2000].

TOKENIZER is a folder with a tokenizer.json. Per case it measures the seconds of validate_grammar, of building an
LLMatcher, of the slowest token mask and the slowest consumed token over a few random walks, and the growth of memory.
One JSON line per case goes to stdout, the slow ones to stderr. A case that exceeds the limit is killed and reported.
"""

import argparse
import json
import multiprocessing as mp
import random
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headstart_lab.structured.hostile_grammars import Case, handmade
from headstart_lab.structured.random_grammars import drawn

WALKS = ("any", "any", "letters")
LETTERS = ("a", "b", "x", "aa", "ab", '"', "a" * 4)


def load_tokenizer(folder: Path) -> LLTokenizer:
    """Return llguidance's form of the tokenizer in `folder`."""
    return LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))


def grammar_of(case: Case) -> str:
    """Return llguidance's grammar text; raises ValueError."""
    if case.kind == "json":
        return LLMatcher.grammar_from_json_schema(case.text)
    return LLMatcher.grammar_from_regex(case.text) if case.kind == "regex" else LLMatcher.grammar_from_lark(case.text)


def measure(case: Case, tokenizer: LLTokenizer, limits: LLParserLimits, num_steps: int) -> dict[str, Any]:
    """Return the seconds of each phase, and llguidance's error if it refuses."""
    report: dict[str, Any] = {"name": case.name, "kind": case.kind}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    try:
        grammar = grammar_of(case)
    except BaseException as error:
        return report | {"error": f"{type(error).__name__}: {error}"[:200], "convert": time.perf_counter() - start}
    report["convert"] = time.perf_counter() - start
    start = time.perf_counter()
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits)
    report["validate"] = time.perf_counter() - start
    if failed:
        report["error"] = messages[0][:200]
        return report | {"megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}
    start = time.perf_counter()
    matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    report["build"] = time.perf_counter() - start
    if matcher.is_error():
        report["error"] = "build: " + matcher.get_error()[:200]
    report |= walks(matcher, tokenizer, random.Random(case.name), num_steps)
    return report | {"megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def walks(matcher: LLMatcher, tokenizer: LLTokenizer, rng: random.Random, num_steps: int) -> dict[str, Any]:
    """Take random walks through a grammar; return the slowest mask, the slowest consume, and errors at run time."""
    slowest, consumed, num_masks, failure = 0.0, 0.0, 0, ""
    letters = {tokens[0] for text in LETTERS if len(tokens := tokenizer.greedy_tokenize(text)) == 1}
    for walk in WALKS:
        current = matcher.deep_copy()
        for _ in range(num_steps):
            start = time.perf_counter()
            mask = int.from_bytes(current.compute_bitmask(), "little")
            slowest, num_masks = max(slowest, time.perf_counter() - start), num_masks + 1
            if current.is_error() or current.is_stopped() or not mask:
                break
            allowed = [token for token in letters if mask >> token & 1] if walk == "letters" else []
            token = rng.choice(allowed) if allowed else _one_bit(mask, rng, tokenizer.eos_token)
            start = time.perf_counter()
            current.consume_token(token)
            consumed = max(consumed, time.perf_counter() - start)
        if current.is_error():
            failure = current.get_error()[:160]
    return {"mask": slowest, "consume": consumed, "num_masks": num_masks} | ({"failed": failure} if failure else {})


def _one_bit(mask: int, rng: random.Random, eos: int) -> int:
    allowed = [8 * i + bit for i, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")) if byte
               for bit in range(8) if byte >> bit & 1]  # fmt: skip
    return rng.choice([token for token in allowed if token != eos] or allowed)


def worker(channel: Connection, folder: str, limits: dict[str, int], num_steps: int) -> None:
    """Answer cases until the channel closes."""
    tokenizer = load_tokenizer(Path(folder))
    while True:
        case = channel.recv()
        try:
            channel.send(measure(case, tokenizer, LLParserLimits(**limits), num_steps))
        except BaseException as error:  # a panic in llguidance is a finding
            channel.send({"name": case.name, "kind": case.kind, "panic": repr(error)[:300]})


class Workers:
    """One worker process, started again whenever a case kills it or exceeds the limit."""

    def __init__(self, folder: str, limits: dict[str, int], num_steps: int, timeout: float) -> None:
        self._arguments = (folder, limits, num_steps)
        self._timeout = timeout
        self._start()

    def _start(self) -> None:
        self._channel, theirs = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=worker, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._channel.send(Case("start", "regex", "a"))
        self._channel.recv()

    def run(self, case: Case) -> dict[str, Any]:
        """Return the report of one case."""
        self._channel.send(case)
        try:
            if self._channel.poll(self._timeout):
                return self._channel.recv()
            report: dict[str, Any] = {"hang": self._timeout}
        except (EOFError, ConnectionError):
            self._process.join()
            report = {"crash": self._process.exitcode}
        self._process.kill()
        self._process.join()
        self._channel.close()
        self._start()
        return {"name": case.name, "kind": case.kind, **report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limits", type=json.loads, default={}, help="JSON of LLParserLimits")
    options = parser.parse_args()
    workers = Workers(options.tokenizer, options.limits, options.steps, options.timeout)
    for case in [*handmade(), *drawn(random.Random(options.seed), options.drawn)]:
        report = workers.run(case)
        print(json.dumps(report), flush=True)
        slow = [key for key in ("convert", "validate", "build", "mask", "consume") if report.get(key, 0) > 0.25]
        if slow or report.get("megabytes", 0) > 100 or {"hang", "crash", "panic"} & report.keys():
            print(
                {key: round(v, 3) if isinstance(v, float) else v for key, v in report.items()},
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
