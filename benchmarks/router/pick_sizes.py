"""Router CPU per decision by `cost` in fleets of several sizes, and per request with long prompts; of one thread.

    python benchmarks/router/pick_sizes.py [--decisions 500] [--sizes 16x131072,256x2048] [--python]

Indexes of 16,384 blocks per replica, 4,096 with 1,000 replicas; half of the replicas hold a part of each prompt. With
16 replicas also the parts of a whole request: its hashes, the decision, `sent`, the first token and the end, for
prompts of which nothing, half, and all was sent before (31 each; 62,500 blocks per replica). `--python`: indexes and
hashes not in compiled code. The last stdout line is JSON. It takes some minutes; other load shares the caches and makes
all larger.
"""

import argparse
import gc
import sys
from random import Random
from statistics import median
from typing import Any

from headstart.measurement.machine import print_figures_with_machine
from headstart.workload.request_record import percentile
from headstart_lab.router.decision_cost import PickConfig, decision_times, full_router, times_of_requests

SIZES = ((16, 32_768, 16_384), (16, 131_072, 16_384), (256, 2_048, 16_384), (256, 8_192, 16_384), (1000, 2_048, 4_096))
"""(replicas, tokens of a prompt, blocks per replica)."""
FEW, REQUESTS, BLOCKS = 16, 31, 62_500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=500)
    parser.add_argument("--sizes", help="REPLICASxTOKENS,...; default: all")
    parser.add_argument("--python", action="store_true")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for replicas, tokens, blocks in SIZES:
        if asked.sizes and f"{replicas}x{tokens}" not in asked.sizes.split(","):
            continue
        config = PickConfig(
            replicas=replicas, blocks=blocks, long_prompt=tokens, decisions=asked.decisions, compiled=not asked.python
        )
        rng = Random(0)
        router, prompts, num_bytes = full_router(config, rng)
        num_blocks = sum(len(one.index) for one in router.endpoints.values())
        gc.collect()
        gc.freeze()  # excludes garbage collection of the index entries from the timing
        times = decision_times(router, prompts, config, rng)
        rows.append({"replicas": replicas, "prompt_tokens": tokens, "bytes_per_block": round(num_bytes / num_blocks)})
        rows[-1] |= {f"p{share}_us": round(percentile(times, share), 1) for share in (50, 99)}
        if replicas == FEW:
            config = PickConfig(blocks=BLOCKS, long_prompt=tokens, decisions=REQUESTS, compiled=not asked.python)
            router = full_router(config, rng)[0]
            gc.collect()
            gc.freeze()
            for share in (0.0, 0.5, 1.0):
                parts = times_of_requests(router, config, share, rng)
                means = {part: round(median(values), 3) for part, values in parts.items()}
                rows[-1][f"request_ms_{share:.0%}"] = {**means, "all": round(sum(means.values()), 3)}
        gc.unfreeze()
        print(rows[-1], file=sys.stderr, flush=True)
    print_figures_with_machine(
        {"bench": "pick sizes", "decisions": asked.decisions, "compiled": not asked.python, "rows": rows}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
