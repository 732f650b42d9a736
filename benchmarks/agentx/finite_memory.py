"""Recorded sessions of coding agents in a real engine: a pool of a share of the working set and a folder, or all of it.

    python benchmarks/agentx/finite_memory.py --sessions agentx/ --model m3 >finite_memory.json

As `headstart simulate --sessions-at-once 32 --skip-above 200000`, with all lengths divided: the engine is in this
process, a session's next request is added when the one before is answered (pauses are left out), and blocks
are counted first. `folder`: the small pool and a folder; `alone`: the small pool; `unlimited`: a pool that holds all.
Figures are the engine's own counters: *hits* are the share of prompt tokens that were not computed. The model's
context must hold the longest prompt. The last line of stdout is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agentx import blocks

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.engine.assembly import build_engine
from headstart.measurement.machine import describe_machine, describe_versions
from headstart.workload.jobs import Job, JobDependencies
from headstart.workload.recorded.trace_files import TraceOptions

BLOCK = 16
PARTS = ("folder", "unlimited", "alone")


def serve(engine: Engine, jobs: Sequence[Job]) -> float:
    """Run all jobs, each as soon as those before it in its session are answered; return the seconds."""
    began, waits, left = time.monotonic(), JobDependencies(jobs), len(jobs)
    due = [index for index, job in enumerate(jobs) if not job.after]
    while left:
        for index in due:
            sampling = SamplingParams(temperature=0.0, max_tokens=max(jobs[index].output, 1), ignore_eos=True)
            engine.add_request(Request(str(index), jobs[index].prompt, sampling))
        due = []
        for output in engine.step(time.monotonic()):
            if output.finish_reason is not None:
                left -= 1
                due += [index for _, index in waits.release_dependents(int(output.request_id), 0.0)]
                if left % 200 == 0:
                    print(left, round(time.monotonic() - began), file=sys.stderr)
    return time.monotonic() - began


def measure(options: argparse.Namespace, jobs: Sequence[Job], num_blocks: int, folder: str | None) -> dict[str, object]:
    engine = build_engine(
        EngineOptions(
            model=options.model,
            threads=options.threads,
            num_gpu_blocks_override=num_blocks,
            kv_store=folder,
            max_num_seqs=options.at_once,
            enable_prefix_caching=True,
        )
    )[0]
    try:
        seconds, stats = serve(engine, jobs), engine.stats()
    finally:
        engine.close()
    counters = stats.counters
    assert counters.prompt_tokens == sum(len(job.prompt) for job in jobs)
    found: dict[str, object] = {"num_blocks": num_blocks, "seconds": round(seconds, 1)}
    found |= {"hits": counters.cached_tokens / counters.prompt_tokens}
    found |= {"redundancy": counters.prompt_computed_tokens / counters.ideal_tokens, "counters": asdict(counters)}
    if stats.store is not None:
        found |= {"store": asdict(stats.store)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, required=True, help="recorded sessions")
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--divisor", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=32, help="sessions")
    parser.add_argument("--skip-above", type=int, default=200_000, help="tokens, before the division")
    parser.add_argument("--share", type=float, default=0.05, help="of the distinct blocks, in the small pool")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the memory that is tried")
    options = parser.parse_args()
    trace = TraceOptions(divisor=options.divisor, skip_above=options.skip_above, sessions_at_once=options.at_once)
    read = trace.read(options.sessions)
    jobs = read.to_jobs(500, 1, factor=1.0, speed=1.0)
    ids: dict[tuple[int, bytes], int] = {}
    distinct = len({block for job in jobs for block in blocks(job.prompt, BLOCK, ids)})
    longest = max(len(job.prompt) + job.output for job in jobs)
    print(len(jobs), "requests,", distinct, "blocks, longest", longest, file=sys.stderr)
    document: dict[str, object] = {"benchmark": "finite_memory", **vars(options), "sessions": None}
    document |= {"model": Path(options.model).name, "requests": len(jobs), "distinct_blocks": distinct}
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="headstart-agentx-") as folder:
        small = int(options.share * distinct)
        for name, size, store in (
            ("folder", small, f"{folder}/kv"),
            ("unlimited", 2 * distinct, None),
            ("alone", small, None),
        ):
            if name in options.parts:
                found[name] = measure(options, jobs, size, store)
                print(name, found[name], file=sys.stderr)
    document |= found
    print(json.dumps(document | {"machine": describe_machine(), "versions": describe_versions()}))


if __name__ == "__main__":
    main()
