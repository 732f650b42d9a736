"""Hit rates of eviction policies over recorded traffic, 2q with other shares of the pool protected among them.

    python -m headstart_lab.eviction.replay --trace conversation_trace.jsonl
    python -m headstart_lab.eviction.replay --trace agent_miniswe.jsonl --concurrency 1

The replay is that of `headstart bench lab eviction`, which reports redundancy and the bound: no model and no clock. The
last stdout line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.core.cache.eviction import PROTECTED_SHARE, EvictionOrder, TwoQueueOrder
from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.measurement.machine import print_figures_with_machine
from headstart.workload.block_paths import trace_block_paths
from headstart.workload.traces import parse_trace
from headstart_lab.cache.eviction_replay import replay

POOLS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # of the distinct blocks of the trace
SHARES = (0.3, 0.8)  # other shares of the pool that 2q might protect


def two_queue(share: float) -> Callable[[bytearray, int], EvictionOrder]:
    """Return 2q with another share of the pool protected."""
    return lambda marks, _: TwoQueueOrder(marks, int(share * (len(marks) - 1)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=16, help="requests that hold their blocks at a time")
    args = parser.parse_args()
    with args.trace.open(encoding="utf-8") as lines:
        prompts = trace_block_paths(parse_trace(lines))
    distinct = prompts.num_distinct
    total = sum(map(len, prompts.paths))
    longest = max(map(len, prompts.paths))
    EVICTION_POLICIES.update({f"2q protecting {share}": two_queue(share) for share in SHARES})
    rows: list[dict[str, Any]] = []
    for share in POOLS:
        num_blocks = int(share * distinct)
        if num_blocks < longest:
            continue
        rates = {
            policy: round(sum(replay(prompts, policy, num_blocks, args.concurrency)) / total, 4)
            for policy in EVICTION_POLICIES
        }
        rows.append({"pool_blocks": num_blocks, "pool_share": share, **rates})
        print(json.dumps(rows[-1]), file=sys.stderr)
    print_figures_with_machine(
        {
            "bench": "eviction replay",
            "trace": args.trace.name,
            "requests": len(prompts.paths),
            "blocks": total,
            "distinct_blocks": distinct,
            "longest_prompt_blocks": longest,
            "ideal_hit_rate": round(1 - distinct / total, 4),
            "concurrency": args.concurrency,
            "protected_share": PROTECTED_SHARE,
            "hit_rates": rows,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
