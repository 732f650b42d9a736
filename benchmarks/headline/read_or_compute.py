"""Read or compute: the length of a prompt from which reading its blocks is faster, by tier; and the CPU time of tiers.

    python benchmarks/headline/read_or_compute.py --model llama-100m >read.json

One engine for each tier, in this process, by turns. `lengths`: the time from a request to its first token for prompts
that are in no pool, computed and read; reading is forced here, while the product reads if it expects that to be faster.
`throughput`: prompt tokens per second when AT_ONCE such prompts of COLD_TOKENS tokens come at the same time.
`cold`: new prompts only, with and without a tier by turns: CPU time of this process per request, its threads included,
and the median of the pairs' ratios with its 95 % interval by bootstrap. `control` is a second engine without a tier.
`--tiers killed`: the same with a Redis server that is killed after the first pairs; from then on the second prompt of
each pair is one that the tier had. A request that ends with an error ends the run.
The last line of stdout is JSON.
"""

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from array import array
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from kill_every_replica import Fleet, model_folder

from headstart.config.options import EngineOptions
from headstart.core.cache import transfers
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.engine.assembly import build_engine
from headstart.store import disk
from headstart_lab.bootstrap import interval
from headstart_lab.router.failover_processes import quiet_ports

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens in whole blocks; one more follows
COLD_TOKENS, AT_ONCE = 1024, 12
TIERS = ("disk", "redis", "both")
NUM_BEFORE = 3  # pairs before the server is killed
SETTLED = 0.02  # seconds between two looks at the writer


def seconds(engine: Engine, *prompts: "array[int]") -> float:
    """Return the seconds to the first token of the last of these prompts, which come at once."""
    began = time.perf_counter()
    for prompt in prompts:
        engine.add_request(Request(secrets.token_hex(8), prompt, SamplingParams(temperature=0.0, max_tokens=1)))
    while engine.has_work:
        for output in engine.step(time.monotonic()):
            assert output.error is None, output
    return time.perf_counter() - began


def settle(engine: Engine) -> None:
    """Wait until all blocks are written, unless writing is paused."""
    while (store := engine.stats().store) is not None and store.num_pending and not store.degraded:
        time.sleep(SETTLED)


def lengths(engines: dict[str, Engine], options: argparse.Namespace, rng: Random) -> list[dict[str, float]]:
    """Return a row for each length: medians in ms, computed without a store and read from each tier."""
    rows: list[dict[str, float]] = []
    for num in (num for num in LENGTHS if num <= options.longest):
        prompts = [array("i", (rng.randrange(5, 500) for _ in range(num + 1))) for _ in range(options.rounds)]
        found: dict[str, list[float]] = {name: [] for name in engines}
        for name, engine in engines.items():
            for prompt in prompts if name != "none" else ():
                seconds(engine, prompt)
            settle(engine)
        for prompt in prompts:
            for name, engine in engines.items():
                assert engine.reset_prefix_cache()
                before = engine.stats().counters.store_tokens
                found[name].append(1e3 * seconds(engine, prompt))
                read = engine.stats().counters.store_tokens - before
                assert read == (0 if name == "none" else num), (name, num, read)
        rows.append({"tokens": num, **{name: statistics.median(values) for name, values in found.items()}})
        print(rows[-1], file=sys.stderr)
    return rows


def throughput(engines: dict[str, Engine], options: argparse.Namespace, rng: Random) -> dict[str, list[float]]:
    """Return prompt tokens per second of each round, computed without a store and read from each tier."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        prompts = [array("i", (rng.randrange(5, 500) for _ in range(COLD_TOKENS + 1))) for _ in range(AT_ONCE)]
        for name, engine in engines.items():
            for prompt in prompts if name != "none" else ():
                seconds(engine, prompt)
            settle(engine)
        for name, engine in engines.items():
            assert engine.reset_prefix_cache()
            before, began = engine.stats().counters.store_tokens, time.perf_counter()
            seconds(engine, *prompts)
            found[name].append(AT_ONCE * COLD_TOKENS / (time.perf_counter() - began))
            read = engine.stats().counters.store_tokens - before
            assert read == (0 if name == "none" else AT_ONCE * COLD_TOKENS), (name, read)
        print({name: round(values[-1]) for name, values in found.items()}, file=sys.stderr)
    return found


def cold(engines: dict[str, Engine], options: argparse.Namespace, rng: Random, fleet: Fleet) -> dict[str, Any]:
    """Return the CPU and wall time per request of new prompts by tier, in ms, and both over those without a store."""
    used: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    stored: list[array[int]] = []  # before the server was killed
    num_before = NUM_BEFORE if "killed" in engines else 0
    for number in range(-num_before, options.pairs):
        prompts = [array("i", (rng.randrange(5, 500) for _ in range(COLD_TOKENS))) for _ in range(2)]
        if number < 0:
            stored += prompts
        elif stored:
            prompts[1] = stored[number % len(stored)]
            fleet.kill("tier") if number == 0 else None
        for name, engine in sorted(engines.items(), reverse=bool(number % 2)):
            assert engine.reset_prefix_cache()
            began, cpu = time.perf_counter(), time.process_time()
            for prompt in prompts:
                seconds(engine, prompt)
            wall = time.perf_counter() - began
            settle(engine)
            if number < 0:
                continue
            used[name].append((1e3 * (time.process_time() - cpu) / len(prompts), 1e3 * wall / len(prompts)))
    found: dict[str, Any] = {}
    for name, pairs in used.items():
        found[name] = {}
        for which, unit in enumerate(("cpu", "wall")):
            ratios = [pair[which] / none[which] for pair, none in zip(pairs, used["none"], strict=True)]
            bounds = interval([[ratio] for ratio in ratios], statistics.median, Random(0))
            found[name] |= {f"{unit}_ms": statistics.median(pair[which] for pair in pairs)}
            found[name] |= {f"{unit}_over_none": statistics.median(ratios), f"{unit}_over_none_95": bounds}
    print(found, file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m", help="folder, GGUF file, or a shape with random weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=("cold", "lengths", "throughput"), default=["cold", "lengths"])
    parser.add_argument("--tiers", nargs="+", choices=(*TIERS, "killed"), default=list(TIERS))
    parser.add_argument("--rounds", type=int, default=7, help="prompts of each length")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="tokens")
    parser.add_argument("--pairs", type=int, default=30, help="of new prompts with and without a tier")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if "killed" in options.tiers and (len(options.tiers) > 1 or options.parts != ["cold"]):
        parser.error("--tiers killed goes alone, with --parts cold")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headstart-read-")))
        (port,) = quiet_ports(1)
        fleet = Fleet(model_folder(options.model, folder), options.threads, folder, port)
        stack.callback(fleet.end)
        fleet.end_at_sigterm()
        fleet.start_redis()
        url = f"redis://127.0.0.1:{port}"
        known = {
            "disk": str(folder / "a"),
            "redis": f"{url}/0",
            "both": f"{folder / 'b'},{url}/1",
            "killed": f"{url}/2",
        }
        places = {"none": None, "control": None, **{name: known[name] for name in options.tiers}}
        engines: dict[str, Engine] = {}
        for name, place in places.items():
            if name == "control" and "cold" not in options.parts:
                continue
            engine_options = EngineOptions(
                model=fleet.model,
                threads=options.threads,
                num_gpu_blocks_override=1024,
                kv_store=place,
                kv_store_secret=str(fleet.secret),
                enable_prefix_caching=True,
            )
            engines[name] = build_engine(engine_options)[0]
            stack.callback(engines[name].close)
            seconds(engines[name], array("i", range(5, 261)))
        rng = Random(options.seed)
        found: dict[str, Any] = {}
        if "cold" in options.parts:
            found["cold"] = cold(engines, options, rng, fleet)
            engines.pop("control").close()
        if {"lengths", "throughput"} & set(options.parts):
            transfers.GRACE_SECONDS = transfers.WAIT_SECONDS = 60.0
            disk.LoadTimeEstimate.expected = lambda self, num_blocks, now: 0.0  # type: ignore[method-assign]
        if "throughput" in options.parts:
            rates = throughput(engines, options, rng)
            found["tokens_per_s"] = {name: statistics.median(values) for name, values in rates.items()}
            found["tokens_per_s_rounds"] = rates
        if "lengths" in options.parts:
            found["lengths"] = rows = lengths(engines, options, rng)
            found["reads_from_tokens"] = {
                name: next((row["tokens"] for row in rows if row[name] < row["none"]), None) for name in options.tiers
            }
    print(json.dumps({"benchmark": "read_or_compute", **vars(options), **found}))


if __name__ == "__main__":
    main()
