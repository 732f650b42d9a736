"""Experiment: page-aligned prefill off, exact and ceil (vLLM #19878): KV-write time saved against token budget lost.

`write_us_off`, `write_us_on`: microseconds of KV writing in all layers of llama-100m for a full budget of 2,048 tokens,
in steps that the scheduler planned without the flag and with it (exact), on a used pool, where consecutive blocks of a
prompt are seldom adjacent in memory. `..._ceil`: the same with whole blocks charged. `..._by_token`: "off" with every
token written to its own slot, as before whole blocks were written at once. `wide_...`: a model of 8 KV heads x 128.
The KV layout is the one that a server on this machine uses: the kernels' packed pages, or torch's.
`budget_lost_off`, `_exact`, `_ceil`: see `aligned_prefill.budget_lost`; "off" is the control. `whole_s_...`: the same
prompts through a real engine, to completion; that includes both effects.
"""

import time
from array import array
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.core.engine import Engine
from headstart.core.request import SamplingParams
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.measurement.inprocess import RunResult, requests_from_prompts, run_requests
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.model.attention.base import resolve_backend
from headstart.model.kernels.library import KernelLibrary, kernel_library_in_use
from headstart.model.kv_writes import KVWrites
from headstart.model.packed_kv import PackedKV
from headstart.model.paged_kv import PagedKV, TokenKVShape
from headstart.model.step_inputs import StepInputBounds, build_step_inputs
from headstart.model.weights.shapes import SHAPES, DecoderShape
from headstart.workload.request_record import median
from headstart.workload.synthetic import random_tokens
from headstart_lab.engine.aligned_prefill import (
    BLOCK_SIZE,
    LIMITS,
    MIXES,
    MODES,
    VOCAB_SIZE,
    budget_lost,
    steps,
)

BUDGET = LIMITS.max_batched_tokens
CPU = torch.device("cpu")
WRITE_SHAPES = {"": "llama-100m", "wide_": "qwen3-0.6b"}
TENSORS = 8  # layers held in memory; more would give the same result
ROUNDS = 3  # of all ways to write, in each run


@dataclass(frozen=True, slots=True)
class AlignedConfig:
    """The number of measurements."""

    runs: int = 5
    budget_prompts: int = 200
    write_prompts: int = 150  # over a pool of `write_blocks`, so that most of them write to reused blocks
    write_blocks: int = 1024
    write_steps: int = 12  # the last ones with prompts waiting
    whole_prompts: int = 16
    whole_outputs: int = 16


QUICK = AlignedConfig(runs=1, budget_prompts=40, whole_prompts=6)


class Planned(NamedTuple):
    """The KV writes of one step."""

    num_tokens: int
    writes: KVWrites


def run_page_aligned(
    setup: EngineSetup, config: AlignedConfig = AlignedConfig(), bar: ProgressBar = QUIET
) -> BenchmarkReport:
    """Measure all three modes in turn. Figures only; there is no pass or fail."""
    log = ContentionLog.empty()
    found: dict[str, list[float]] = {}
    bar.start_stage("token budget lost", config.runs)
    lost = _budgets(setup.seed, config, bar)
    found |= {f"budget_lost_{mode}": lost["mixed"][mode] for mode in MODES}
    bar.start_stage("KV writes", config.runs)
    found |= _write_times(setup.seed, config, log, bar)
    bar.start_stage("loading the model", None)
    whole, facts, problems = _whole(setup, config, log, bar)
    found |= {f"whole_s_{mode}": [run.seconds for run in runs] for mode, runs in whole.items()}
    values = {name: median(figures) for name, figures in found.items()}
    first = ("write_us_off", "write_us_on", "budget_lost_exact", "budget_lost_ceil")
    layout = "torch" if _packing_kernels(SHAPES[WRITE_SHAPES[""]].head_dim) is None else "packed"
    by_mix = {mix: {mode: median(shares) for mode, shares in modes.items()} for mix, modes in lost.items()}
    per_budget = BUDGET * 1e6 / sum(len(run_tokens) for run_tokens in facts.prompts)
    extra: dict[str, Any] = {
        "whole_us_per_2048_prompt_tokens": values["whole_s_off"] * per_budget,
        "budget_lost_by_mix": by_mix,
        "differing_tokens": facts.differing,
    }
    return BenchmarkReport(
        "lab page-aligned",
        {name: values[name] for name in first} | values | extra,
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=facts.threads,
        spread={name: min_and_max(figures) for name, figures in found.items()},
        setup={"budget": BUDGET, "mixes": MIXES, "kv_layout": layout, **asdict(config), **facts.described},
        contention=log.as_dict(),
        sheets=_sheets(values, by_mix),
        charts=_charts(values, by_mix),
        problems=problems,
    )


def _budgets(seed: int, config: AlignedConfig, bar: ProgressBar) -> dict[str, dict[str, list[float]]]:
    """Return the share of the budget lost by mix and mode, for each run's prompts."""
    lost: dict[str, dict[str, list[float]]] = {mix: {mode: [] for mode in MODES} for mix in MIXES}
    for run in range(config.runs):
        for name, mix in MIXES.items():
            for mode, limits in MODES.items():
                lost[name][mode].append(budget_lost(limits, mix, seed + run, config.budget_prompts))
        bar.advance()
    return lost


def _write_times(seed: int, config: AlignedConfig, log: ContentionLog, bar: ProgressBar) -> dict[str, list[float]]:
    """Return the microseconds of KV writing per full budget, by key and run."""
    planned = {mode: _planned(mode, seed, config) for mode in MODES}
    benches = {prefix: _WriteBench(SHAPES[name], config.write_blocks) for prefix, name in WRITE_SHAPES.items()}
    ways = {
        f"write_us_{key}": (planned[mode], False) for mode, key in (("off", "off"), ("exact", "on"), ("ceil", "ceil"))
    }
    ways["write_us_by_token"] = (planned["off"], True)
    found: dict[str, list[float]] = {}
    for _ in range(config.runs):
        for prefix, bench in benches.items():
            for key, seconds in measure_uncontended(lambda b=bench: b.seconds(ways), log).items():
                found.setdefault(prefix + key, []).append(1e6 * seconds)
        bar.advance()
    return found


def _planned(mode: str, seed: int, config: AlignedConfig) -> list[Planned]:
    """Return the writes of the last steps in which prompts waited, on a pool that other prompts have used."""
    bounds = StepInputBounds(config.write_blocks, BLOCK_SIZE, VOCAB_SIZE, LIMITS.max_model_len)
    planned: list[Planned] = []
    mix = MIXES["mixed"]._replace(longest_output=8)  # so that the budget is the limit, not the pool
    for step in steps(MODES[mode], mix, seed, num_prompts=config.write_prompts, num_blocks=config.write_blocks):
        if step.pressed:
            inputs, _, errors = build_step_inputs(step.batch, bounds, CPU)
            assert inputs is not None and not errors, errors
            planned.append(Planned(step.num_tokens, inputs.writes))
    return planned[-config.write_steps :]


class _PackedPages:
    """Writes of whole steps into the pages of the CPU kernels: planned once per step, then layer by layer."""

    def __init__(self, kv: PackedKV) -> None:
        self._kv = kv

    def write(self, planned: Planned, keys: Tensor, values: Tensor, *, by_token: bool) -> tuple[float, float]:
        """Return the seconds of planning for the step, and the seconds for all layers."""
        writes = _by_token(planned.writes) if by_token else planned.writes
        begin = time.perf_counter()
        pages = self._kv.plan_writes(writes, len(keys))
        made = time.perf_counter()
        for layer in range(self._kv.shape.num_layers):
            self._kv.write_layer_planned(layer, keys, values, pages)
        return made - begin, time.perf_counter() - made


class _TorchPages:
    """The same into torch's layout, where every layer uses the step's writes directly."""

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv

    def write(self, planned: Planned, keys: Tensor, values: Tensor, *, by_token: bool) -> tuple[float, float]:
        """Return the seconds of planning for the step (0), and the seconds for all layers."""
        write = self._kv.write_layer_by_token if by_token else self._kv.write_layer
        begin = time.perf_counter()
        for layer in range(self._kv.shape.num_layers):
            write(layer, keys, values, planned.writes)
        return 0.0, time.perf_counter() - begin


def _packing_kernels(head_dim: int) -> KernelLibrary | None:
    """Return the kernels whose layout a server on this machine uses; None: torch's."""
    return kernel_library_in_use() if resolve_backend("auto", CPU, head_dim) == "cpu" else None


def _by_token(writes: KVWrites) -> KVWrites:
    """Return the same writes without spans."""
    tokens = None if writes.tokens is None else writes.tokens.numpy()
    return writes._replace(spans=(), loose=tokens, loose_slots=writes.slots.numpy())


class _WriteBench:
    """KV of one model shape in bfloat16, with keys and values as its decoder passes them: parts of wider rows."""

    def __init__(self, shape: DecoderShape, num_blocks: int) -> None:
        heads, dim = shape.num_key_value_heads, shape.head_dim
        num_layers = min(TENSORS, shape.num_hidden_layers)
        self._scale = shape.num_hidden_layers / num_layers
        kv_shape = TokenKVShape(num_layers, heads, dim)
        size: dict[str, Any] = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "dtype": torch.bfloat16}
        found = _packing_kernels(dim)
        if found is None:
            self._pages = _TorchPages(PagedKV(kv_shape, device=CPU, **size))
        else:
            self._pages = _PackedPages(PackedKV(found, kv_shape, **size))
        queries = shape.num_attention_heads
        self._keys = torch.randn(BUDGET, queries + heads, dim).to(torch.bfloat16)[:, queries:]
        self._values = torch.randn(BUDGET, queries + 2 * heads, dim).to(torch.bfloat16)[:, queries + heads :]

    def seconds(self, ways: dict[str, tuple[list[Planned], bool]]) -> dict[str, float]:
        """Return the seconds for a full token budget in all layers, for each way (writes, by token), run in turn."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, (planned, by_token) in ways.items():
                tokens = sum(step.num_tokens for step in planned)
                found[name].append(self._write(planned, by_token) * BUDGET / tokens)
        return {name: median(times) for name, times in found.items()}

    def _write(self, planned: list[Planned], by_token: bool) -> float:
        """Return the seconds for all layers of the model, extrapolated from the layers held in memory."""
        total = 0.0
        with torch.inference_mode():
            for step in planned:
                keys, values = self._keys[: step.num_tokens], self._values[: step.num_tokens]
                once, layers = self._pages.write(step, keys, values, by_token=by_token)
                total += once + layers * self._scale
        return total


class _Facts(NamedTuple):
    """The entries of a report on the engine of the whole runs."""

    threads: int
    described: dict[str, object]
    prompts: "list[array[int]]"
    differing: int


def _whole(
    setup: EngineSetup, config: AlignedConfig, log: ContentionLog, bar: ProgressBar
) -> tuple[dict[str, list[RunResult]], _Facts, list[str]]:
    """Run the same prompts through one executor under three schedulers, in turn."""
    mix, rng = MIXES["mixed"], Random(setup.seed)
    num_blocks = config.whole_prompts * -(-(mix.longest + config.whole_outputs) // BLOCK_SIZE)
    engine, info = setup.build(setup.options(num_blocks=num_blocks, max_batched_tokens=BUDGET, caching=False))
    longest = info.max_model_len - config.whole_outputs
    lengths = [min(mix.prompt_length(rng), longest) for _ in range(config.whole_prompts)]
    prompts = [random_tokens(length, info.vocab_size, rng) for length in lengths]
    sampling = SamplingParams(max_tokens=config.whole_outputs, temperature=0.0)
    bar.start_stage("the same prompts, to completion", (1 + config.runs * len(MODES)) * len(prompts))

    def timed(mode: str, name: str) -> RunResult:
        limits = replace(engine.scheduler.limits, align=MODES[mode].align, charge_ceil=MODES[mode].charge_ceil)
        scheduler = Scheduler(
            SchedulerConfig(
                engine.scheduler.pool.num_blocks, BLOCK_SIZE, limits, enable_prefix_caching=False, policy="fcfs"
            )
        )
        return run_requests(Engine(scheduler, engine.executor), requests_from_prompts(prompts, sampling, name), bar=bar)

    first = timed("off", "warm-up")  # first touch of all memory
    found: dict[str, list[RunResult]] = {mode: [] for mode in MODES}
    problems: list[str] = []
    for run in range(config.runs):
        order = list(MODES)[run % len(MODES) :] + list(MODES)[: run % len(MODES)]
        for mode in order:
            done = measure_uncontended(lambda m=mode, r=run: timed(m, f"{m}{r}"), log)
            problems += done.problems(mode)
            found[mode].append(done)
    differing = sum(done.outputs != first.outputs for runs in found.values() for done in runs)
    if differing and info.dtype == "float32":
        problems.append(f"{differing} runs gave other tokens than the first in float32")
    return found, _Facts(info.threads, describe_engine(info), prompts, differing), problems


def _sheets(values: dict[str, float], by_mix: dict[str, dict[str, float]]) -> list[ReportTable]:
    writes = tuple(
        (name, *(values[f"{prefix}write_us_{key}"] for key in ("by_token", "off", "on", "ceil")))
        for prefix, name in WRITE_SHAPES.items()
    )
    budgets = tuple((mix, *(100 * share for share in modes.values())) for mix, modes in by_mix.items())
    whole = (("seconds", *(values[f"whole_s_{mode}"] for mode in MODES)),)
    return [
        ReportTable(
            "KV writes, us per 2,048 tokens in all layers", ("shape", "by token", "off", "exact", "ceil"), writes
        ),
        ReportTable("token budget lost while prompts wait, %", ("prompts", "off", "exact", "ceil"), budgets),
        ReportTable("the same prompts to completion", ("", "off", "exact", "ceil"), whole),
    ]


def _charts(values: dict[str, float], by_mix: dict[str, dict[str, float]]) -> list[ReportChart]:
    keys = {"by token": "by_token", "off": "off", "exact": "on", "ceil": "ceil"}
    writes: dict[str, tuple[float | None, ...]] = {
        name: tuple(values[f"{prefix}write_us_{key}"] / 1e3 for key in keys.values())
        for prefix, name in WRITE_SHAPES.items()
    }
    budgets: dict[str, tuple[float | None, ...]] = {
        mode: tuple(100 * shares[mode] for shares in by_mix.values()) for mode in MODES
    }
    return [
        ReportChart("KV writes of 2,048 tokens", "", "ms in all layers", tuple(keys), writes, log_y=True),
        ReportChart("token budget lost while prompts wait", "prompts", "%", tuple(by_mix), budgets),
    ]
