"""Experiment: routing policies in virtual time, on recorded traffic. A real router and simulated engines.

A Mooncake trace (block ids) is served by replicas at `speed` times the recorded rate; agent texts, call by call as
recorded, show the accuracy of predicted cache hits. Nothing is computed, so an hour of a fleet takes seconds, and one
seed gives one result. Effects of HTTP, batching and preemption are not modelled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.bench.experiments.router.virtual_fleet import Arrival, VirtualFleet, VirtualReplica
from headstart.bench.progress_bar import QUIET, Bar
from headstart.bench.report import Report, Sheet
from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.policies.policy import Policy
from headstart.router.policies.policy_table import POLICIES, make_policy
from headstart.router.prefill_model import PrefillModel
from headstart.router.router import Router
from headstart.router.routing_request import Prompt, RoutingRequest, pack_text, router_root
from headstart.workload.request_record import summarize
from headstart.workload.traces import CHAIN_BLOCK, read_trace

PREFILL = PrefillModel(
    0.0, 1e3 / 15_928, 0.0, 0.0
)  # prefill tokens per second on two H100, measured by gateway-api-inference-extension
TEXT_BLOCK = 16


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """`cache` in blocks of 512 tokens per replica; `believed`: cache size in the router's index (0: the true one)."""

    replicas: int = 8
    speed: float = 2.6
    cache: int = 2930
    believed: int = 0
    max_requests: int = 0  # 0: all
    routers: int = 1


@dataclass(frozen=True, slots=True)
class _Case:
    """One way to route."""

    label: str
    make: Callable[[], Policy]
    size: float = 1.0  # size of the router's index / true cache size
    at_pick: bool = True
    corrects: bool = True


CASES = (
    *(_Case(name.replace("-", "_"), lambda name=name: make_policy(name)) for name in POLICIES),
    _Case("cost_at_response", lambda: make_policy("cost"), at_pick=False),
    _Case("cost_index_x4", lambda: make_policy("cost"), size=4.0),
    _Case("cost_index_x4_uncorrected", lambda: make_policy("cost"), size=4.0, corrects=False),
)
COLUMNS = ("policy", "hit rate", "TTFT mean ms", "p50", "p90", "p99", "error, tokens", "fewest", "most")


def run_route(trace: Path, config: RouteConfig, bar: Bar = QUIET) -> Report:
    """Replay a Mooncake trace (or agent texts) once per policy. Raises ConfigError."""
    arrivals, block_size = _arrivals(trace, config)
    longest = max((one.request.prompt.num_tokens + one.output for one in arrivals), default=0)
    if -(-longest // block_size) > config.cache:
        raise ConfigError(f"--cache-blocks {config.cache}: a request of {longest} tokens never fits; use more blocks")
    values: dict[str, Any] = {}
    rows: list[tuple[Any, ...]] = []
    bar.stage("policies", len(CASES))
    for case in CASES:
        row = _run(case, arrivals, block_size, config)
        values |= {f"{case.label}.{key}": value for key, value in row.items()}
        rows.append((case.label, *row.values()))
        bar.advance()
    title = f"{len(arrivals):,} requests of {trace.name}, {config.replicas} replicas, {config.cache:,} blocks each"
    return Report(
        "lab route",
        values,
        threads=1,
        setup={
            "trace": trace.name,
            "replicas": config.replicas,
            "routers": config.routers,
            "speed": config.speed,
            "cache_blocks": config.cache,
            "block_size": block_size,
            "prefill_tokens_per_second": 1e3 / PREFILL.token,
        },
        sheets=[Sheet(title, COLUMNS, tuple(rows))],
    )


def _run(case: _Case, arrivals: Sequence[Arrival], block_size: int, config: RouteConfig) -> dict[str, Any]:
    names = [f"r{index}" for index in range(config.replicas)]
    routers: list[Router] = []
    for _ in range(config.routers):
        router = Router(case.make())
        for name in names:
            believed = int(case.size * (config.believed or config.cache))
            shadow = ApproximateIndex(believed, at_pick=case.at_pick, corrects=case.corrects)
            router.add(Endpoint(name, shadow, block_size=block_size))
        routers.append(router)
    fleet = VirtualFleet([VirtualReplica(name, config.cache, block_size, PREFILL, 0.0) for name in names])
    summary = summarize(fleet.run(arrivals, routers))
    served = [replica.num_served for replica in fleet.replicas.values()]
    assert summary.ttft is not None, "nothing was served"
    return {
        "hit_rate": summary.cached_share,
        "ttft_mean_ms": 1e3 * summary.ttft.mean,
        "ttft_p50_ms": 1e3 * summary.ttft.p50,
        "ttft_p90_ms": 1e3 * summary.ttft.p90,
        "ttft_p99_ms": 1e3 * summary.ttft.p99,
        "prediction_error_tokens": sum(r.prediction_error for r in routers) / sum(r.num_reported for r in routers),
        "fewest_requests": min(served),
        "most_requests": max(served),
    }


def _arrivals(trace: Path, config: RouteConfig) -> tuple[list[Arrival], int]:
    """Return the requests of a trace with block ids or with texts, and its block size."""
    try:
        with trace.open(encoding="utf-8") as lines:
            found = read_trace(lines).first(config.max_requests)
    except OSError as error:
        raise ConfigError(f"{trace}: {error}") from error
    if found.kind == "mooncake":
        asks = [_ask(row.hash_ids, row.length, row.output) for row in found.requests]
        pairs = zip(found.requests, asks, strict=True)
        return [Arrival(row.at / config.speed, ask, row.output) for row, ask in pairs], CHAIN_BLOCK
    if found.kind != "agent":
        raise ConfigError(f"{trace}: a trace of kind {found.kind} does not record shared prefixes")
    root = router_root("")
    asks = [RoutingRequest(Prompt(pack_text(row.text.encode()), root), session=row.session) for row in found.requests]
    # Agents' clocks differ by days between files: the calls follow one another at a fixed rate.
    return [Arrival(index / config.speed, ask, 1) for index, ask in enumerate(asks)], TEXT_BLOCK


def _ask(block_ids: tuple[int, ...], prompt_tokens: int, output_tokens: int) -> RoutingRequest:
    full = block_ids[: prompt_tokens // CHAIN_BLOCK]
    block_hashes = [BlockHash(number.to_bytes(32, "big")) for number in full]
    return RoutingRequest(Prompt.of_block_hashes(block_hashes, prompt_tokens, CHAIN_BLOCK), max_tokens=output_tokens)
