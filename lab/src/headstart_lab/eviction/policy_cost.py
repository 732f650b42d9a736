"""CPU time of the eviction policies per block, measured in turns on one trace.

    python -m headstart_lab.eviction.policy_cost --trace conversation_trace.jsonl --pool 5 --rounds 7

Each round replays the trace once with every policy, in alternating order; figures are CPU time of this thread, so other
load on the machine disturbs them little. The last stdout line is JSON.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.measurement.machine import print_figures_with_machine
from headstart.workload.block_paths import trace_block_paths
from headstart.workload.traces import parse_trace
from headstart_lab.cache.eviction_replay import replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--pool", type=float, default=5.0, help="per cent of the distinct blocks")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with args.trace.open() as lines:
        prompts = trace_block_paths(parse_trace(lines))
    num_blocks = int(args.pool / 100 * prompts.num_distinct)
    total = sum(map(len, prompts.paths))
    micros: dict[str, list[float]] = {policy: [] for policy in EVICTION_POLICIES}
    published: dict[str, int] = {}
    for number in range(args.rounds):
        for policy in list(EVICTION_POLICIES)[:: -1 if number % 2 else 1]:
            began = time.thread_time()
            hits = sum(replay(prompts, policy, num_blocks))
            micros[policy].append(1e6 * (time.thread_time() - began) / total)
            published[policy] = total - hits
        print({policy: round(values[-1], 2) for policy, values in micros.items()}, file=sys.stderr)
    print_figures_with_machine(
        {
            "bench": "eviction policy cost",
            "trace": args.trace.name,
            "pool_blocks": num_blocks,
            "rounds": args.rounds,
            "blocks": total,
            "published_blocks": published,
            "cpu_us_per_block": {policy: round(median(values), 3) for policy, values in micros.items()},
            "cpu_us_per_block_range": {
                policy: [round(min(values), 3), round(max(values), 3)] for policy, values in micros.items()
            },
            "over_2q": {
                policy: round(median(a / b for a, b in zip(values, micros["2q"], strict=True)), 3)
                for policy, values in micros.items()
            },
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
