"""Decisions by `cost` in fleets of several sizes, with changes in between: microseconds of CPU time of one thread.

    python benchmarks/router/pick_sizes.py [--decisions 500]

Indexes of 16,384 blocks per replica, 4,096 with 1,000 replicas; half of the replicas hold a part of each prompt. The
last stdout line is JSON. It takes some minutes; other load shares the caches and makes p99 larger.
"""

import argparse
import gc
import sys
from random import Random
from typing import Any

from headstart.measurement.machine import print_document
from headstart.workload.request_record import percentile
from headstart_lab.router.decision_cost import PickConfig, decision_times, full_router

SIZES = ((16, 32_768, 16_384), (16, 131_072, 16_384), (256, 2_048, 16_384), (256, 8_192, 16_384), (1000, 2_048, 4_096))
"""(replicas, tokens of a prompt, blocks per replica)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=500)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for replicas, tokens, blocks in SIZES:
        config = PickConfig(replicas=replicas, blocks=blocks, long_prompt=tokens, decisions=asked.decisions)
        rng = Random(0)
        router, prompts, _ = full_router(config, rng)
        gc.collect()
        gc.freeze()  # excludes garbage collection of the index entries from the timing
        times = decision_times(router, prompts, config, rng)
        gc.unfreeze()
        rows.append({"replicas": replicas, "prompt_tokens": tokens})
        rows[-1] |= {f"p{share}_us": round(percentile(times, share), 1) for share in (50, 99)}
        print(rows[-1], file=sys.stderr, flush=True)
    print_document({"bench": "pick sizes", "decisions": asked.decisions, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
