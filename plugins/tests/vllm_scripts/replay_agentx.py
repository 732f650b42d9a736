"""Recorded agents' sessions through vLLM's scheduler, without a model: replay_agentx.py FOLDER [--sessions 16] ...

FOLDER has AgentX sessions (*.json.gz). Lengths are divided by 32: each id of 64 tokens becomes two. A step lasts 12 ms
and 0.38 ms for each of its tokens, in virtual time; a request follows the answer it needs after the recorded pause, at
most 10 s. The last line is JSON: prompt tokens computed with vLLM's scheduler and with the plug-in's.
"""

import argparse
import gzip
import heapq
import json
import logging
from pathlib import Path
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


def read(folder: Path, num_sessions: int, num_requests: int) -> list[TracedRequest]:
    """Return the first requests of each of the first sessions."""
    reader = SessionReader()
    for path in sorted(folder.glob("*.json.gz"))[:num_sessions]:
        session = json.loads(gzip.decompress(path.read_bytes()))
        reader.add({**session, "requests": session["requests"][:num_requests]})
    return [request for request in reader.trace().requests if len(request.hash_ids) * 2 <= MAX_PROMPT]


def prompt_of(request: TracedRequest) -> list[int]:
    return [token for name in request.hash_ids for token in (name % 29_989 + 1, name // 29_989 + 1)]


def replay(
    cls: type[VllmScheduler], options: dict[str, object] | None, requests: list[TracedRequest], pool: int
) -> int:
    """Return the prompt tokens computed in a pool of so many tokens."""
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
    while ready or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, ready[0][0])
        while ready and ready[0][0] <= now:
            request = heapq.heappop(ready)[2]
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
            if each.finish_reason is None:
                continue
            for follower in followers.get(int(each.request_id), ()):
                missing[follower.number] -= 1
                if not missing[follower.number]:
                    at = now + min(follower.pause, MAX_PAUSE)
                    heapq.heappush(ready, (at, follower.number, follower))
    return computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--requests", type=int, default=40, help="of each session")
    parser.add_argument("--pool", type=int, default=31_250, help="tokens")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    requests = read(args.folder, args.sessions, args.requests)
    prompts = [prompt_of(request) for request in requests]
    report: dict[str, Any] = {"requests": len(prompts), "prompt_tokens": sum(map(len, prompts)), "pool": args.pool}
    report["ideal"] = ideal(prompts)
    for name, (cls, options) in FORMS.items():
        report[name] = replay(cls, options, requests, args.pool)
        print(name, report[name], flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
