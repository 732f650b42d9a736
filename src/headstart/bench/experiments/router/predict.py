"""Lab: what a router believes to be cached against what engines report, on recorded agents' texts.

Real engines that compute nothing (engine_fleet.py), a real router with the policy `cost`, real tokenization. Each form
is one thing that a router may know or not know of a cache, and runs twice: with self-correction from `cached_tokens`
and without it. Deterministic; time is virtual. Sessions were recorded one after another; here they begin `speed` times
as often and keep their own pace, so that many are alive at once and together exceed the caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.bench.experiments.router.engine_fleet import (
    Call,
    EngineFleet,
    EngineReplica,
    Served,
    make_engine,
    sampling,
)
from headstart.bench.progress_bar import QUIET, Bar
from headstart.bench.report import Report, Sheet
from headstart.bench.runners.virtual_time import StepCost
from headstart.bundled import bundled_model
from headstart.core.errors import ConfigError
from headstart.core.request import Request
from headstart.core.sched.limits import Limits
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.policies.policy_table import make_policy
from headstart.router.router import Router
from headstart.router.routing_request import Prompt, RoutingRequest, pack_text, router_root
from headstart.workload.traces import TracedRequest, read_trace

BLOCK_SIZE = 16
COST = StepCost(1e-3, 2e-5)
LONGEST_SHARE = 0.5  # of a pool: longer calls are left out
KNOWN_TOKENS = 16.0  # mean error that may remain where all is known: a block


@dataclass(frozen=True, slots=True)
class PredictConfig:
    """`cache` in blocks per replica. Sessions begin `speed` times as often as recorded, and think as long."""

    replicas: int = 4
    cache: int = 2048
    speed: float = 20.0
    max_requests: int = 0  # of each trace; 0: all


QUICK = PredictConfig(replicas=2, cache=1024, max_requests=60)


@dataclass(frozen=True, slots=True)
class Form:
    """What is so, and what the router believes."""

    label: str
    policy: str = "2q"  # how the engines evict
    believed_policy: str = "2q"
    size: float = 1.0  # of the cache, as believed; 0: not known
    exact: bool = True  # the router has the tokenizer; else it has bytes
    told: bool = True  # the tokens of answers
    flush: bool = False  # of all replicas, one after the other, from the middle on
    wrong: bool = False  # the belief is wrong in what correction learns, size or flush: it must help


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


def run_predict(traces: Sequence[Path], config: PredictConfig | None = None, bar: Bar = QUIET) -> Report:
    """Serves the traces together once per form, with correction and without. Raises ConfigError."""
    config = config or PredictConfig()
    texts, num_left_out, vocab_size = _texts(traces, config, bar)
    values: dict[str, Any] = {"requests": len(texts), "left_out": num_left_out}
    problems: list[str] = []
    rows: list[tuple[Any, ...]] = []
    calls = {exact: _calls(texts, config, exact) for exact in (True, False)}
    bar.stage("forms", 2 * len(FORMS))
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
        problems.append("correction does not lessen the error where the belief is wrong")
    title = (
        f"{len(texts):,} requests, {config.replicas} engines of {config.cache:,} blocks; mean error of cached_tokens"
    )
    return Report(
        "lab predict",
        values,
        model="bundled tokenizer",
        seed=0,
        runs=1,
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
        sheets=[Sheet(title, COLUMNS, tuple(rows))],
        problems=problems,
    )


def problems_of(form: Form, with_: dict[str, float], without: dict[str, float]) -> list[str]:
    """Why a form's figures are not what they must be."""
    error, uncorrected = with_["error_tokens"], without["error_tokens"]
    if form.wrong and error > uncorrected:
        return [f"{form.label}: mean error {error:.1f} tokens with correction, {uncorrected:.1f} without"]
    if form.label.startswith("known") and error > KNOWN_TOKENS:
        return [f"{form.label}: mean error {error:.1f} tokens although all is known; {KNOWN_TOKENS:.0f} is the most"]
    return []


def _run(form: Form, calls: Sequence[Call], config: PredictConfig, vocab_size: int, corrects: bool) -> dict[str, float]:
    """One form: how far predictions are off."""
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
    """Of what was predicted and reported, in the engines' tokens."""
    believed: list[float] = []
    for pick, usage in served:
        believed.append(pick.candidate.hit_tokens * usage.prompt_tokens / max(pick.view.prompt_tokens, 1))
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


def _texts(traces: Sequence[Path], config: PredictConfig, bar: Bar) -> tuple[list[_Text], int, int]:
    """The requests of all traces that fit, in the order in which they are due; how many do not; the vocabulary."""
    tokenizer = Tokenizer.from_folder(bundled_model())
    most = int(LONGEST_SHARE * config.cache) * BLOCK_SIZE
    found: list[_Text] = []
    num_left_out = 0
    for trace in traces:
        try:
            with trace.open(encoding="utf-8") as lines:
                rows = read_trace(lines).first(config.max_requests)
        except OSError as error:
            raise ConfigError(f"{trace}: {error}") from error
        if rows.kind != "agent":
            raise ConfigError(f"{trace}: a trace of kind {rows.kind} has no texts; give an agent trace")
        bar.stage(f"tokens of {trace.name}", len(rows.requests))
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
    """The same requests as engines and a router with or without a tokenizer see them."""
    root = router_root("")
    begins: dict[str, float] = {}
    calls: list[Call] = []
    for text in texts:
        begin = begins.setdefault(text.session, text.row.at)
        if exact:
            prompt = Prompt(text.request.prompt, root)
        else:
            prompt = Prompt(pack_text(text.row.text.encode()), root, exact=False)
        ask = RoutingRequest(prompt, session=text.session, max_tokens=text.request.sampling.max_tokens)
        calls.append(Call(begin / config.speed + text.row.at - begin, text.session, text.request, ask))
    return calls
