"""Traffic split in two for the choice of an eviction policy: chosen on one half, published on the other.

    python -m headstart_lab.eviction.halves --traces FOLDER --half held

Every policy replays the prompts of one half on the engine's own BlockPool, one request at a time, in pools of 2, 5 and
10 % of the distinct blocks; figures are prompt tokens computed over those of Belady's policy. No model and no clock.
The last stdout line is JSON.

Conversations and one-off prompts are split by time, agents' sessions by turns (every second one), made traffic by seed.
Paths are chains of block ids, as in workload/block_paths.py. Files of traces are looked for in one folder.
"""

import argparse
import json
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.measurement.machine import print_figures_with_machine
from headstart.workload.block_paths import TEXT_BLOCK, BlockPaths, overlap_sessions, trace_block_paths
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.traces import Trace, TracedRequest
from headstart_lab.cache.eviction_replay import measure

POOLS = (2.0, 5.0, 10.0)  # per cent of the distinct blocks
CHOSEN, HELD = 0, 1
COPIES = 2  # of each agent's session, so that half of them are enough to overlap
COARSER = 8  # recorded blocks of 64 tokens in a block of AgentX here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the files")
    parser.add_argument("--half", choices=("chosen", "held"), default="held")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, prompts in traffic(args.traces, HELD if args.half == "held" else CHOSEN).items():
        for share in POOLS:
            found = measure(prompts, max(int(share / 100 * prompts.num_distinct), 1))
            rows.append({"traffic": name, "requests": len(prompts.paths), "pool_percent": share, **found})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    over = {policy: [row["over_bound"][policy] for row in rows] for policy in EVICTION_POLICIES}
    summary = {
        policy: {
            "mean_over_bound": round(mean(values), 4),
            "ratio_vs_2q": round(mean(values) / mean(over["2q"]) - 1, 4),
            "excess_vs_2q": round((mean(values) - 1) / (mean(over["2q"]) - 1) - 1, 4),
            "worst_row_vs_2q": round(max(a / b for a, b in zip(values, over["2q"], strict=True)) - 1, 4),
            "rows_better": sum(a < b for a, b in zip(values, over["2q"], strict=True)),
            "rows_worse": sum(a > b for a, b in zip(values, over["2q"], strict=True)),
        }
        for policy, values in over.items()
    }
    print_figures_with_machine({"bench": "eviction halves", "half": args.half, "rows": rows, "policies": summary})
    return 0


def traffic(folder: Path, half: int) -> dict[str, BlockPaths]:
    """Return the prompts of one half, by name of the traffic."""
    chats = read_trace_path(folder / "mooncake_conversation_trace.jsonl")
    found = {"conversation": trace_block_paths(_by_time(chats, half))}
    one_off = [read_trace_path(folder / f"azure_llm_2023_{name}.csv") for name in ("conv", "code")]
    found["conversation and one-off"] = _with_one_offs(_by_time(chats, half), [_by_time(one, half) for one in one_off])
    sessions = _coarser(read_trace_path(folder / "agentx"))
    for at_once in (8, 32):
        found[f"AgentX, {at_once} overlap"] = _sessions(sessions, half, at_once)
    for name in ("miniswe", "taubench"):
        trace = _with_block_ids(read_trace_path(folder / f"agent_{name}.jsonl"))
        found[f"{name}, 8 overlap"] = _sessions(trace, half, 8)
    found["documents and best-of"] = documents_and_best_of(half)
    return found


def documents_and_best_of(seed: int, *, requests: int = 6_000) -> BlockPaths:
    """Return made traffic: questions to documents of Zipf's popularity, and prompts sent 8 times in a short while."""
    rng = Random(f"documents/{seed}")
    weights = [1 / (rank + 1) for rank in range(400)]
    lengths = [rng.randint(8, 48) for _ in weights]
    ids = {(number, depth): 0 for number, length in enumerate(lengths) for depth in range(length)}
    ids = {key: index for index, key in enumerate(ids)}
    documents = [[ids[number, depth] for depth in range(length)] for number, length in enumerate(lengths)]
    fresh = len(ids)
    due: list[tuple[float, list[int]]] = []
    for index in range(requests):
        path = rng.choices(documents, weights)[0] if rng.random() < 0.6 else []
        num_own = rng.randint(1, 3) if path else rng.randint(4, 24)
        own = list(range(fresh, fresh + num_own))
        fresh += num_own
        due += [(index + (rng.expovariate(1 / 20) if copy else 0.0), [*path, *own]) for copy in range(1 if path else 8)]
    due.sort(key=lambda one: one[0])
    paths = [path for _, path in due]
    return BlockPaths(16, paths, [16 * len(path) + 8 for path in paths])


def _by_time(trace: Trace, half: int) -> Trace:
    middle = bisect_left([one.at for one in trace.requests], trace.requests[-1].at / 2)
    return replace(trace, requests=trace.requests[middle:] if half == HELD else trace.requests[:middle])


def _with_one_offs(chats: Trace, others: Sequence[Trace]) -> BlockPaths:
    """Return chats with one-off prompts between them, of four times the recorded lengths: a scan."""
    size, fresh = chats.block_size, 1 + max(block for one in chats.requests for block in one.hash_ids)
    start = chats.requests[0].at
    rows = [(one.at - start, one.length, one.hash_ids[: one.length // size]) for one in chats.requests]
    for other in others:
        for one in other.requests:
            length = 4 * one.length
            rows.append((one.at - other.requests[0].at, length, range(fresh, fresh + length // size)))
            fresh += length // size
    rows.sort(key=lambda row: row[0])
    return BlockPaths(size, [list(row[2]) for row in rows], [row[1] for row in rows])


def _coarser(trace: Trace) -> Trace:
    rows = [
        replace(one, hash_ids=one.hash_ids[COARSER - 1 : one.length // trace.block_size : COARSER])
        for one in trace.requests
    ]
    return replace(trace, requests=tuple(rows), block_size=trace.block_size * COARSER)


def _with_block_ids(trace: Trace) -> Trace:
    """Return texts as ids of blocks of 16 tokens."""
    paths = trace_block_paths(trace).paths
    rows = [replace(one, hash_ids=tuple(path), text="") for one, path in zip(trace.requests, paths, strict=True)]
    return replace(trace, requests=tuple(rows), block_size=TEXT_BLOCK)


def _sessions(trace: Trace, half: int, at_once: int, seed: int = 0) -> BlockPaths:
    """Return every second session, each COPIES times in an order by seed, `at_once` of them at a time.

    Blocks of one session are different in each copy; those of several sessions, as system prompts, are the same.
    """
    by_name: dict[str, list[TracedRequest]] = {}
    for one in trace.requests:
        by_name.setdefault(one.root_session, []).append(one)
    uses = Counter(block for rows in by_name.values() for block in {block for one in rows for block in one.hash_ids})
    names = sorted(by_name)[half::2]
    rounds = [(name, copy) for copy in range(COPIES) for name in Random(f"{seed}/{copy}").sample(names, len(names))]
    found: list[TracedRequest] = []
    for place, (name, copy) in enumerate(rounds):
        for one in by_name[name]:
            ids = tuple(block * COPIES + (copy if uses[block] == 1 else 0) for block in one.hash_ids)
            found.append(
                replace(
                    one,
                    at=1e-6 * place + one.at - by_name[name][0].at,
                    hash_ids=ids,
                    number=one.number * COPIES + copy,
                    after=tuple(before * COPIES + copy for before in one.after),
                    session=f"{one.session}#{copy}",
                    parent=f"{one.parent}#{copy}" if one.parent else "",
                )
            )
    order = {f"{name}#{copy}": place for place, (name, copy) in enumerate(rounds)}
    found.sort(key=lambda one: (order[one.root_session], one.at))
    mixed = overlap_sessions(replace(trace, requests=tuple(found)), at_once)
    rows = [one for one in mixed.requests if one.hash_ids]
    return BlockPaths(mixed.block_size, [list(one.hash_ids) for one in rows], [one.length for one in rows])


if __name__ == "__main__":
    sys.exit(main())
