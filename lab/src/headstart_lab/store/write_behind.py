"""Experiment: cost of write-behind to the engine. Throughput with a store / throughput without one.

Fresh engines and folders in turn, in this process, on two workloads: new prompts only (every block is written: the
worst case), and shared prefixes with outputs. The pool is half as large as the work, so that blocks are reallocated
while the writer may still need them: the steady state of a server that has run for a while.
"""

import gc
import time
from dataclasses import dataclass, replace
from math import nan, sqrt
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from headstart.core.cache.block_store import StoreStats
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.request import SamplingParams
from headstart.measurement.inprocess import RunResult, requests_from_prompts, run_requests
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.workload.request_record import median, percentile
from headstart.workload.synthetic import RequestShape, shared_prefix_prompts

BLOCK_SIZE = 16
DRAIN_SECONDS = 30.0  # time for a lagging writer to write the rest
LOOK_STEPS = 4  # steps between two checks of the write queue
SPEED = ("workload", "tokens/s off", "on", "on / off", "p99 step ms off", "on")
WRITER = ("workload", "blocks written", "lost", "most pending", "MB/s", "idle after s")


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of prompts that share a prefix; without a prefix every block is new."""

    name: str
    groups: int
    prompts: int  # of each
    shape: RequestShape

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of a pool that holds half of the workload."""
        tokens = self.groups * (self.shape.shared + self.prompts * (self.shape.own + self.shape.output))
        return tokens // BLOCK_SIZE // 2


@dataclass(frozen=True, slots=True)
class WriteBehindConfig:
    """The workloads, the number of rounds and the folder of the stores (None: the temporary folder)."""

    workloads: tuple[Workload, ...] = (
        Workload("cold", 48, 1, RequestShape(0, 1024, 1)),
        Workload("mix", 4, 12, RequestShape(717, 307, 32)),
    )
    runs: int = 5  # rounds of two pairs
    folder: Path | None = None


QUICK = WriteBehindConfig(
    (Workload("cold", 8, 1, RequestShape(0, 256, 1)), Workload("mix", 2, 4, RequestShape(176, 80, 4))),
    runs=1,
)


@dataclass(slots=True)
class _Side:
    """One workload on one fresh engine."""

    run: RunResult
    most_pending: int = 0  # largest number of blocks waiting to be written
    last_pending: int = 0  # the same after the last step
    drain_seconds: float = 0.0  # until none was left
    store: StoreStats | None = None

    @property
    def throughput(self) -> float:
        """Return the prompt and output tokens per second."""
        return sum(record.prompt_tokens + record.output_tokens for record in self.run.records) / self.run.seconds

    @property
    def p99_step_ms(self) -> float:
        return 1e3 * percentile([step.seconds for step in self.run.steps] or [nan], 99)


@dataclass(slots=True)
class _Pair:
    """The same work without and with a store."""

    off: _Side
    on: _Side

    @property
    def ratio(self) -> float:
        return self.on.throughput / self.off.throughput


def run_write_behind(setup: EngineSetup, config: WriteBehindConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure every workload in `runs` rounds: off, on, on, off. The first side of a pair is a little slower."""
    log, found = ContentionLog.empty(), dict[str, list[_Pair]]()
    info: EngineInfo | None = None
    for workload in config.workloads:
        found[workload.name] = []
        for number in range(2 * config.runs):
            sides = dict[bool, _Side]()
            for with_store in (False, True) if number % 2 == 0 else (True, False):
                side = "on" if with_store else "off"
                label = f"{workload.name}, store {side}, pair {number + 1} of {2 * config.runs}"
                lab = _Lab(setup, workload, with_store, config.folder, f"{setup.seed}/{number}")
                sides[with_store], info = measure_uncontended(lambda lab=lab, label=label: lab.measure(label, bar), log)
            found[workload.name].append(_Pair(sides[False], sides[True]))
    assert info is not None
    return _report(setup, config, info, found, log)


@dataclass(frozen=True, slots=True)
class _Lab:
    """One workload on one side."""

    setup: EngineSetup
    workload: Workload
    with_store: bool
    folder: Path | None
    seed: str

    def measure(self, label: str, bar: ProgressBar) -> tuple[_Side, EngineInfo]:
        """Build an engine, warm it up, run the workload on it, and wait for the writer."""
        with TemporaryDirectory(prefix="headstart-lab-", dir=self.folder) as scratch:
            options = self.setup.options(num_blocks=self.workload.num_blocks)
            store = str(Path(scratch) / "store") if self.with_store else None
            bar.start_stage(f"{label}: loading the model", None)
            engine, info = self.setup.build(replace(options, kv_store=store))
            try:
                return self._drive(engine, info.vocab_size, label, bar), info
            finally:
                engine.close()
                del engine
                gc.collect()  # the next engine's model must not be in memory beside this one's

    def _drive(self, engine: Engine, vocab_size: int, label: str, bar: ProgressBar) -> _Side:
        rng, shape = Random(self.seed), self.workload.shape
        run_requests(
            engine,
            requests_from_prompts(shared_prefix_prompts(1, 2, shape, vocab_size, rng), _sampling(shape), "warm-up"),
        )
        _drain(engine)
        prompts = shared_prefix_prompts(self.workload.groups, self.workload.prompts, shape, vocab_size, rng)
        rng.shuffle(prompts)
        bar.start_stage(label, len(prompts))
        pending = [0]

        def look(num_steps: int) -> None:
            if num_steps % LOOK_STEPS == 0:
                pending.append(_pending(engine))

        run = run_requests(engine, requests_from_prompts(prompts, _sampling(shape), "work"), bar=bar, on_step=look)
        last = _pending(engine)
        drained = _drain(engine)
        return _Side(run, max(*pending, last), last, drained, engine.stats().store)


def _sampling(shape: RequestShape) -> SamplingParams:
    return SamplingParams(max_tokens=shape.output, temperature=0.0)


def _pending(engine: Engine) -> int:
    """Return the number of blocks that wait to be written."""
    store = engine.stats().store
    return 0 if store is None else store.num_pending


def _drain(engine: Engine) -> float:
    """Wait until no block waits to be written, at most DRAIN_SECONDS; return the seconds."""
    start = time.perf_counter()
    while _pending(engine) and time.perf_counter() - start < DRAIN_SECONDS:
        time.sleep(0.01)
    return time.perf_counter() - start


def _report(
    setup: EngineSetup, config: WriteBehindConfig, info: EngineInfo, found: dict[str, list[_Pair]], log: ContentionLog
) -> BenchmarkReport:
    rows = {name: _figures(pairs) for name, pairs in found.items()}
    values: dict[str, Any] = {
        "throughput_on_over_off": min(row["throughput_on_over_off"] for row in rows.values()),
        **{f"{name}_throughput_on_over_off": row["throughput_on_over_off"] for name, row in rows.items()},
        "workloads": rows,
    }
    speed = ("tokens_per_s_off", "tokens_per_s_on", "throughput_on_over_off", "p99_step_ms_off", "p99_step_ms_on")
    writer = tuple(
        (
            *(name, row["written_blocks"], sum(row["lost_writes"].values()), row["most_pending_blocks"]),
            *(row["write_bytes_per_s"] / 1e6, row["drain_s"]),
        )
        for name, row in rows.items()
    )
    ratios = {"on / off": tuple(row["throughput_on_over_off"] for row in rows.values())}
    return BenchmarkReport(
        "lab write-behind",
        values,
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=info.threads,
        spread={f"{name}_throughput_on_over_off": min_and_max(_ratios(found[name])) for name in rows},
        setup={
            "workloads": {
                workload.name: {
                    "prompts": workload.groups * workload.prompts,
                    "groups": workload.groups,
                    **dict(zip(("shared_tokens", "own_tokens", "output_tokens"), _sizes(workload), strict=True)),
                    "pool_blocks": workload.num_blocks,
                }
                for workload in config.workloads
            },
            "order": "off, on, on, off in each round",
            **describe_engine(info),
        },
        contention=log.as_dict(),
        sheets=[
            ReportTable(
                "the same work without and with a store",
                SPEED,
                tuple((name, *(row[key] for key in speed)) for name, row in rows.items()),
            ),
            ReportTable("the writer, all pairs", WRITER, writer),
        ],
        charts=[ReportChart("throughput with a store", "workload", "over without", tuple(rows), ratios)],
        problems=list(
            dict.fromkeys(p for name, pairs in found.items() for pair in pairs for p in _problems(name, pair))
        ),
    )


def _sizes(workload: Workload) -> tuple[int, int, int]:
    return workload.shape.shared, workload.shape.own, workload.shape.output


def _figures(pairs: list[_Pair]) -> dict[str, Any]:
    """Return medians over the pairs; block counts are over all of them."""
    stores = [pair.on.store or StoreStats() for pair in pairs]
    reasons = {reason for store in stores for reason in store.lost_writes}
    return {
        "throughput_on_over_off": median(_ratios(pairs)),
        "tokens_per_s_off": median(pair.off.throughput for pair in pairs),
        "tokens_per_s_on": median(pair.on.throughput for pair in pairs),
        "p99_step_ms_off": median(pair.off.p99_step_ms for pair in pairs),
        "p99_step_ms_on": median(pair.on.p99_step_ms for pair in pairs),
        "p99_step_on_over_off": median(pair.on.p99_step_ms / pair.off.p99_step_ms for pair in pairs),
        "written_blocks": sum(store.written_blocks for store in stores),
        "written_bytes": sum(store.written_bytes for store in stores),
        "lost_writes": {
            reason: sum(store.lost_writes.get(reason, 0) for store in stores) for reason in sorted(reasons)
        },
        "loaded_blocks": sum(store.loaded_blocks for store in stores),
        "write_bytes_per_s": median(store.write_bytes_per_s for store in stores),
        "most_pending_blocks": max(pair.on.most_pending for pair in pairs),
        "pending_blocks_at_end": max(pair.on.last_pending for pair in pairs),
        "drain_s": median(pair.on.drain_seconds for pair in pairs),
    }


def _ratios(pairs: list[_Pair]) -> list[float]:
    """Return the geometric mean of the two pairs of each round: the store is first in one and last in the other."""
    return [sqrt(one.ratio * other.ratio) for one, other in zip(pairs[::2], pairs[1::2], strict=True)]


def _problems(name: str, pair: _Pair) -> list[str]:
    found = [*pair.off.run.problems(f"{name}, off"), *pair.on.run.problems(f"{name}, on")]
    store = pair.on.store
    if store is None or not store.written_blocks:
        found.append(f"{name}: the store was on but wrote no blocks")
    return found
