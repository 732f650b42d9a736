"""Blocks that waiting requests will take over are evicted last: prompt tokens computed with and without that.

    python -m headstart_lab.eviction.queued_refs --chat conversation_trace.jsonl --agents agent_miniswe.jsonl

Recorded traffic at several loads, pool sizes, eviction and scheduling policies, in virtual time, and two made cases:
the best one for the mechanism and the worst one. Without: a scheduler whose pool ignores the references (in
virtual_serving.py). About five minutes on one core; no model, no idle machine. The last stdout line is JSON.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from headstart.measurement.machine import print_figures_with_machine
from headstart.measurement.progress_bar import QUIET, ProgressBar, progress_bar
from headstart.workload.jobs import Job
from headstart.workload.synthetic import random_tokens
from headstart.workload.traces import CHAIN_BLOCK, Trace, parse_trace
from headstart_lab.eviction.virtual_serving import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    Server,
    Session,
    Turn,
    distinct_blocks,
    longest_blocks,
    saved,
    serve,
    singles,
    spread,
)

POOLS = (0.02, 0.05, 0.1, 0.25, 0.5)  # of the distinct blocks
EVICTIONS = ("lru", "2q")
POLICIES = ("fcfs", "lpm")
LOADS = (1.0, 2.0, 0.0)  # tokens that arrive over tokens computed in that time without a cache; 0: all at once
RUNNING = (8, 32)  # sequences of agents that run at a time; 60 sessions are open
SLICES = 3  # of the chat trace, one after the other
SLICE_REQUESTS = 1200
CHAT_FACTOR = BLOCK_SIZE / CHAIN_BLOCK
AGENT_FACTOR = 1 / 8
AGENT_COPIES = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions and the pace at which they are served."""

    name: str
    load: str
    sessions: tuple[Session, ...]
    token_seconds: float
    max_seqs: int = 32


def chat(trace: Trace, requests: int) -> Iterator[list[Workload]]:
    """Yield per load the slices of a chat trace, lengths scaled until an id of the trace is one block."""
    slices: list[list[Job]] = []
    for number in range(SLICES):
        rows = trace.requests[number * len(trace.requests) // SLICES :][:requests]
        slices.append(replace(trace, requests=rows).to_jobs(VOCAB_SIZE, 0, factor=CHAT_FACTOR))
    for load in LOADS:
        found: list[Workload] = []
        for jobs in slices:
            start, tokens = jobs[0].at, sum(len(job.prompt) + job.output for job in jobs)
            moved = [replace(job, at=job.at - start if load else 0.0) for job in jobs]
            seconds = (load or 1.0) * (jobs[-1].at - start) / tokens
            found.append(Workload("chat", f"{load:g}" if load else "all at once", tuple(singles(moved)), seconds))
        yield found


def agents(trace: Trace, seeds: int) -> Iterator[list[Workload]]:
    """Yield, per number of running sequences, agents' sessions that start together, once per seed.

    Pauses between turns are the recorded ones; a token takes so long that requests wait most of the time.
    """
    for running in RUNNING:
        found: list[Workload] = []
        for seed in range(seeds):
            rng, sessions = Random(f"agents/{seed}"), list[Session]()
            for copy in range(AGENT_COPIES):
                jobs = trace.to_jobs(VOCAB_SIZE, f"{seed}/{copy}", factor=AGENT_FACTOR)
                sessions += agent_sessions(trace, jobs, rng, within=10.0)
            found.append(Workload("agents", f"{running} of 60 run", tuple(sessions), 1 / 500, running))
        yield found


def agent_sessions(
    trace: Trace, jobs: Sequence[Job], rng: Random, *, within: float, stretch: float = 1.0
) -> list[Session]:
    """Return the sessions of a trace with recorded pauses times `stretch`; each starts at random `within` seconds."""
    turns: dict[str, list[Turn]] = {}
    last: dict[str, float] = {}
    for request, job in zip(trace.requests, jobs, strict=True):
        name = request.session
        pause = (request.at - last[name]) * stretch if name in last else rng.uniform(0, within)
        turns.setdefault(name, []).append(Turn(pause, job))
        last[name] = request.at
    return [Session(tuple(found)) for found in turns.values()]


def best_case(seed: int) -> list[Session]:
    """Return cached prompts that come back behind a queue of one-off prompts which fill the pool twice."""
    rng = Random(f"best/{seed}")
    hot, scan = [_job(160, rng) for _ in range(8)], [_job(320, rng) for _ in range(16)]
    return [_alone(0.0, job) for job in hot] + [_alone(4_000.0, job) for job in (*scan, *hot)]


def worst_case(seed: int) -> list[Session]:
    """Return requests that wait with long hits behind others of higher priority, which lack space because of that.

    For the policy `priority`. Two clients of higher priority use eight prompts in turn and leave no gap.
    """
    rng = Random(f"worst/{seed}")
    low, hot = [_job(480, rng) for _ in range(4)], [_job(160, rng) for _ in range(8)]
    clients = [
        Session(tuple(Turn(0.0 if turn else 4_000.0, hot[(turn + shift) % 8]) for turn in range(64)))
        for shift in (0, 4)
    ]
    return [_alone(0.0, job, 9) for job in low] + clients + [_alone(4_000.0, job, 9) for job in low]


def _alone(at: float, job: Job, priority: int = 0) -> Session:
    return Session((Turn(at, job),), priority=priority)


def _job(tokens: int, rng: Random) -> Job:
    return Job(random_tokens(tokens, VOCAB_SIZE, rng), 1)


def made(name: str, build: Callable[[int], list[Session]], policy: str) -> list[dict[str, Any]]:
    """Return a row per eviction policy for a made case on a pool of 160 blocks, two sequences at a time."""
    rows: list[dict[str, Any]] = []
    for eviction in EVICTIONS:
        server = Server(num_blocks=160, eviction=eviction, policy=policy, max_seqs=2)
        workloads = [Workload(name, "made", tuple(build(seed)), 1.0) for seed in range(SLICES)]
        rows.append(row(workloads, [server] * SLICES))
    return rows


def row(workloads: Sequence[Workload], servers: Sequence[Server]) -> dict[str, Any]:
    """Serve each workload with and without the mechanism and return what it saves."""
    pairs = [
        (serve(replace(server, queued_refs=False), work.sessions), serve(server, work.sessions))
        for work, server in zip(workloads, servers, strict=True)
    ]
    first = workloads[0]
    return {
        "workload": first.name,
        "load": first.load,
        "eviction": servers[0].eviction,
        "policy": servers[0].policy,
        "pool_blocks": [server.num_blocks for server in servers],
        "waiting": round(median(without.waiting for without, _ in pairs)),
        "computed_without": [without.computed for without, _ in pairs],
        "computed_with": [with_it.computed for _, with_it in pairs],
        "ideal": [with_it.ideal for _, with_it in pairs],
        "hit_rate_without": spread([without.hit_rate for without, _ in pairs]),
        "hit_rate_with": spread([with_it.hit_rate for _, with_it in pairs]),
        "saved": spread([saved(*pair) for pair in pairs], 5),
    }


def measure(
    workloads: Sequence[list[Workload]], pools: Sequence[float], policies: Sequence[str], bar: ProgressBar = QUIET
) -> list[dict[str, Any]]:
    """Return a row per load, pool, eviction and scheduling policy; pools without space for a prompt are left out."""
    rows: list[dict[str, Any]] = []
    for group in workloads:
        bar.start_stage(f"{group[0].name}, load {group[0].load}", len(pools) * len(EVICTIONS) * len(policies))
        distinct = [distinct_blocks(work.sessions) for work in group]
        longest = max(longest_blocks(work.sessions) for work in group)
        for share, eviction, policy in product(pools, EVICTIONS, policies):
            bar.advance()
            if share * min(distinct) < longest:
                continue
            servers = [
                Server(
                    num_blocks=int(share * num),
                    eviction=eviction,
                    policy=policy,
                    token_seconds=work.token_seconds,
                    max_seqs=work.max_seqs,
                )
                for num, work in zip(distinct, group, strict=True)
            ]
            rows.append({"pool_share": share} | row(group, servers))
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distribution of the medians over the rows of one workload."""
    values = [found["saved"]["median"] for found in rows]
    return {
        "rows": len(rows),
        "saved": spread(values, 5),
        "rows_saving_over_0.5_percent": sum(value > 0.005 for value in values),
        "rows_losing_over_0.5_percent": sum(value < -0.005 for value in values),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--agents", type=Path, help="a trace of agents' texts with sessions")
    parser.add_argument("--requests", type=int, default=SLICE_REQUESTS, help="of each slice of the chat trace")
    parser.add_argument("--seeds", type=int, default=3, help="starts of the agents' sessions")
    parser.add_argument("--pools", type=float, nargs="+", default=POOLS, help="shares of the distinct blocks")
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=POLICIES)
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with progress_bar() as bar:
        if args.chat:
            slices = list(chat(parse_trace(args.chat.read_text().splitlines()), args.requests))
            found["chat"] = measure(slices, args.pools, args.policies, bar)
        if args.agents:
            mixes = list(agents(parse_trace(args.agents.read_text().splitlines()), args.seeds))
            found["agents"] = measure(mixes, args.pools, args.policies, bar)
        bar.start_stage("made cases")
        found["best case"] = made("best case", best_case, "fcfs") + made("best case", best_case, "lpm")
        found["worst case"] = made("worst case", worst_case, "priority")
    print_figures_with_machine(
        {
            "bench": "queued block references",
            "traces": [path.name for path in (args.chat, args.agents) if path],
            "slice_requests": args.requests,
            "summary": {name: summary(rows) for name, rows in found.items()},
            "rows": [one for rows in found.values() for one in rows],
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
