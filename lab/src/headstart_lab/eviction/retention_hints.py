"""Retention hints: prompt tokens computed with and without `cache_ttl` and `prompt_cache_retention`.

    python -m headstart_lab.eviction.retention_hints --agents agent_miniswe.jsonl --one-off azure_llm_2023_conv.csv \\
        --chat conversation_trace.jsonl

Agents' sessions return after a pause, beside one-off prompts or beside a chat service; hints are sent by no client, by
the agents, by all, or by the wrong clients. Then a chat service alone, all of whose requests send the same hint.
Virtual time: about five minutes on one core; no model, no idle machine. The last stdout line is JSON.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from headstart.core.request import DEFAULT_RETENTION, RetentionHint
from headstart.measurement.machine import print_figures_with_machine
from headstart.measurement.progress_bar import QUIET, ProgressBar, progress_bar
from headstart.openai.cache_params import KEYED_PRIORITY, MAX_TTL, TIMED_PRIORITY
from headstart.workload.jobs import Job
from headstart.workload.traces import CHAIN_BLOCK, Trace, parse_trace
from headstart_lab.eviction.queued_refs import agent_sessions
from headstart_lab.eviction.virtual_serving import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    Counts,
    Server,
    Session,
    distinct_blocks,
    saved,
    serve,
    singles,
    spread,
)

EVICTIONS = ("lru", "2q")
SEEDS = 3
TTL = RetentionHint(TIMED_PRIORITY, 300.0)  # "cache_ttl": 300
SHORT = RetentionHint(TIMED_PRIORITY, 10.0)  # over before the block is evicted, on larger pools
DAY = RetentionHint(KEYED_PRIORITY, float(MAX_TTL))  # "prompt_cache_retention": "24h"
HINTS: dict[str, tuple[RetentionHint, RetentionHint]] = {  # of the agents, of the others
    "none": (DEFAULT_RETENTION, DEFAULT_RETENTION),
    "agents send cache_ttl 300": (TTL, DEFAULT_RETENTION),
    "all send cache_ttl 300": (TTL, TTL),
    "all send cache_ttl 10": (SHORT, SHORT),
    "all send prompt_cache_retention 24h": (DAY, DAY),
    "only others send cache_ttl 300": (DEFAULT_RETENTION, TTL),
}
ALIKE = ("none", "all send cache_ttl 300", "all send cache_ttl 10", "all send prompt_cache_retention 24h")
MIXED = ("none", "agents send cache_ttl 300", "all send cache_ttl 300", "only others send cache_ttl 300")
FACTOR = BLOCK_SIZE / 256  # of lengths: a block stands for 256 tokens
STRETCHES = (10, 30)  # times the recorded pauses between the turns of agents, whose median is 1.0 s
POOLS = (512, 1024)  # blocks, for agents beside other traffic
SECONDS = 600.0  # of the other traffic
LOAD = 0.5  # tokens that arrive over tokens computed in that time without a cache
STEP_TOKENS = 64  # the fixed time of a step, in the time of a token
CHAT_POOLS = (0.05, 0.1, 0.25)  # of the distinct blocks, for the chat service alone
CHAT_REQUESTS = 1200  # of each slice


def with_hints(sessions: Sequence[Session], retention: RetentionHint) -> list[Session]:
    """Return the sessions with another hint."""
    return [replace(session, retention=retention) for session in sessions]


def arrivals(trace: Trace, start: float, seconds: float, factor: float, seed: int) -> list[Job]:
    """Return the jobs of a part of a trace; arrival times count from its start."""
    rows = tuple(replace(r, at=r.at - start) for r in trace.requests if start <= r.at < start + seconds)
    return replace(trace, requests=rows).to_jobs(VOCAB_SIZE, seed, factor=factor)


def measure(agents: Trace, others: Trace, name: str, bar: ProgressBar = QUIET) -> list[dict[str, Any]]:
    """Return a row per stretch, pool and eviction policy: agents beside other traffic, with each kind of hints."""
    rows: list[dict[str, Any]] = []
    factor = BLOCK_SIZE / CHAIN_BLOCK if others.kind == "mooncake" else FACTOR
    for stretch in STRETCHES:
        bar.start_stage(f"agents beside {name}, pauses times {stretch}", len(POOLS) * len(EVICTIONS) * SEEDS)
        mixes: list[tuple[list[Session], list[Session]]] = []
        for seed in range(SEEDS):
            mine = agents.to_jobs(VOCAB_SIZE, f"agents/{seed}", factor=factor)
            rng = Random(f"hints/{seed}")
            first = agent_sessions(agents, mine, rng, within=SECONDS / 2, stretch=stretch)
            mixes.append((first, singles(arrivals(others, seed * SECONDS, SECONDS, factor, seed))))
        for num_blocks, eviction in product(POOLS, EVICTIONS):
            runs: dict[str, list[Counts]] = {kind: [] for kind in MIXED}
            for mine, theirs in mixes:
                server = _server(num_blocks, eviction, [*mine, *theirs], SECONDS)
                for kind in MIXED:
                    first, second = HINTS[kind]
                    runs[kind].append(serve(server, [*with_hints(mine, first), *with_hints(theirs, second)]))
                bar.advance()
            rows.append({"workload": f"agents beside {name}", "stretch": stretch} | _row(server, runs))
    return rows


def measure_alike(trace: Trace, bar: ProgressBar = QUIET) -> list[dict[str, Any]]:
    """Return a row per pool and eviction policy: a chat service whose requests all send the same hint."""
    rows: list[dict[str, Any]] = []
    slices: list[list[Session]] = []
    for number in range(SEEDS):
        part = trace.requests[number * len(trace.requests) // SEEDS :][:CHAT_REQUESTS]
        seconds = part[-1].at - part[0].at
        slices.append(singles(arrivals(trace, part[0].at, seconds, BLOCK_SIZE / CHAIN_BLOCK, number)))
    bar.start_stage("chat, all send the same hint", len(CHAT_POOLS) * len(EVICTIONS))
    for share, eviction in product(CHAT_POOLS, EVICTIONS):
        runs: dict[str, list[Counts]] = {kind: [] for kind in ALIKE}
        for sessions in slices:
            seconds = sessions[-1].turns[0].pause
            server = _server(int(share * distinct_blocks(sessions)), eviction, sessions, seconds)
            for kind in ALIKE:
                runs[kind].append(serve(server, with_hints(sessions, HINTS[kind][1])))
        bar.advance()
        rows.append({"workload": "chat", "pool_share": share} | _row(server, runs))
    return rows


def _server(num_blocks: int, eviction: str, sessions: Sequence[Session], seconds: float) -> Server:
    tokens = sum(len(turn.job.prompt) + turn.job.output for session in sessions for turn in session.turns)
    return Server(
        num_blocks=num_blocks, eviction=eviction, token_seconds=LOAD * seconds / tokens, step_tokens=STEP_TOKENS
    )


def _row(server: Server, runs: Mapping[str, Sequence[Counts]]) -> dict[str, Any]:
    none = runs["none"]
    return {
        "eviction": server.eviction,
        "pool_blocks": server.num_blocks,
        "ideal": [counts.ideal for counts in none],
        "computed": {kind: [counts.computed for counts in found] for kind, found in runs.items()},
        "hit_rate": {kind: spread([counts.hit_rate for counts in found]) for kind, found in runs.items()},
        "saved": {
            kind: spread([saved(*pair) for pair in zip(none, found, strict=True)])
            for kind, found in runs.items()
            if kind != "none"
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=Path, help="a trace of agents' texts with sessions")
    parser.add_argument("--one-off", type=Path, help="a trace of lengths: prompts that share nothing")
    parser.add_argument("--chat", type=Path, help="a trace in Mooncake's format")
    args = parser.parse_args()
    traces = {
        name: parse_trace(path.read_text().splitlines())
        for name, path in (("agents", args.agents), ("one-off", args.one_off), ("chat", args.chat))
        if path
    }
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        for name in ("one-off", "chat"):
            if "agents" in traces and name in traces:
                rows += measure(traces["agents"], traces[name], name, bar)
        if "chat" in traces:
            rows += measure_alike(traces["chat"], bar)
    print_figures_with_machine(
        {
            "bench": "retention hints",
            "traces": [path.name for path in (args.agents, args.one_off, args.chat) if path],
            "ttl": TTL._asdict(),
            "24h": DAY._asdict(),
            "rows": rows,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
