"""One side of ab.py: serves rows named on stdin, one JSON line each, with the headstart on its PYTHONPATH."""

import atexit
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from headstart import LLM

try:  # the oldest place first: an installed laboratory is none of an older checkout
    from headstart.bench import lab_pick, lab_scheduler
except ImportError:
    try:
        from headstart.bench.experiments.engine import scheduler_cost as lab_scheduler
        from headstart.bench.experiments.router import decision_cost as lab_pick
    except ImportError:
        from headstart_lab.engine import scheduler_cost as lab_scheduler
        from headstart_lab.router import decision_cost as lab_pick

VOCABULARY = 32000


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # keeps the output of libraries out of the answers
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=4096, kv_cache_memory="1GiB")
    rows = rows_of(llm)
    for line in sys.stdin:
        asked = json.loads(line)
        print(
            json.dumps({"value": rows[asked["row"]](random.Random(f"{asked['row']} {asked['seed']}"))}),
            file=out,
            flush=True,
        )


def rows_of(llm: LLM) -> dict[str, Callable[[random.Random], float]]:
    """Return the rows by name; each returns a number, lower is better."""

    def tokens(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def cpu(prompts: list[list[int]], **sampling: Any) -> float:
        began = time.process_time()
        llm.generate(prompts, {"ignore_eos": True, "temperature": 0, **sampling}, progress=False)
        return time.process_time() - began

    def streams(rng: random.Random, **sampling: Any) -> float:
        prefix = tokens(rng, 1024)
        llm.generate([prefix], {"max_tokens": 1}, progress=False)
        return cpu([prefix + tokens(rng, 16) for _ in range(32)], max_tokens=32, **sampling)

    def warm(rng: random.Random) -> float:
        prefix = tokens(rng, 900)
        llm.generate([prefix], {"max_tokens": 1}, progress=False)
        return min(cpu([prefix + tokens(rng, 100)], max_tokens=1) for _ in range(5))

    def burst(rng: random.Random) -> float:
        prefix = tokens(rng, 1024)
        return cpu([prefix + tokens(rng, 32) for _ in range(32)], max_tokens=8)

    def groups(rng: random.Random) -> float:
        prefixes = [tokens(rng, 1024) for _ in range(8)]
        return cpu([prefix + tokens(rng, 64) for prefix in prefixes for _ in range(4)], max_tokens=32)

    def rotations(rng: random.Random) -> float:
        prompt = tokens(rng, 128)
        prompts = [prompt[i:] + prompt[:i] for i in range(0, 128, 8)]
        llm.generate(prompts, {"max_tokens": 1}, progress=False)
        return median(cpu(prompts, max_tokens=1) for _ in range(41))

    stored: list[LLM] = []

    def with_store() -> LLM:
        if not stored:
            folder = tempfile.mkdtemp(prefix="ab-store-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            sizes = {"max_model_len": 4096, "kv_cache_memory": "512MiB"}
            stored.append(LLM(sys.argv[1], dtype="bfloat16", kv_store=folder, **sizes))
        return stored[0]

    def written(rng: random.Random) -> tuple[list[int], float]:
        """Return a prompt whose blocks are only in the store, and the CPU time of computing and writing it."""
        one, prompt = with_store(), tokens(rng, 1000)
        began = time.process_time()
        one.generate([prompt], {"max_tokens": 1}, progress=False)
        while (store := one.engine.stats().store) is not None and store.num_pending:
            time.sleep(0.002)
        seconds = time.process_time() - began
        assert one.reset_prefix_cache()
        return prompt, seconds

    def loaded(rng: random.Random) -> float:
        prompt, _ = written(rng)
        one, began = with_store(), time.process_time()
        (found,) = one.generate([prompt], {"max_tokens": 1}, progress=False)
        assert found.num_cached_tokens > 900, found.num_cached_tokens
        return time.process_time() - began

    def picks(rng: random.Random) -> float:
        config = lab_pick.PickConfig(replicas=8, blocks=4096, long_prompt=8192, decisions=1500, unique=1)
        return 1e6 / lab_pick.run_pick(rng.getrandbits(16), config).values["requests_per_second"]

    def scheduling(name: str) -> Callable[[random.Random], float]:
        return lambda rng: lab_scheduler._costs(Random(rng.getrandbits(16)))[name]

    return {
        "one stream, greedy": lambda rng: cpu([tokens(rng, 64)], max_tokens=64, temperature=0),
        "32 streams, greedy": lambda rng: streams(rng, temperature=0),
        "32 streams, sampled": lambda rng: streams(rng, temperature=1, top_p=0.95, seed=1),
        "32 streams, logprobs": lambda rng: streams(rng, temperature=0, logprobs=5),
        "prefill of 1,000 tokens": lambda rng: cpu([tokens(rng, 1000)], max_tokens=1),
        "first token, 900 of 1,000 cached": warm,
        "32 requests behind one new prefix": burst,
        "8 x 4 prompts behind new prefixes": groups,
        "16 cached prompts again": rotations,
        "1,000 tokens computed and written to a store": lambda rng: written(rng)[1],
        "1,000 tokens from a store": loaded,
        "step of 256 decodes, no model": scheduling("step_256_decodes_us"),
        "admission of 4,096 tokens, no model": scheduling("admit_4096_cached_us"),
        "routed request, no sockets": picks,
    }


if __name__ == "__main__":
    main()
