"""The same requests of coding agents to running servers with a pool that is too small, each served to its end.

    PYTHONPATH=src python benchmarks/agentx/small_pool.py --sessions FOLDER --model FOLDER \
        --server headstart=http://127.0.0.1:8321:16 --server vllm=http://127.0.0.1:8322:32 --pool 3936 >small_pool.json

Sessions, and what is cut of them, as in `agentx.py`; the requests are sent by our own client instead of AIPerf, which
stops after a time: a session's next request comes after the answer to the one before and its pause (at most
MAX_PAUSE seconds after the division), `--concurrency` sessions at a time, and the next session when one has ended.
Prompts are random tokens by the recorded ids, the same for all servers; answers have the recorded lengths.

*Possible*: blocks that an infinite pool finds. *Belady*: blocks that the best eviction finds in a pool of this size,
one request after the other; once in the order in which the requests were sent, and once in that of their first tokens.
Servers need /reset_prefix_cache. `--dry` prints the sizes only. The last line of stdout is one JSON document.
"""

import argparse
import json
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, median

from agentx import Json, blocks, prepare, reset

from headstart.bench.endpoint_runner import EndpointRunner
from headstart.bench.streamed_request import EndpointTarget
from headstart.measurement.machine import describe_machine, describe_versions
from headstart.workload.belady import belady_hit_blocks_per_request, infinite_cache_hits
from headstart.workload.jobs import Job
from headstart.workload.recorded.trace_files import TraceOptions
from headstart.workload.request_record import RequestRecord

MAX_PAUSE = 10.0  # seconds after the division
TIMEOUT = 900.0  # seconds of one request


def make_jobs(args: argparse.Namespace, folder: Path, seed: int) -> list[Job]:
    """Return the requests of the sessions in a folder, whose lengths and times are divided already."""
    trace = TraceOptions(sessions_at_once=args.concurrency).read(folder)
    jobs = trace.to_jobs(args.vocab_size, seed, factor=1.0, speed=1.0)
    return [replace(job, pause=min(job.pause, MAX_PAUSE)) for job in jobs]


def paths_of(prompts: Sequence["array[int]"], size: int) -> list[list[int]]:
    ids: dict[tuple[int, bytes], int] = {}
    return [blocks(prompt, size, ids) for prompt in prompts]


def summary(jobs: Sequence[Job], records: Sequence[RequestRecord], size: int, pool: int) -> Json:
    """Return the figures of one run; tokens found are what the server reports."""
    good = [record for record in records if record.ok]
    order = sorted(range(len(jobs)), key=lambda index: records[index].arrival)
    sent = [jobs[index].prompt for index in order]
    served = [jobs[index].prompt for index in sorted(order, key=lambda index: records[index].first_token or 1e9)]
    paths, in_turn = paths_of(sent, size), paths_of(served, size)
    cached, tokens = sum(record.cached_tokens for record in good), sum(map(len, sent))
    found: Json = {"possible": size * sum(infinite_cache_hits(paths))}
    found |= {"belady_as_sent": size * sum(belady_hit_blocks_per_request(paths, pool // size))}
    found |= {"belady_as_served": size * sum(belady_hit_blocks_per_request(in_turn, pool // size))}
    ttft = sorted(record.ttft for record in good if record.ttft is not None)
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": [record.error for record in records if record.error][:2],
        "prompt_tokens": tokens,
        "distinct_tokens": size * len({block for path in paths for block in path}),
        "output_tokens": sum(record.output_tokens for record in good),
        "cached_tokens": cached,
        **found,
        **{f"cached_of_{name}": round(cached / value, 4) for name, value in found.items()},
        "ttft_p50": round(median(ttft), 4),
        "ttft_p90": round(ttft[len(ttft) * 9 // 10], 4),
        "ttft_mean": round(fmean(ttft), 4),
        "e2e_mean": round(fmean(record.e2e for record in good if record.e2e is not None), 4),
        "seconds": round(max(record.finish or 0.0 for record in records), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, required=True, help="recorded sessions")
    parser.add_argument("--name", default="model", help="served name of the model")
    parser.add_argument("--server", action="append", default=[], help="NAME=http://HOST:PORT:BLOCK_SIZE")
    parser.add_argument("--divisor", type=int, default=32)
    parser.add_argument("--num-sessions", type=int, default=24)
    parser.add_argument("--requests", type=int, default=8, help="first ones of each session")
    parser.add_argument("--context", type=int, default=2_500, help="tokens of prompt and answer")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions at a time")
    parser.add_argument("--pool", type=int, default=3_936, help="tokens of the servers' pools")
    parser.add_argument("--vocab-size", type=int, default=30_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    runs: list[Json] = []
    with tempfile.TemporaryDirectory() as scratch:
        cut = prepare(args, Path(scratch))
        for seed in args.seeds:
            jobs = make_jobs(args, Path(scratch), seed)
            prompts = [job.prompt for job in jobs]
            distinct = {size: len(set().union(*paths_of(prompts, size))) * size for size in (16, 32)}
            sizes = {"requests": len(jobs), "prompt_tokens": sum(map(len, prompts)), "distinct": distinct}
            print(json.dumps(cut | sizes | {"longest": max(map(len, prompts))}), file=sys.stderr, flush=True)
            for name, _, rest in () if args.dry else (server.partition("=") for server in args.server):
                url, _, size = rest.rpartition(":")
                target = EndpointTarget(url, args.name, timeout=TIMEOUT)
                runner = EndpointRunner.connect(target, args.vocab_size, Random(seed))
                reset(url)
                trial = runner.run(jobs)
                runner.close()
                runs.append({"server": name, "seed": seed, **summary(jobs, trial.records, int(size), args.pool)})
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    settings = {key: value for key, value in vars(args).items() if isinstance(value, int)}
    machine = {"machine": describe_machine(), **describe_versions()}
    print(json.dumps({"settings": settings, "cut": cut, "runs": runs, **machine}))


if __name__ == "__main__":
    main()
