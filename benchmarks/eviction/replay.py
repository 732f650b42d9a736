"""Hit rates of eviction policies over recorded traffic, on the engine's own BlockPool.

    python benchmarks/eviction/replay.py --trace conversation_trace.jsonl --format mooncake
    python benchmarks/eviction/replay.py --trace agent_miniswe.jsonl --format text

No model and no clock: requests run in the order of the trace, `--concurrency` of them hold their blocks at a time, and
each publishes the full blocks of its prompt before the lookup of the next one. The last stdout line is JSON.
"""

import argparse
import hashlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headstart.bench.machine import print_document
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.eviction import PROTECTED_SHARE, EvictionOrder, TwoQueue
from headstart.core.cache.free_blocks import EVICTION_POLICIES
from headstart.core.cache.hashing import BlockHash

ROOT = BlockHash(b"root")
MOONCAKE_BLOCK = 512  # tokens per id of the trace
TEXT_BLOCK = 64  # characters that stand for one block of 16 tokens
POOLS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # of the distinct blocks of the trace

Prompt = list[BlockHash]


def read_mooncake(path: Path) -> Iterator[Prompt]:
    """Yield the block hashes of each prompt's full blocks; the ids in the trace already identify whole prefixes."""
    with path.open() as lines:
        for line in lines:
            request = json.loads(line)
            full = request["input_length"] // MOONCAKE_BLOCK
            yield [BlockHash(number.to_bytes(8, "little")) for number in request["hash_ids"][:full]]


def read_text(path: Path) -> Iterator[Prompt]:
    """Yield the chained block hashes of full blocks of characters, in time order."""
    with path.open() as lines:
        requests = sorted(map(json.loads, lines), key=lambda request: request["timestamp"])
    for request in requests:
        text, parent, hashes = request["input"].encode(), b"", []
        for start in range(0, len(text) - TEXT_BLOCK + 1, TEXT_BLOCK):
            parent = hashlib.sha256(parent + text[start : start + TEXT_BLOCK]).digest()
            hashes.append(BlockHash(parent))
        yield hashes


SHARES = (0.3, 0.8)  # other shares of the pool that 2q might protect

FORMATS = {"mooncake": read_mooncake, "text": read_text}


def replay(prompts: list[Prompt], policy: str, num_blocks: int, concurrency: int) -> float:
    """Return the share of all full blocks that was found in a pool of `num_blocks` blocks."""
    pool = BlockPool(num_blocks + 1, eviction_policy=policy)
    held: deque[list[int]] = deque()
    num_found = num_wanted = 0
    for hashes in prompts:
        while held and len(held) >= concurrency:
            pool.release(held.popleft())
        hit = pool.lookup(hashes, ROOT, b"", 0)
        num_found += len(hit)
        num_wanted += len(hashes)
        new = min(len(hashes), num_blocks) - len(hit)
        while held and new > pool.num_available(hit):
            pool.release(held.popleft())
        pool.acquire(hit)
        blocks = hit + pool.allocate(new)
        for index in range(len(hit), len(blocks)):
            pool.publish(blocks[index], hashes[index], hashes[index - 1] if index else ROOT, b"")
        held.append(blocks)
    while held:
        pool.release(held.popleft())
    pool.check()
    return num_found / num_wanted


def two_queue(share: float) -> Callable[[bytearray, int], EvictionOrder]:
    """Return 2q with another share of the pool protected."""
    return lambda marks, _: TwoQueue(marks, int(share * (len(marks) - 1)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--concurrency", type=int, default=16, help="requests that hold their blocks at a time")
    args = parser.parse_args()
    prompts = list(FORMATS[args.format](args.trace))
    distinct = len({block_hash for hashes in prompts for block_hash in hashes})
    total = sum(map(len, prompts))
    longest = max(map(len, prompts))
    EVICTION_POLICIES.update({f"2q protecting {share}": two_queue(share) for share in SHARES})
    rows: list[dict[str, Any]] = []
    for share in POOLS:
        num_blocks = int(share * distinct)
        if num_blocks < longest:
            continue
        rates = {
            policy: round(replay(prompts, policy, num_blocks, args.concurrency), 4) for policy in EVICTION_POLICIES
        }
        rows.append({"pool_blocks": num_blocks, "pool_share": share, **rates})
        print(json.dumps(rows[-1]), file=sys.stderr)
    print_document(
        {
            "bench": "eviction replay",
            "trace": args.trace.name,
            "requests": len(prompts),
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
