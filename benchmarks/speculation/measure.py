"""Speculation by prompt lookup, teacher-forced: measure.py --model FOLDER --tokenizer FOLDER [--kinds ...].

Two engines on the same loaded weights, one with drafts and one without, decode the same requests by turns, which of the
two first alternating. The model computes and samples every token; then the recorded token is taken in its place, so the
texts are real whatever the model is. Both engines have computed the prompt before the clock starts. Figures are ratios
of seconds per output token, elapsed and of the process's CPU time (which other work on the machine hardly affects),
with 95 % intervals by bootstrap over requests (1 stream) or groups of 8 requests (8 streams).

The last line of stdout is JSON.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from headstart.model.setup.threads import configure_num_threads

KINDS = ("miniswe", "taubench", "quotes", "json", "shuffled", "random")
BLOCK = 16
CONTEXT = 16_384
DRAWS = 2000


@dataclass(slots=True)
class Total:
    """Time and steps of one engine for one request or group."""

    elapsed: float = 0.0  # seconds
    cpu: float = 0.0  # seconds
    tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class Pair:
    """One request or group, decoded by both engines."""

    plain: Total = field(default_factory=Total)
    drafted: Total = field(default_factory=Total)


class Interval(NamedTuple):
    ratio: float
    low: float
    high: float


def main() -> None:
    """Run the kinds and print a line for each, and all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model that computes")
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json")
    parser.add_argument("--traces", default="../shared/traces")
    parser.add_argument("--documents", default="/usr/share", help="folder with .json and .rst files")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--streams", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--tokens", type=int, default=3000, help="output tokens per kind and number of streams")
    parser.add_argument("--earlier", type=int, default=0, help="outputs of the kind that are known before the first")
    parser.add_argument("--max-prompt", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--config", default='{"method": "ngram"}')
    args = parser.parse_args()
    configure_num_threads(args.threads)
    _bench(args)


def _bench(args: argparse.Namespace) -> None:
    from engines import Engines  # torch reads the thread settings when it is imported
    from texts import Texts
    from tokenizers import Tokenizer

    from headstart.measurement.machine import print_figures_with_machine

    with tempfile.TemporaryDirectory() as scratch:
        engines = Engines(long_context(Path(args.model), Path(scratch)), args)
        tokenizer = Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
        texts = Texts(tokenizer, Path(args.traces), Path(args.documents), args.max_prompt, engines.vocab_size)
        rows: list[dict[str, Any]] = []
        for streams in args.streams:
            for kind in args.kinds:
                earlier, cases = texts.cases(kind, args.tokens, args.earlier)
                groups = [cases[at : at + streams] for at in range(0, len(cases), streams)]
                engines.begin(earlier)
                pairs = [engines.decode(index, group) for index, group in enumerate(groups) if len(group) == streams]
                if not pairs:
                    print(f"{kind}: too few requests for {streams} streams", file=sys.stderr)
                    continue
                row = {"kind": kind, "streams": streams, **summary(pairs), **engines.acceptance()}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
        settings = {
            name: getattr(args, name)
            for name in ("tokens", "earlier", "max_prompt", "threads", "quantization", "config")
        }
        print_figures_with_machine(
            {"model": Path(args.model).name, "dtype": engines.dtype, "settings": settings, "rows": rows}
        )


def long_context(model: Path, scratch: Path) -> Path:
    """Return a copy of a model folder whose config.json permits the prompts of the traces; what it says is not used."""
    folder = scratch / model.name
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = max(config["max_position_embeddings"], CONTEXT)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the speed-ups with their intervals, and the plain times per token."""
    tokens = sum(pair.plain.tokens for pair in pairs)
    return {
        "pairs": len(pairs),
        "output_tokens": tokens,
        "speedup_cpu": _rounded(speedup(pairs, "cpu")),
        "speedup_elapsed": _rounded(speedup(pairs, "elapsed")),
        "plain_cpu_ms_per_token": round(1e3 * sum(pair.plain.cpu for pair in pairs) / tokens, 3),
        "tokens_per_step": round(tokens / max(sum(pair.drafted.steps for pair in pairs), 1), 3),
    }


def speedup(pairs: Sequence[Pair], clock: str) -> Interval:
    """Return plain time / time with drafts for the same tokens, over all pairs, with its 95 % interval."""
    times = [(getattr(pair.plain, clock), getattr(pair.drafted, clock)) for pair in pairs]
    rng = random.Random(0)
    found: list[float] = []
    for _ in range(DRAWS):
        drawn = rng.choices(times, k=len(times))
        found.append(sum(plain for plain, _ in drawn) / sum(drafted for _, drafted in drawn))
    found.sort()
    ratio = sum(plain for plain, _ in times) / sum(drafted for _, drafted in times)
    return Interval(ratio, found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS) - 1])


def _rounded(interval: Interval) -> list[float]:
    return [round(value, 3) for value in interval]


def timed(step: Any) -> tuple[Any, float, float]:
    """Return the result of a call, its elapsed and its CPU seconds."""
    cpu, began = time.process_time(), time.perf_counter()
    result = step()
    return result, time.perf_counter() - began, time.process_time() - cpu


def packed(tokens: Sequence[int]) -> "array[int]":
    """Return token ids as int32."""
    return array("i", tokens)


if __name__ == "__main__":
    main()
