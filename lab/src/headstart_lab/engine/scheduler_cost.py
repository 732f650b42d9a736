"""Experiment: scheduling cost with an executor that computes nothing. Pure Python, one thread, no model.

Figures are CPU time of the one thread: on an idle machine that equals wall time; on a busy one the time slices of other
processes, which are longer than a step, do not count. They are medians over many steps, per run; the report gives the
median run. Sampling in the null executor is excluded from every figure. vLLM's own scheduler, run in turn with ours, is
measured by a script with the same steps in its own environment (benchmarks/scheduler/), so that its packages and ours
are never in one process. Without a counterpart: a warm pass of 48 rotated prompts of 1,025 tokens (vLLM #3402), which
are cached but for one token each, so that a GPU computes them in about ten milliseconds, and hashing in Python.
"""

import gc
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import thread_time
from typing import Any

import headstart
from headstart.core.batch import Batch, StepResult
from headstart.core.cache.hashing import BlockHash, HashChain, extend_block_hashes, root_hash
from headstart.core.engine import Engine
from headstart.core.errors import ConfigError
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable, min_and_max
from headstart.model.kernels.block_hashes import load_compiled_hash_chain
from headstart.model.kernels.compiled_blocks import compiled_block_loops
from headstart.workload.request_record import median
from headstart.workload.synthetic import random_tokens, token_rotations
from headstart_lab.runners.null_executor import NullExecutor

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
DECODES = 256
PROMPT = 4096
CACHED = PROMPT - BLOCK_SIZE
FIGURES = ("step_256_decodes", "admit_4096_cached", "finish_4096_cached", "hash_1k_tokens")
OWN_FIGURES = ("hash_1k_tokens_in_python", "warm_48_add", "warm_48_schedule", "warm_48_update", "warm_48_in_all")
WARM_PROMPTS, WARM_TOKENS = 48, 1025
COLUMNS = ("figure", "median", "min", "max", "vLLM", "min", "max", "vLLM / ours")
PEER_SCRIPT = Path(headstart.__file__).parents[2] / "benchmarks" / "scheduler" / "vllm_scheduler.py"
PEER_TIMEOUT = 600.0


def peer_command(python: Path | None) -> list[str]:
    """Return the command that measures vLLM's scheduler in its own interpreter; empty for none. Raises ConfigError."""
    if python is None:
        return []
    if not PEER_SCRIPT.is_file():
        raise ConfigError(f"--peer-python needs {PEER_SCRIPT}: run it from a source checkout")
    return [str(python), str(PEER_SCRIPT)]


def run_beside_peer(seed: int, runs: int, peer_python: Path | None = None, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure the costs, and vLLM's with the interpreter `peer_python`. Raises ConfigError without a checkout."""
    return run_scheduler(seed, runs, bar, peer=peer_command(peer_python))


def run_scheduler(seed: int, runs: int, bar: ProgressBar = QUIET, *, peer: Sequence[str] = ()) -> BenchmarkReport:
    """Measure a step of 256 decodes, one request of 4,096 tokens with 4,080 cached, hashing, and a warm pass.

    `peer` is a command that measures another scheduler in the same way, given the seed: it runs in turn with ours.
    """
    log = ContentionLog.empty()
    ours, theirs = list[dict[str, Any]](), list[dict[str, Any]]()
    bar.start_stage("scheduling", runs)
    for run in range(runs):
        if peer:  # first, so that one that cannot be run is named at once
            theirs.append(measure_uncontended(lambda r=run: _peer_costs([*peer, f"{seed}/{r}"]), log))
        ours.append(measure_uncontended(lambda r=run: _costs(Random(f"{seed}/{r}")), log))
        bar.advance()
    return _report(ours, theirs, seed, log)


def _report(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], seed: int, log: ContentionLog) -> BenchmarkReport:
    values: dict[str, float | None] = {}
    ranges: dict[str, list[float]] = {}
    rows: list[tuple[Any, ...]] = []
    for figure in (*FIGURES, *OWN_FIGURES):
        key = f"{figure}_us"
        row: list[Any] = [figure]
        for name, runs in ((key, ours), (f"vllm_{key}", theirs)):
            times = [run[key] for run in runs if key in run]
            values[name] = median(times) if times else None
            if times:
                ranges[name] = min_and_max(times)
            row += [values[name], *ranges.get(name, (None, None))]
        mine, peer = values[key], values[f"vllm_{key}"]
        values[f"{figure}_ratio"] = peer / mine if mine and peer else None
        rows.append((*row, values[f"{figure}_ratio"]))
    return BenchmarkReport(
        "lab scheduler",
        values,
        seed=seed,
        runs=len(ours),
        threads=1,
        spread=ranges,
        setup={
            "block_size": BLOCK_SIZE,
            "decodes": DECODES,
            "prompt_tokens": PROMPT,
            "cached_tokens": CACHED,
            "warm_prompts": WARM_PROMPTS,
            "warm_tokens": WARM_TOKENS,
            "compiled_hashes": load_compiled_hash_chain() is not None,
            "peer_versions": theirs[0].get("versions") if theirs else None,
        },
        contention=log.as_dict(),
        sheets=[ReportTable("scheduling without a model, microseconds", COLUMNS, tuple(rows))],
    )


def _peer_costs(command: list[str]) -> dict[str, Any]:
    """Return the last line that a command prints, as JSON. Raises ConfigError if there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT, check=False)
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            found = json.loads(lines[-1])
            missing = [figure for figure in FIGURES if f"{figure}_us" not in found]
            if not missing:
                return found
            raise ConfigError(f"{command[0]} measured no {', '.join(missing)}")
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise ConfigError(f"--peer-python {command[0]}: {error}; see benchmarks/scheduler/README.md") from error
    why = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise ConfigError(f"--peer-python {command[0]} failed: {why}; see benchmarks/scheduler/README.md")


def _costs(rng: Random) -> dict[str, float]:
    """Return all figures of one run, in microseconds."""
    gc.collect()
    gc.freeze()  # as the engine process does after startup
    admit, finish = _admit_cached(rng)
    seconds = [_step_of_decodes(rng), admit, finish, _hash_1k(rng, load_compiled_hash_chain()), _hash_1k(rng, None)]
    seconds += _warm_pass(rng)
    return {f"{figure}_us": 1e6 * value for figure, value in zip((*FIGURES, *OWN_FIGURES), seconds, strict=True)}


class _Stopwatch(NullExecutor):
    """A null executor that records the start time and the duration of a step."""

    handed = 0.0
    kept = 0.0

    def execute(self, batch: Batch) -> StepResult:
        self.handed = thread_time()
        result = super().execute(batch)
        self.kept = thread_time() - self.handed
        return result


def _engine(num_blocks: int) -> tuple[Engine, _Stopwatch]:
    limits = Limits(max_batched_tokens=8192, max_seqs=DECODES, max_model_len=2 * PROMPT)
    scheduler = Scheduler(
        SchedulerConfig(num_blocks, BLOCK_SIZE, limits, policy="fcfs", eviction_policy="lru", tenant_floor=0.0),
        chain=load_compiled_hash_chain(),
        ops=compiled_block_loops(),
    )
    watch = _Stopwatch(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
    return Engine(scheduler, watch), watch


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def _step_of_decodes(rng: Random, steps: int = 64) -> float:
    """Return the seconds of one step of 256 running decodes, schedule and update; one in sixteen fills a block."""
    engine, watch = _engine(DECODES * 10)
    for index in range(DECODES):
        prompt = random_tokens(32 + index % BLOCK_SIZE, VOCAB_SIZE, rng)
        engine.add_request(Request(f"r{index}", prompt, _greedy(steps + 8)))
    while engine.stats().num_waiting or engine.stats().last_batch_tokens != DECODES:
        engine.step()
    times: list[float] = []
    for _ in range(steps):
        start = thread_time()
        engine.step()
        times.append(thread_time() - start - watch.kept)
    return median(times)


def _admit_cached(rng: Random, requests: int = 32) -> tuple[float, float]:
    """Return the seconds from creation until (admitted, finished) of one request, 4,080 of its 4,096 tokens cached."""
    engine, watch = _engine(4 * PROMPT // BLOCK_SIZE)
    prefix = random_tokens(CACHED, VOCAB_SIZE, rng)
    admitted, finished = list[float](), list[float]()
    for index in range(requests + 1):
        prompt = prefix + random_tokens(PROMPT - CACHED, VOCAB_SIZE, rng)
        start = thread_time()
        engine.add_request(Request(f"r{index}", prompt, _greedy(1)))
        engine.step()
        finished.append(thread_time() - start - watch.kept)
        admitted.append(watch.handed - start)
        assert not engine.has_work, "a request of one output token outlived its step"
    stats = engine.stats()
    assert stats.counters.cached_tokens == requests * CACHED, f"{stats.counters.cached_tokens} tokens were cached"
    return median(admitted[1:]), median(finished[1:])


def _warm_pass(rng: Random, passes: int = 32) -> tuple[float, float, float, float]:
    """Return the seconds to add, schedule and update rotated prompts that are cached but for one token, and in all."""
    limits = Limits(max_batched_tokens=WARM_PROMPTS * WARM_TOKENS, max_seqs=DECODES, max_model_len=2 * WARM_TOKENS)
    num_blocks = 2 * WARM_PROMPTS * (WARM_TOKENS // BLOCK_SIZE + 1)
    config = SchedulerConfig(num_blocks, BLOCK_SIZE, limits, tenant_floor=0.0)  # as `serve` has them
    watch = _Stopwatch(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
    engine = Engine(Scheduler(config, chain=load_compiled_hash_chain(), ops=compiled_block_loops()), watch)
    prompts = token_rotations(random_tokens(WARM_TOKENS, VOCAB_SIZE, rng), WARM_PROMPTS)
    times: list[tuple[float, float, float, float]] = []
    for number in range(passes + 2):  # the first two compute the prompts, and make their blocks protected ones
        start = thread_time()
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(f"{number}-{index}", prompt, _greedy(1)))
        added = thread_time()
        engine.step()
        end = thread_time()
        planned = watch.handed + watch.kept
        times.append((added - start, watch.handed - added, end - planned, end - start - watch.kept))
        assert not engine.has_work, "a pass took more than one step"
    add, schedule, update, whole = (median(column) for column in zip(*times[2:], strict=True))
    return add, schedule, update, whole


def _hash_1k(rng: Random, chain: HashChain | None, rounds: int = 200) -> float:
    """Return the seconds to compute the block hashes of 1,024 tokens (64 blocks)."""
    tokens, root = random_tokens(1024, VOCAB_SIZE, rng), root_hash(b"lab")

    def once() -> float:
        hashes: list[BlockHash] = []
        start = thread_time()
        extend_block_hashes(hashes, tokens, BLOCK_SIZE, root, chain=chain)
        return thread_time() - start

    return median(once() for _ in range(rounds))
