"""Lab: what scheduling costs when computing costs nothing. Pure Python, one thread, no model.

Figures are medians over many steps, per run; the report gives the median run. Sampling in the null executor is left
out of every figure.
"""

import time
from collections.abc import Callable
from random import Random

from headstart.bench.machine import ContentionLog, uncontended
from headstart.bench.nullexec import NullExecutor
from headstart.bench.progress import QUIET, Bar
from headstart.bench.report import Report, Sheet, spread
from headstart.core.engine import Engine
from headstart.core.hashing import BlockHash, extend_hashes, root_hash
from headstart.core.limits import Limits
from headstart.core.request import Request, SamplingParams
from headstart.core.scheduler import Scheduler
from headstart.workload.record import median
from headstart.workload.synthetic import random_tokens

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
DECODES = 256
PROMPT = 4096
CACHED = PROMPT - BLOCK_SIZE


def run_scheduler(seed: int, runs: int, bar: Bar = QUIET) -> Report:
    """Measures a step of 256 decodes, one request of 4,096 tokens with 4,080 cached, and naming 1,024 tokens."""
    figures: dict[str, Callable[[Random], float]] = {
        "step_256_decodes_us": _step_of_decodes,
        "admit_4096_cached_us": _admit_cached,
        "hash_1k_tokens_us": _hash_1k,
    }
    log = ContentionLog.new()
    found: dict[str, list[float]] = {}
    for name, measure in figures.items():
        bar.stage(name, runs)
        found[name] = []
        for run in range(runs):
            found[name].append(1e6 * uncontended(lambda m=measure, r=run: m(Random(f"{seed}/{r}")), log))
            bar.advance()
    values = {name: median(times) for name, times in found.items()}
    rows = tuple((name, value, *spread(found[name])) for name, value in values.items())
    return Report(
        "lab scheduler",
        values,
        model=None,
        seed=seed,
        runs=runs,
        threads=1,
        spread={name: spread(times) for name, times in found.items()},
        setup={"block_size": BLOCK_SIZE, "decodes": DECODES, "prompt_tokens": PROMPT, "cached_tokens": CACHED},
        contention=log.as_dict(),
        sheets=[Sheet("scheduling without a model, microseconds", ("figure", "median", "min", "max"), rows)],
    )


def _engine(num_blocks: int) -> Engine:
    limits = Limits(max_batched_tokens=8192, max_seqs=DECODES, max_model_len=2 * PROMPT)
    scheduler = Scheduler(num_blocks, BLOCK_SIZE, limits)
    return Engine(scheduler, NullExecutor(num_blocks, BLOCK_SIZE, VOCAB_SIZE))


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def _timed_step(engine: Engine) -> float:
    """Seconds of one step less those of the executor."""
    before = engine.stats().step_seconds
    start = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - start
    return seconds - (engine.stats().step_seconds - before)


def _step_of_decodes(rng: Random, steps: int = 64) -> float:
    """One step of 256 running decodes, schedule and update."""
    engine = _engine(DECODES * 10)
    for index in range(DECODES):
        engine.add_request(Request(f"r{index}", random_tokens(32, VOCAB_SIZE, rng), _greedy(steps + 8)))
    while engine.stats().num_waiting or engine.stats().last_batch_tokens != DECODES:
        engine.step()
    return median(_timed_step(engine) for _ in range(steps))


def _admit_cached(rng: Random, requests: int = 32) -> float:
    """Everything about one request that is alone, 4,080 of its 4,096 tokens cached: naming, admission, end."""
    engine = _engine(4 * PROMPT // BLOCK_SIZE)
    prefix = random_tokens(CACHED, VOCAB_SIZE, rng)
    times: list[float] = []
    for index in range(requests + 1):
        prompt = prefix + random_tokens(PROMPT - CACHED, VOCAB_SIZE, rng)
        start = time.perf_counter()
        engine.add_request(Request(f"r{index}", prompt, _greedy(1)))
        added = time.perf_counter() - start
        times.append(added + _timed_step(engine))
        assert not engine.has_work, "a request of one output token outlived its step"
    stats = engine.stats()
    assert stats.cached_tokens == requests * CACHED, f"{stats.cached_tokens} tokens were cached"
    return median(times[1:])


def _hash_1k(rng: Random, rounds: int = 200) -> float:
    """Naming the 64 blocks of 1,024 tokens."""
    tokens, root = random_tokens(1024, VOCAB_SIZE, rng), root_hash(b"lab")

    def once() -> float:
        hashes: list[BlockHash] = []
        start = time.perf_counter()
        extend_hashes(hashes, tokens, BLOCK_SIZE, root)
        return time.perf_counter() - start

    return median(once() for _ in range(rounds))
