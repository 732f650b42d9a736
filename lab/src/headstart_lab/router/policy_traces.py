"""Experiment: routing policies in virtual time, on recorded traffic. A real router and simulated engines.

A trace with block ids is served by replicas at `speed` times the recorded rate; agent texts, call by call as
recorded, show the accuracy of predicted cache hits. The simulator (sim/) runs with the profile `serial`: one prefill
after the other, and no output. So this is the world in which a policy sees nothing but queues and hits; `headstart
simulate` has steps that requests share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.policies.policy import Policy
from headstart.router.policies.policy_table import make_policy, policy_names
from headstart.router.router import Router
from headstart.router.routing_request import text_as_pseudo_tokens
from headstart.sim.profile import SERIAL
from headstart.sim.sim_fleet import FleetOptions, VirtualFleet
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_request import SimRequest, requests_from_trace
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.recorded.trace_units import TraceUnits
from headstart.workload.request_record import summarize_records

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
    trace_block_size: int = 0  # tokens per id; 0: recognised
    trace_time_unit: str = ""  # empty: recognised


@dataclass(frozen=True, slots=True)
class _Case:
    """One way to route."""

    label: str
    make: Callable[[], Policy]
    size: float = 1.0  # size of the router's index / true cache size
    at_pick: bool = True
    corrects: bool = True


CASES = (
    *(_Case(name.replace("-", "_"), lambda name=name: make_policy(name)) for name in policy_names()),
    _Case("cost_at_response", lambda: make_policy("cost"), at_pick=False),
    _Case("cost_index_x4", lambda: make_policy("cost"), size=4.0),
    _Case("cost_index_x4_uncorrected", lambda: make_policy("cost"), size=4.0, corrects=False),
)
COLUMNS = ("policy", "hit rate", "TTFT mean ms", "p50", "p90", "p99", "error, tokens", "fewest", "most")


def run_route(trace: Path, config: RouteConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Replay a Mooncake trace (or agent texts) once per policy. Raises ConfigError."""
    requests, block_size = _requests(trace, config)
    longest = max(one.prompt_tokens + one.output_tokens for one in requests)
    if -(-longest // block_size) > config.cache:
        raise ConfigError(f"--cache-blocks {config.cache}: a request of {longest} tokens never fits; use more blocks")
    values: dict[str, Any] = {}
    rows: list[tuple[Any, ...]] = []
    bar.start_stage("policies", len(CASES))
    for case in CASES:
        row = _run(case, requests, block_size, config)
        values |= {f"{case.label}.{key}": value for key, value in row.items()}
        rows.append((case.label, *row.values()))
        bar.advance()
    title = f"{len(requests):,} requests of {trace.name}, {config.replicas} replicas, {config.cache:,} blocks each"
    return BenchmarkReport(
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
            "profile": f"{SERIAL.name}: {SERIAL.source}",
        },
        sheets=[ReportTable(title, COLUMNS, tuple(rows))],
    )


def _run(case: _Case, requests: Sequence[SimRequest], block_size: int, config: RouteConfig) -> dict[str, Any]:
    profile = replace(SERIAL, num_blocks=config.cache, block_size=block_size)
    replicas = [SimReplica(f"r{index}", profile) for index in range(config.replicas)]
    routers: list[Router] = []
    for _ in range(config.routers):
        router = Router(case.make())
        for replica in replicas:
            believed = int(case.size * (config.believed or config.cache))
            shadow = ApproximateIndex(believed, at_pick=case.at_pick, corrects=case.corrects)
            router.add(Endpoint(replica.name, shadow, block_size=block_size))
        routers.append(router)
    fleet = VirtualFleet(replicas, routers, FleetOptions(probe_interval=0.0))
    records = fleet.run(requests)
    summary = summarize_records([one.record for one in records])
    served = [sum(one.replica == replica.name for one in records) for replica in replicas]
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


def _requests(trace: Path, config: RouteConfig) -> tuple[list[SimRequest], int]:
    """Return the requests of a trace with block ids or with texts, one output token each, and its block size."""
    found = read_trace_path(trace, TraceUnits(config.trace_block_size, config.trace_time_unit)).first(
        config.max_requests
    )
    if all(row.hash_ids for row in found.requests):
        return [
            replace(one, output_tokens=1) for one in requests_from_trace(found, speed=config.speed)
        ], found.block_size
    if found.kind != "agent":
        raise ConfigError(f"{trace}: a trace of kind {found.kind} does not record shared prefixes")
    # Agents' clocks differ by days between files: the calls follow one another at a fixed rate.
    prompts = [(text_as_pseudo_tokens(row.text.encode()), row.session) for row in found.requests]
    return [
        SimRequest(index / config.speed, len(prompt), 1, token_ids=prompt, session=session)
        for index, (prompt, session) in enumerate(prompts)
    ], TEXT_BLOCK
