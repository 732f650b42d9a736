"""Recorded sessions of agents through the engine's own cache and checkpoints, as a hybrid and as attention alone.

    python benchmarks/hybrid/replay.py agentx/ > replay.json

`KVCache`, `BlockPool` and `RecurrentCheckpoints` of core/ with the bytes of Qwen3.5-9B and blocks of 64 tokens: each
prompt is
looked up, taken over, extended, published and released, one after the other; no model and no clock. Both models have
the same pool of bytes and the same eviction. Prompts that are longer than the pool are refused.
"""

import argparse
import gc
import json
import sys
from array import array
from pathlib import Path
from typing import Any

from places import KV_BYTES, STATE_BYTES

from headstart.core.batch import Chunk
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.eviction import PYTHON
from headstart.core.cache.kv_cache import NO_HIT, KVCache
from headstart.core.request import Request
from headstart.model.kernels.block_hashes import load_compiled_hash_chain
from headstart.model.kernels.compiled_blocks import compiled_block_loops
from headstart.workload.block_paths import overlap_sessions
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.traces import TracedRequest


class Replay:
    """One cache that serves whole prompts. `state_pages` 0: attention alone."""

    def __init__(self, num_blocks: int, size: int, policy: str, state_pages: int) -> None:
        self.size = size
        self.pool = BlockPool(num_blocks + 1, eviction_policy=policy, ops=compiled_block_loops() or PYTHON)
        self.cache = KVCache(self.pool, size, state_pages=state_pages, chain=load_compiled_hash_chain())
        self.num_served, self.shares = 0, 0.0

    def serve(self, traced: TracedRequest) -> tuple[int, int]:
        """Serve one prompt; return the tokens that it reuses and those whose keys and values were there."""
        size, cache, end = self.size, self.cache, traced.length
        if -(-end // size) > self.pool.usable_capacity:
            return 0, 0
        tokens = array("i")
        for block in traced.hash_ids[: -(-end // size)]:
            tokens.extend((block,) * size)
        del tokens[end:]
        request = Request(str(self.num_served), tokens)
        seq = cache.new_sequence(request, self.num_served)
        self.num_served += 1
        hit = cache.match_prefix(seq)
        if not cache.adopt_hit_and_extend_table(seq, hit, end):  # its state does not fit beside it
            assert cache.adopt_hit_and_extend_table(seq, NO_HIT, end), f"a prompt of {end} tokens does not fit"
            hit = NO_HIT
        start = seq.num_computed_tokens
        state, saves = cache.assign_chunk_state_blocks(seq, start, end) if cache.checkpoints.num_pages else ((), ())
        chunk = Chunk(request.request_id, tokens[start:], start, seq.block_ids, start, 1, request.sampling, end, tokens,
                      state=state, saves=saves)  # fmt: skip
        seq.num_computed_tokens = end
        cache.publish_full_blocks(seq)
        cache.checkpoints.finish_chunk(seq, chunk, end)
        cache.release_table(seq)
        self.shares += self.pool.num_pages / max(self.pool.usable_capacity - self.pool.num_scratch, 1)
        return hit.num_tokens, min(len(hit.block_ids) * size, end - 1) if hit != NO_HIT else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a folder of sessions, such as AgentX's")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 32], help="sessions that overlap")
    parser.add_argument("--pools", type=float, nargs="+", default=[0.5, 1, 4], help="millions of tokens of KV")
    parser.add_argument("--policies", nargs="+", default=["2q", "lru"], help="--eviction-policy")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    recorded = read_trace_path(options.trace)
    gc.freeze()
    for at_once in options.at_once:
        trace = overlap_sessions(recorded, at_once)
        size = trace.block_size
        prompt_tokens = sum(request.length for request in trace.requests)
        for pool in options.pools:
            for policy in options.policies:
                found = dict[str, Any]()
                for name, pages in (("attention", 0), ("hybrid", STATE_BYTES // (size * KV_BYTES))):
                    replay = Replay(int(pool * 1e6) // size, size, policy, pages)
                    served = [replay.serve(request) for request in trace.requests]
                    found[name] = round(sum(hit for hit, _ in served) / prompt_tokens, 4)
                    found[f"{name}_kv_there"] = round(sum(there for _, there in served) / prompt_tokens, 4)
                found["ratio"] = round(found["hybrid"] / found["attention"], 4)
                found["state_share"] = round(replay.shares / len(trace.requests), 4)
                rows.append({"at_once": at_once, "pool_mtokens": pool, "policy": policy, **found})
                print(*rows[-1].values(), sep="\t", file=sys.stderr, flush=True)
    print(json.dumps({"trace": options.trace.name, "requests": len(recorded.requests), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
