"""Experiment: cost of a routing decision. One thread, no sockets; the indexes are full before timing starts.

Microseconds of CPU time of the one thread. `pick` decides, given the block hashes; `sent` records the request and adds
its blocks to the index, with evictions; a whole request also hashes its blocks and finishes.
"""

import gc
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import thread_time
from typing import Any, TypeVar

from headstart.core.cache.hashing import BlockHash
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.model.kernels.block_hashes import load_compiled_hash_chain
from headstart.model.kernels.compiled_pool import compiled_pool_factory
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.modelled_pool import ModelledPool
from headstart.router.policies.policy_table import make_policy, policy_names
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import RoutingPrompt, RoutingRequest, router_root
from headstart.workload.request_record import percentile
from headstart.workload.synthetic import random_tokens

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
P99_US = 1000.0  # of a decision on the long prompt
RATE = 2000.0  # requests per second with the short prompt
PARTS = ("hash", "pick", "sent", "first token", "end")  # of a request's time in the router
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PickConfig:
    """Sizes: replicas, blocks per replica, tokens of the long and the short prompt, decisions timed."""

    replicas: int = 16
    blocks: int = 62_500
    long_prompt: int = 32_768
    short_prompt: int = 2_048
    decisions: int = 1000
    unique: int = 100_000  # prompts that are not repeated, of one block each
    compiled: bool = True  # indexes and block hashes, where there is a compiler; False: in Python


QUICK = PickConfig(replicas=4, blocks=2048, long_prompt=4096, decisions=50, unique=20_000)


def run_pick(seed: int, config: PickConfig = PickConfig(), bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure decisions over full indexes, the rate of whole requests, and an index under unrepeated prompts."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    rows: list[tuple[Any, ...]] = []
    bar.start_stage("filling the index", config.replicas)
    rng = Random(seed)
    router, long_prompts, index_bytes = full_router(config, rng, bar)
    gc.collect()
    gc.freeze()  # excludes garbage collection of a million index entries from the timing
    bar.start_stage("decisions", len(policy_names()))
    for name in policy_names():
        router.policy = make_policy(name)
        times = decision_times(router, long_prompts, config, rng)
        key = f"{name.replace('-', '_')}_pick"
        values[f"{key}_p50_us"], values[f"{key}_p99_us"] = percentile(times, 50), percentile(times, 99)
        rows.append((f"pick, {name}", values[f"{key}_p50_us"], values[f"{key}_p99_us"]))
        bar.advance()
    router.policy = make_policy("cost")
    cold = _sent(router, config, rng)
    values["sent_cold_p50_us"], values["sent_cold_p99_us"] = percentile(cold, 50), percentile(cold, 99)
    rows.append(("sent, all blocks new", values["sent_cold_p50_us"], values["sent_cold_p99_us"]))
    values["requests_per_second"] = _whole(router, config, rng)
    bar.start_stage("unique prompts", config.unique)
    before = sum(len(index_of(endpoint)) for endpoint in router.endpoints.values())
    _unique(router, config, rng, bar)
    after = sum(len(index_of(endpoint)) for endpoint in router.endpoints.values())
    values |= {"blocks_before": before, "blocks_after": after, "bytes_per_block": index_bytes / max(before, 1)}
    if after > config.replicas * config.blocks:
        problems.append(f"{after:,} blocks in an index of {config.replicas * config.blocks:,}")
    if config.replicas == PickConfig().replicas:
        if values["cost_pick_p99_us"] > P99_US:
            problems.append(f"a decision takes {values['cost_pick_p99_us']:.0f} us at p99; the maximum is {P99_US:.0f}")
        if values["requests_per_second"] < RATE:
            problems.append(f"{values['requests_per_second']:.0f} requests per second; the minimum is {RATE:.0f}")
    title = f"{config.long_prompt:,} tokens, {config.replicas} replicas, {before:,} blocks; microseconds"
    return BenchmarkReport(
        "lab pick",
        values,
        seed=seed,
        runs=config.decisions,
        threads=1,
        setup={
            "replicas": config.replicas,
            "blocks_per_replica": config.blocks,
            "block_size": BLOCK_SIZE,
            "long_prompt_tokens": config.long_prompt,
            "short_prompt_tokens": config.short_prompt,
            "unique_prompts": config.unique,
            "switch_interval": sys.getswitchinterval(),
        },
        sheets=[ReportTable(title, ("what", "p50", "p99"), tuple(rows))],
        problems=problems,
    )


def full_router(config: PickConfig, rng: Random, bar: ProgressBar = QUIET) -> tuple[Router, list[list[BlockHash]], int]:
    """Return a router with full approximate indexes, chains cached on half of the replicas, and the index bytes."""
    pools = compiled_pool_factory() if config.compiled else None
    router = Router() if pools is None else Router(match_all=pools.match_in_all_pools, prices=pools.pricing_kernel)
    length = config.long_prompt // BLOCK_SIZE
    gc.collect()
    size = _resident_bytes()
    shared = [_chain(length, rng) for _ in range(4)]
    for index in range(config.replicas):
        cached = ApproximateIndex(config.blocks, make_pool=pools or ModelledPool)
        router.add(Endpoint(f"http://replica-{index}:8000", cached, block_size=BLOCK_SIZE))
        for _ in range(config.blocks // length + 1):
            _take(cached, _chain(length, rng))
        for number, chain in enumerate(shared):
            if (index + number) % 2:
                _take(cached, chain)
        bar.advance()
    return router, shared, _resident_bytes() - size


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def times_of_requests(router: Router, config: PickConfig, share: float, rng: Random) -> dict[str, list[float]]:
    """Return the milliseconds of each part of requests with the long prompt, of which `share` was sent before."""
    root, chain = router_root("m"), load_compiled_hash_chain() if config.compiled else None
    prefix = random_tokens(int(share * config.long_prompt), VOCAB_SIZE, rng)
    times: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(part: str, act: Callable[[], T]) -> T:
        start = thread_time()
        result = act()
        times[part].append((thread_time() - start) * 1e3)
        return result

    for number in range(config.decisions + 1):
        tokens = array("i", prefix + random_tokens(config.long_prompt - len(prefix), VOCAB_SIZE, rng))
        request, now = RoutingRequest(RoutingPrompt(tokens, root, chain=chain)), 1e6 + number
        timed("hash", lambda request=request: request.prompt.block_hashes(BLOCK_SIZE))
        decision = timed("pick", lambda request=request, now=now: router.pick(request, now))
        sent = timed("sent", lambda decision=decision, now=now: router.record_sent(decision, now))
        timed("first token", lambda sent=sent, now=now: router.record_first_token(sent, now + 0.1))
        timed("end", lambda sent=sent, now=now: router.record_finished(sent, now + 0.2))
    return {part: values[1:] for part, values in times.items()}  # the first one has none of its prefix cached


def decision_times(router: Router, shared: list[list[BlockHash]], config: PickConfig, rng: Random) -> list[float]:
    """Return the microseconds of each decision: prompts are cached, new from the middle on, or completely new.

    Between decisions the request is sent, an older one is answered and another ends, as in service: nothing is as the
    last decision left it.
    """
    times: list[float] = []
    in_flight: deque[RoutedInFlight] = deque()
    for number in range(config.decisions):
        chain = shared[number % len(shared)]
        keep = rng.choice((0, len(chain) // 2, len(chain)))
        block_hashes = chain[:keep] + _chain(len(chain) - keep, rng)
        request = RoutingRequest(RoutingPrompt.from_block_hashes(block_hashes, config.long_prompt, BLOCK_SIZE))
        start = thread_time()
        decision = router.pick(request, float(number))
        times.append((thread_time() - start) * 1e6)
        in_flight.append(router.record_sent(decision, float(number)))
        if len(in_flight) > config.replicas:
            router.record_first_token(in_flight[-1 - config.replicas], float(number))
        if len(in_flight) > 2 * config.replicas:
            router.record_finished(in_flight.popleft(), float(number))
    for one in in_flight:
        router.record_failed(one, float(config.decisions), blame=False)
    return times


def _sent(router: Router, config: PickConfig, rng: Random) -> list[float]:
    """Return the microseconds to add a new long prompt to the index."""
    times: list[float] = []
    for number in range(max(config.decisions // 10, 10)):
        block_hashes = _chain(config.long_prompt // BLOCK_SIZE, rng)
        decision = router.pick(
            RoutingRequest(RoutingPrompt.from_block_hashes(block_hashes, config.long_prompt, BLOCK_SIZE)), float(number)
        )
        start = thread_time()
        decision = router.record_sent(decision, float(number))
        times.append((thread_time() - start) * 1e6)
        router.record_first_token(decision, number + 0.5)
        router.record_finished(decision, number + 0.5)
    return times


def _whole(router: Router, config: PickConfig, rng: Random) -> float:
    """Return the requests per second from token ids to the end of the answer; half of each prompt is cached."""
    root = router_root("m")
    prefix = random_tokens(config.short_prompt // 2, VOCAB_SIZE, rng)
    prompts = [prefix + random_tokens(config.short_prompt // 2, VOCAB_SIZE, rng) for _ in range(config.decisions)]
    start = thread_time()
    for number, tokens in enumerate(prompts):
        decision = router.pick(RoutingRequest(RoutingPrompt(tokens, root)), 1e6 + number)
        decision = router.record_sent(decision, 1e6 + number)
        router.record_first_token(decision, 1e6 + number + 0.1)
        router.record_finished(decision, 1e6 + number + 0.2)
    return config.decisions / (thread_time() - start)


def _unique(router: Router, config: PickConfig, rng: Random, bar: ProgressBar) -> None:
    for number in range(config.unique):
        decision = router.pick(
            RoutingRequest(RoutingPrompt.from_block_hashes(_chain(1, rng), BLOCK_SIZE, BLOCK_SIZE)), 2e6 + number
        )
        decision = router.record_sent(decision, 2e6 + number)
        router.record_finished(decision, 2e6 + number + 0.1)
        bar.advance()


def _take(index: ApproximateIndex, block_hashes: list[BlockHash]) -> None:
    reservation = index.record_sent(block_hashes)
    index.record_finished(reservation, block_hashes)


def _chain(length: int, rng: Random) -> list[BlockHash]:
    return [BlockHash(rng.randbytes(32)) for _ in range(length)]


def index_of(endpoint: Endpoint) -> ApproximateIndex:
    assert isinstance(endpoint.index, ApproximateIndex)
    return endpoint.index
