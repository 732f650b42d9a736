"""Recorded agents' sessions through vLLM's scheduler, without a model: replay_agentx.py FOLDER [--seeds 5] ...

FOLDER has AgentX sessions (*.json.gz). Lengths are divided by 32: each id of 64 tokens becomes two. A step lasts 12 ms
and 0.38 ms for each of its tokens, in virtual time; a request follows the answer it needs after the recorded pause, at
most 10 s. A seed draws the sessions, their begins (exponential gaps), and a factor of 0.5 to 1.5 for each pause. The
last line is JSON: prompt tokens computed and TTFT in virtual seconds, with vLLM's scheduler and with the plug-in's.
"""

import argparse
import gzip
import heapq
import json
import logging
import statistics
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from steps import BLOCK, ideal, make_request, make_scheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import ModelRunnerOutput

from headstart.workload.recorded.agent_sessions import SessionReader
from headstart.workload.traces import TracedRequest
from headstart_plugins.vllm import Scheduler

DIVISOR, MAX_PROMPT, MAX_PAUSE = 32, 7_900, 10.0
STEP_SECONDS, TOKEN_SECONDS = 0.012, 0.00038
FORMS: dict[str, tuple[type[VllmScheduler], dict[str, object] | None]] = {
    "vllm": (VllmScheduler, None),
    "promised": (Scheduler, {}),
    "promised, lpm_k 8": (Scheduler, {"lpm_k": 8}),
}


def read(folder: Path, num_sessions: int, num_requests: int, gap: float, seed: int) -> list[TracedRequest]:
    """Return the first requests of each of the drawn sessions; `gap`: mean seconds between two begins."""
    reader, rng = SessionReader(), Random(seed)
    for path in rng.sample(sorted(folder.glob("*.json.gz")), num_sessions):
        session = json.loads(gzip.decompress(path.read_bytes()))
        reader.add_session({**session, "requests": session["requests"][:num_requests]})
    requests = [request for request in reader.trace().requests if len(request.hash_ids) * 2 <= MAX_PROMPT]
    roots = sorted({request.root_session for request in requests})
    begins, now = {}, 0.0
    for root in rng.sample(roots, len(roots)):
        begins[root] = now
        now += rng.expovariate(1 / gap)
    firsts = {root: min(r.at for r in of) for root, of in groupby(sorted(requests, key=_root), key=_root)}
    return [
        replace(
            request,
            at=request.at - firsts[request.root_session] + begins[request.root_session],
            pause=min(request.pause, MAX_PAUSE) * rng.uniform(0.5, 1.5),
        )
        for request in requests
    ]


def _root(request: TracedRequest) -> str:
    return request.root_session


def prompt_of(request: TracedRequest) -> list[int]:
    return [token for name in request.hash_ids for token in (name % 29_989 + 1, name // 29_989 + 1)]


def replay(
    cls: type[VllmScheduler], options: dict[str, object] | None, requests: list[TracedRequest], pool: int
) -> dict[str, float]:
    """Return the prompt tokens computed in a pool of so many tokens, and mean and p99 of TTFT."""
    scheduler = make_scheduler(cls, options=options, num_blocks=pool // BLOCK + 1, cap=256, budget=2_048, max_seqs=64)
    known = {request.number for request in requests}
    missing = {request.number: len([name for name in request.after if name in known]) for request in requests}
    followers: dict[int, list[TracedRequest]] = {}
    for request in requests:
        for name in request.after:
            followers.setdefault(name, []).append(request)
    ready = [(request.at, request.number, request) for request in requests if not missing[request.number]]
    heapq.heapify(ready)
    now, computed = 0.0, 0
    sent: dict[str, float] = {}  # requests without a token, and since when
    ttfts: list[float] = []
    while ready or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, ready[0][0])
        while ready and ready[0][0] <= now:
            at, _, request = heapq.heappop(ready)
            sent[str(request.number)] = at
            output = max(1, request.output // DIVISOR)
            scheduler.add_request(make_request(str(request.number), prompt_of(request), max_tokens=output))
        plan = scheduler.schedule()
        rows: list[list[int]] = []
        for name, num in plan.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            end = request.num_computed_tokens
            computed += max(0, min(end, request.num_prompt_tokens) - (end - num))
            rows.append([end % 997] if end >= request.num_tokens else [])
        now += STEP_SECONDS + TOKEN_SECONDS * plan.total_num_scheduled_tokens
        names = list(plan.num_scheduled_tokens)
        results = scheduler.update_from_output(
            plan, ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, rows)
        )
        for each in (each for of_client in results.values() for each in of_client.outputs):
            if each.new_token_ids and each.request_id in sent:
                ttfts.append(now - sent.pop(each.request_id))
            if each.finish_reason is None:
                continue
            for follower in followers.get(int(each.request_id), ()):
                missing[follower.number] -= 1
                if not missing[follower.number]:
                    at = now + follower.pause
                    heapq.heappush(ready, (at, follower.number, follower))
    ttfts.sort()
    p99 = ttfts[int(0.99 * (len(ttfts) - 1))]
    return {"computed": computed, "ttft_mean": round(statistics.mean(ttfts), 4), "ttft_p99": round(p99, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--requests", type=int, default=30, help="of each session")
    parser.add_argument("--gap", type=float, default=1.0, help="mean seconds between the begins of two sessions")
    parser.add_argument("--pool", type=int, default=31_250, help="tokens")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        requests = read(args.folder, args.sessions, args.requests, args.gap, seed)
        prompts = [prompt_of(request) for request in requests]
        row: dict[str, Any] = {"seed": seed, "requests": len(prompts), "prompt_tokens": sum(map(len, prompts))}
        row["ideal"] = ideal(prompts)
        for name, (cls, options) in FORMS.items():
            row[name] = replay(cls, options, requests, args.pool)
        rows.append(row)
        print(row, flush=True)
    settings = {name: getattr(args, name) for name in ("sessions", "requests", "gap", "pool")}
    print(json.dumps({"bench": "agentx in vLLM's scheduler", **settings, "rows": rows}))


if __name__ == "__main__":
    main()
