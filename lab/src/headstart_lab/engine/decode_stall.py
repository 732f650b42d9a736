"""Experiment: delay of running decodes by one long new prompt, and the cost to that prompt of bounding it.

Decodes are part of every step and never wait for a slot. But a step lasts as long as its longest chunk, so a prompt
that may fill the budget stretches the gap between two tokens of all requests. `--max-step-time` bounds the step in
time, as measured (the default on a CPU); `--long-prefill-token-threshold` caps the chunk in tokens.
"""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.request import SamplingParams
from headstart.core.sched.step_time import LEAST_TOKENS
from headstart.measurement.inprocess import REAL, Clock, requests_from_prompts
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.workload.request_record import median, percentile
from headstart.workload.synthetic import random_tokens

BLOCK_SIZE = 16
COLUMNS = ("bound", "TPOT p99 ms", "over unloaded", "TTFT of the prompt ms", "steps")


@dataclass(frozen=True, slots=True)
class StallConfig:
    """Sizes in tokens."""

    decodes: int = 16
    context: int = 64  # prompt of a decoding request
    prompt: int = 4000  # the cold one
    calm: int = 48  # steps with decodes only, before it arrives
    caps: tuple[int, ...] = (128, 256, 512, 1024)  # tokens
    cap: int = 256  # the one reported as "with the cap"
    runs: int = 3


QUICK = StallConfig(caps=(), runs=1)


class Bound(NamedTuple):
    """Bound of a step: in tokens of one prompt, in time, or by the token budget alone."""

    cap: int = 0  # tokens of one prompt; 0: unlimited
    seconds: float | None = 0.0  # of a step; 0: unlimited, None: the default

    @property
    def label(self) -> str:
        """Return the name in tables."""
        if self.cap:
            return f"cap {self.cap}"
        return "no bound" if self.seconds == 0 else "default" if self.seconds is None else f"{self.seconds:g} s"


NO_BOUND, DEFAULT = Bound(), Bound(seconds=None)


@dataclass(slots=True)
class _Stall:
    """One run: the gaps between two tokens of the decodes, in seconds, without and with the long prompt."""

    calm: list[float] = field(default_factory=list[float])
    loaded: list[float] = field(default_factory=list[float])
    ttft: float = 0.0  # of the prompt

    @property
    def p99(self) -> float:
        return percentile(self.loaded, 99)


def run_stall(
    setup: EngineSetup, config: StallConfig, bar: ProgressBar = QUIET, *, clock: Clock = REAL
) -> BenchmarkReport:
    """Measure each bound on its own engine; a run lasts until the cold prompt has its first token."""
    log, found = ContentionLog.empty(), dict[Bound, list[_Stall]]()
    info: EngineInfo | None = None
    for bound in dict.fromkeys((NO_BOUND, DEFAULT, *map(Bound, config.caps), Bound(config.cap))):
        bar.start_stage(f"loading the model for {bound.label}", None)
        options = replace(setup.options(num_blocks=_pool_blocks(config)), max_step_time=bound.seconds)
        engine, info = setup.build(replace(options, long_prefill_token_threshold=bound.cap))
        bar.start_stage(bound.label, config.runs + 1)
        found[bound] = []
        for number in range(config.runs + 1):
            rng = Random(f"{setup.seed}/{number}")
            stall = measure_uncontended(lambda e=engine, i=info, r=rng: _stall(e, i.vocab_size, config, r, clock), log)
            if number:  # the first one is a warm-up
                found[bound].append(stall)
            bar.advance()
    assert info is not None
    return _report(setup, config, info, found, log)


def _stall(engine: Engine, vocab_size: int, config: StallConfig, rng: Random, clock: Clock) -> _Stall:
    """Measure decodes alone, then the same with the cold prompt; everything is aborted at the end.

    Every decode gets one token in every step, so the gap between two of its tokens is the step's time.
    """
    sampling = SamplingParams(max_tokens=_output(config), temperature=0.0)
    prompts = [random_tokens(config.context, vocab_size, rng) for _ in range(config.decodes)]
    decodes = requests_from_prompts(prompts, sampling, "decode")
    (cold,) = requests_from_prompts([random_tokens(config.prompt, vocab_size, rng)], sampling, "cold")
    assert engine.reset_prefix_cache(), "an idle engine did not clear its prefix cache"
    for request in decodes:
        engine.add_request(request)
    while engine.stats().num_waiting or engine.stats().last_batch_tokens != config.decodes:
        engine.step()
    stall = _Stall()
    try:
        for _ in range(config.calm):
            stall.calm.append(_step(engine, decodes_due=config.decodes, clock=clock)[0])
        engine.add_request(cold)
        started = False
        while not started:
            seconds, produced = _step(engine, decodes_due=config.decodes, clock=clock)
            stall.loaded.append(seconds)
            stall.ttft += seconds
            started = cold.request_id in produced
    finally:
        for request in (*decodes, cold):
            engine.abort(request.request_id)
    return stall


def _step(engine: Engine, *, decodes_due: int, clock: Clock) -> tuple[float, set[str]]:
    """Return (seconds of a step, ids of the requests that got a token); every decode must be among them."""
    start = clock.now()
    outputs = engine.step()
    seconds = clock.now() - start
    produced = {output.request_id for output in outputs if output.token_ids}
    decoded = sum(request_id.startswith("decode") for request_id in produced)
    assert decoded == decodes_due, f"{decoded} of {decodes_due} decodes got a token"
    return seconds, produced


def _output(config: StallConfig) -> int:
    """Return more tokens than any run has steps, so that no decode ends in it."""
    return 2 * config.calm + config.prompt // min(LEAST_TOKENS, *config.caps, config.cap) + 64


def _pool_blocks(config: StallConfig) -> int:
    return (
        config.decodes * (-(-(config.context + _output(config)) // BLOCK_SIZE) + 1) + config.prompt // BLOCK_SIZE + 64
    )


def _report(
    setup: EngineSetup, config: StallConfig, info: EngineInfo, found: dict[Bound, list[_Stall]], log: ContentionLog
) -> BenchmarkReport:
    # over all runs: the p99 of one run's few calm steps is little more than its maximum
    unloaded = percentile((gap for stalls in found.values() for stall in stalls for gap in stall.calm), 99)
    rows = {
        bound: {
            "cap": bound.cap,
            "max_step_time": bound.seconds,
            "tpot_p99_ms": 1e3 * median(stall.p99 for stall in stalls),
            "tpot_p99_over_unloaded": median(stall.p99 for stall in stalls) / unloaded,
            "ttft_ms": 1e3 * median(stall.ttft for stall in stalls),
            "steps": max(len(stall.loaded) for stall in stalls),
        }
        for bound, stalls in found.items()
    }
    capped, free, default = rows[Bound(config.cap)], rows[NO_BOUND], rows[DEFAULT]
    values: dict[str, Any] = {
        "tpot_p99_over_unloaded": default["tpot_p99_over_unloaded"],
        "tpot_p99_over_unloaded_no_bound": free["tpot_p99_over_unloaded"],
        "tpot_p99_over_unloaded_cap": capped["tpot_p99_over_unloaded"],
        "ttft_ms": default["ttft_ms"],
        "ttft_no_bound_ms": free["ttft_ms"],
        "ttft_over_no_bound": default["ttft_ms"] / free["ttft_ms"],
        "ttft_cap_ms": capped["ttft_ms"],
        "unloaded_p99_ms": 1e3 * unloaded,
        "cap": config.cap,
        "bounds": list(rows.values()),
    }
    names = tuple(bound.label for bound in rows)
    ratios = tuple(row["tpot_p99_over_unloaded"] for row in rows.values())
    return BenchmarkReport(
        "lab stall",
        values,
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=info.threads,
        spread={
            "tpot_p99_over_unloaded": min_and_max([stall.p99 / unloaded for stall in found[DEFAULT]]),
            "tpot_p99_over_unloaded_no_bound": min_and_max([stall.p99 / unloaded for stall in found[NO_BOUND]]),
            "ttft_ms": min_and_max([1e3 * stall.ttft for stall in found[DEFAULT]]),
            "ttft_no_bound_ms": min_and_max([1e3 * stall.ttft for stall in found[NO_BOUND]]),
        },
        setup={
            "decodes": config.decodes,
            "context_tokens": config.context,
            "prompt_tokens": config.prompt,
            "max_num_batched_tokens": setup.options(num_blocks=1).max_num_batched_tokens,
            **describe_engine(info),
        },
        contention=log.as_dict(),
        sheets=[
            ReportTable(
                f"a cold prompt of {config.prompt} tokens amid {config.decodes} decodes",
                COLUMNS,
                tuple((name, *list(row.values())[2:]) for name, row in zip(names, rows.values(), strict=True)),
            )
        ],
        charts=[ReportChart("gap between tokens, p99 over unloaded", "bound", "ratio", names, {"ratio": ratios})],
    )
