"""Experiment: the router's predicted cached tokens against those that engines report, on recorded agent texts.

Real engines that compute nothing (engine_fleet.py), a real router with the policy `cost`, real tokenization. Each form
varies what the router knows about a cache, and runs twice: with self-correction from `cached_tokens` and without it.
Deterministic; time is virtual. Sessions were recorded one after another; here they start at `speed` times the recorded
rate and keep their own pace, so that many are active at once and together exceed the caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.bundled import bundled_intent_model_folder
from headstart.core.errors import ConfigError
from headstart.core.request import Request
from headstart.core.sched.limits import Limits
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.policies.policy_table import make_policy
from headstart.router.router import Router
from headstart.router.routing_request import RoutingPrompt, RoutingRequest, router_root, text_as_pseudo_tokens
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.recorded.trace_units import TraceUnits
from headstart.workload.traces import TracedRequest
from headstart_lab.router.engine_fleet import (
    Call,
    EngineFleet,
    EngineReplica,
    Served,
    make_engine,
    sampling,
)
from headstart_lab.runners.virtual_time import StepCost

BLOCK_SIZE = 16
COST = StepCost(1e-3, 2e-5)
LONGEST_SHARE = 0.5  # of a pool: longer calls are left out
KNOWN_TOKENS = 16.0  # largest mean error where everything is known: a block

LOST_HITS = 0.005  # share of the prompt tokens in bytes that correction may cost


@dataclass(frozen=True, slots=True)
class PredictConfig:
    """`cache` in blocks per replica. Sessions start at `speed` times the recorded rate, with unchanged pauses."""

    replicas: int = 4
    cache: int = 2048
    speed: float = 20.0
    max_requests: int = 0  # of each trace; 0: all
    trace_time_unit: str = ""  # empty: recognised


QUICK = PredictConfig(replicas=2, cache=1024, max_requests=60)


@dataclass(frozen=True, slots=True)
class Form:
    """The configuration of the engines, and the router's assumptions about it."""

    label: str
    policy: str = "2q"  # eviction policy of the engines
    believed_policy: str = "2q"
    size: float = 1.0  # cache size assumed / true size; 0: unknown
    exact: bool = True  # the router has the tokenizer; otherwise it hashes bytes
    told: bool = True  # the router receives the tokens of answers
    flush: bool = False  # of all replicas, one after the other, from the middle on
    wrong: bool = False  # an assumption that correction learns (size or flush) is wrong: correction must help


FORMS = (
    Form("known_2q"),
    Form("known_lru", policy="lru", believed_policy="lru"),
    Form("answers_untold", told=False),
    Form("size_unknown", size=0.0, wrong=True),
    Form("size_x4", size=4.0, wrong=True),
    Form("policy_unlike", believed_policy="lru"),
    Form("flushed", flush=True, wrong=True),
    Form("bytes", exact=False, told=False),
    Form("bytes_size_unknown", exact=False, told=False, size=0.0, wrong=True),
)
COLUMNS = ("form", "error, tokens", "uncorrected", "bias", "uncorrected", "predicted", "real", "exact")


@dataclass(frozen=True, slots=True)
class _Text:
    """One request of a trace, in tokens."""

    row: TracedRequest
    session: str
    request: Request


def run_predict(
    traces: Sequence[Path], config: PredictConfig = PredictConfig(), bar: ProgressBar = QUIET
) -> BenchmarkReport:
    """Serve the traces together once per form, with correction and without. Raises ConfigError."""
    texts, num_left_out, vocab_size = _texts(traces, config, bar)
    values: dict[str, Any] = {"requests": len(texts), "left_out": num_left_out}
    problems: list[str] = []
    rows: list[tuple[Any, ...]] = []
    calls = {exact: _calls(texts, config, exact) for exact in (True, False)}
    bar.start_stage("forms", 2 * len(FORMS))
    wrong = [0.0, 0.0]
    for form in FORMS:
        found: list[dict[str, float]] = []
        for corrects in (True, False):
            found.append(_run(form, calls[form.exact], config, vocab_size, corrects))
            bar.advance()
        with_, without = found
        for name, value in with_.items():
            values[f"{form.label}.{name}"] = value
            values[f"{form.label}.{name}_uncorrected"] = without[name]
        problems += problems_of(form, with_, without)
        if form.wrong:
            wrong = [total + of["error_tokens"] for total, of in zip(wrong, found, strict=True)]
        keys = ("hit_rate_predicted", "hit_rate", "exact_share")
        both = [of[key] for key in ("error_tokens", "bias_tokens") for of in (with_, without)]
        rows.append((form.label, *both, *(with_[key] for key in keys)))
    num_wrong = sum(form.wrong for form in FORMS)
    values["wrong_beliefs.error_tokens"] = wrong[0] / num_wrong
    values["wrong_beliefs.error_tokens_uncorrected"] = wrong[1] / num_wrong
    if wrong[0] >= wrong[1]:
        problems.append("correction does not reduce the error where the assumption is wrong")
    title = (
        f"{len(texts):,} requests, {config.replicas} engines of {config.cache:,} blocks; mean error of cached_tokens"
    )
    return BenchmarkReport(
        "lab predict",
        values,
        model="bundled tokenizer",
        threads=1,
        setup={
            "traces": [trace.name for trace in traces],
            "replicas": config.replicas,
            "cache_blocks": config.cache,
            "block_size": BLOCK_SIZE,
            "speed": config.speed,
            "step_seconds": COST.step,
            "token_seconds": COST.token,
        },
        sheets=[ReportTable(title, COLUMNS, tuple(rows))],
        problems=problems,
    )


def problems_of(form: Form, with_: dict[str, float], without: dict[str, float]) -> list[str]:
    """Return the violated expectations of a form."""
    error, uncorrected = with_["error_tokens"], without["error_tokens"]
    if form.wrong and error > uncorrected:
        return [f"{form.label}: mean error {error:.1f} tokens with correction, {uncorrected:.1f} without"]
    if not form.exact and with_["hit_rate"] < without["hit_rate"] - LOST_HITS:
        return [f"{form.label}: hit rate {with_['hit_rate']:.3f} with correction, {without['hit_rate']:.3f} without"]
    if form.label.startswith("known") and error > KNOWN_TOKENS:
        return [f"{form.label}: mean error {error:.1f} tokens although all is known; the maximum is {KNOWN_TOKENS:.0f}"]
    return []


def _run(form: Form, calls: Sequence[Call], config: PredictConfig, vocab_size: int, corrects: bool) -> dict[str, float]:
    """Run one form and return its prediction figures."""
    router = Router(make_policy("cost"))
    replicas: list[EngineReplica] = []
    limits = Limits(max_model_len=config.cache * BLOCK_SIZE)
    for index in range(config.replicas):
        name = f"r{index}"
        engine = make_engine(config.cache, BLOCK_SIZE, vocab_size, form.policy, limits)
        replicas.append(EngineReplica(name, engine, COST))
        shadow = ApproximateIndex(
            int(form.size * config.cache), eviction_policy=form.believed_policy, corrects=corrects
        )
        router.add(Endpoint(name, shadow, block_size=BLOCK_SIZE))
    fleet = EngineFleet(replicas, router, tells_output=form.told)
    if form.flush:
        for index, replica in enumerate(replicas):
            fleet.after(len(calls) * (index + config.replicas) // (2 * config.replicas), replica.flush)
    return figures(fleet.run(calls)) | {"flushes": sum(replica.num_flushes for replica in replicas)}


def figures(served: Sequence[Served]) -> dict[str, float]:
    """Return the figures of predicted and reported cached tokens, in the engines' tokens."""
    believed: list[float] = []
    for decision, usage in served:
        believed.append(decision.candidate.hit_tokens * usage.prompt_tokens / max(decision.view.num_prompt_tokens, 1))
    real = [usage.cached_tokens for _, usage in served]
    off = [one - other for one, other in zip(believed, real, strict=True)]
    prompt_tokens = sum(usage.prompt_tokens for _, usage in served)
    return {
        "error_tokens": sum(map(abs, off)) / len(off),
        "bias_tokens": sum(off) / len(off),
        "hit_rate_predicted": sum(believed) / prompt_tokens,
        "hit_rate": sum(real) / prompt_tokens,
        "exact_share": sum(abs(error) < 0.5 for error in off) / len(off),
    }


def _texts(traces: Sequence[Path], config: PredictConfig, bar: ProgressBar) -> tuple[list[_Text], int, int]:
    """Return (the requests of all traces that fit, in arrival order; number left out; vocabulary size)."""
    tokenizer = Tokenizer.from_folder(bundled_intent_model_folder())
    most = int(LONGEST_SHARE * config.cache) * BLOCK_SIZE
    found: list[_Text] = []
    num_left_out = 0
    for trace in traces:
        rows = read_trace_path(trace, TraceUnits(time=config.trace_time_unit)).first(config.max_requests)
        if rows.kind != "agent":
            raise ConfigError(f"{trace}: a trace of kind {rows.kind} has no texts; use an agent trace")
        bar.start_stage(f"tokens of {trace.name}", len(rows.requests))
        for index, row in enumerate(rows.requests):
            bar.advance()
            tokens = tokenizer.encode(row.text)
            output = max(row.output, 1)
            if not 0 < len(tokens) + output <= most:
                num_left_out += 1
                continue
            request = Request(f"{trace.name}-{index}", tokens, sampling(output))
            found.append(_Text(row, f"{trace.name}/{row.session}", request))
    if not found:
        raise ConfigError(f"none of {num_left_out} prompts fits half a cache of {config.cache} blocks")
    found.sort(key=lambda text: text.row.at)
    return found, num_left_out, tokenizer.vocab_size


def _calls(texts: Sequence[_Text], config: PredictConfig, exact: bool) -> list[Call]:
    """Return the same requests for the engines and for a router with or without a tokenizer."""
    root = router_root("")
    begins: dict[str, float] = {}
    calls: list[Call] = []
    for text in texts:
        begin = begins.setdefault(text.session, text.row.at)
        if exact:
            prompt = RoutingPrompt(text.request.prompt, root)
        else:
            prompt = RoutingPrompt(text_as_pseudo_tokens(text.row.text.encode()), root, exact=False)
        ask = RoutingRequest(prompt, session=text.session, max_tokens=text.request.sampling.max_tokens)
        calls.append(Call(begin / config.speed + text.row.at - begin, text.session, text.request, ask))
    return calls
