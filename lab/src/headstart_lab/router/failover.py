"""Experiment: replicas killed and restarted under load, and the effect on clients.

Replicas and router are processes started as in production; the client sends every request once. Streams of a killed
replica must end with a typed error; all other requests must be answered by another replica. A rolling restart must not
fail any request.
"""

import asyncio
import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart_lab.router.failover_load import Load, Outcome
from headstart_lab.router.failover_processes import (
    Served,
    fleet_of,
    null_command,
    quiet_ports,
    replica_command,
    router_command,
    takes_requests,
)

WAIT_SECONDS = 1800.0
POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """Sizes. `model` None: replicas without a model."""

    model: str | None = ""  # empty: the bundled one
    label: str = ""
    replicas: int = 3
    kills: int = 8
    workers: int = 12  # requests in flight while replicas are killed
    requests: int = 2000  # during the rolling restart, or more if that takes longer
    load: float = 0.7  # share of the measured capacity
    capacity_requests: int = 300
    output_tokens: int = 16
    seed: int = 0
    envoy: str = ""  # Envoy's binary, or auto; empty: the router's own proxy


QUICK = FailoverConfig(model=None, replicas=2, kills=2, workers=6, requests=100, capacity_requests=60)


@dataclass(slots=True)
class _Found:
    """The results; times in seconds."""

    killed: list[Outcome] = field(default_factory=list[Outcome])
    kills: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])  # URL, start, end
    capacity: float = 0.0  # requests per second
    rolled: list[Outcome] = field(default_factory=list[Outcome])
    restarts: list[float] = field(default_factory=list[float])  # from SIGTERM until the router sends requests again


def run_failover(config: FailoverConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Start everything once; run the kills first, then the restarts."""
    found = _Found()
    with TemporaryDirectory(prefix="headstart-failover-") as scratch:
        folder = Path(scratch)
        with _fleet(config, folder, bar) as (replicas, router):
            asyncio.run(_measure(config, replicas, router, found, bar))
        decisions = [json.loads(line) for line in (folder / "decisions").read_text().splitlines()]
    report = _report(config, found, eject_seconds(decisions, found.kills))
    if unknown := {url for url, _, _ in found.kills} - {line["endpoint"] for line in decisions}:
        report.problems.append(f"the decision log has no entries for {', '.join(sorted(unknown))}")
    return report


def eject_seconds(decisions: Sequence[dict[str, Any]], kills: Sequence[tuple[str, float, float]]) -> list[float]:
    """Return for each kill the seconds until the last request was sent to the killed replica; 0.0: none was.

    A kill is (URL, start, time when the replica was ready again).
    """
    found: list[float] = []
    for url, start, end in kills:
        sent = [line["at"] - start for line in decisions if line["endpoint"] == url and start < line["at"] < end]
        found.append(max(sent, default=0.0))
    return found


@contextmanager
def _fleet(config: FailoverConfig, folder: Path, bar: ProgressBar) -> Generator[tuple[list[Served], Served]]:
    """Yield ready replicas and a router that sends requests to all of them; all are killed at the end."""
    *ports, router_port = quiet_ports(config.replicas + 1)
    bar.start_stage(f"starting {config.replicas} replicas and a router", None)
    with ExitStack() as stack:
        replicas: list[Served] = []
        for number, port in enumerate(ports):
            command = null_command(port) if config.model is None else replica_command(config.model, port, 1)
            replicas.append(Served(f"r{number}", command, folder))
            stack.callback(replicas[-1].kill)
            replicas[-1].start()
        for replica in replicas:
            replica.wait_ready()
        command = router_command([replica.url for replica in replicas], router_port, folder / "decisions", config.envoy)
        router = Served("router", command, folder)
        stack.callback(router.kill)
        router.start()
        router.wait_ready()
        yield replicas, router
        router.terminate()  # SIGTERM, so that it writes the last decisions
        deadline = time.monotonic() + WAIT_SECONDS
        while router.exit_code is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


async def _measure(
    config: FailoverConfig, replicas: Sequence[Served], router: Served, found: _Found, bar: ProgressBar
) -> None:
    rng = Random(config.seed)
    for replica in replicas:
        await _until(lambda replica=replica: _is_served(router, replica))
    await _kills(config, replicas, router, rng, found, bar)
    bar.start_stage("capacity", None)
    found.capacity = await _capacity(config, router, rng)
    await _rolling(config, replicas, router, rng, found, bar)


async def _kills(
    config: FailoverConfig, replicas: Sequence[Served], router: Served, rng: Random, found: _Found, bar: ProgressBar
) -> None:
    load, over = Load(router.url, rng, config.output_tokens), False
    working = asyncio.create_task(load.closed(config.workers, lambda: not over))
    bar.start_stage("kills under load", config.kills)
    try:
        for number in range(config.kills):
            victim = replicas[number % len(replicas)]
            await _until(lambda victim=victim: _is_busy(router, victim))
            start = time.monotonic()
            await asyncio.to_thread(victim.kill)
            await _until(lambda victim=victim: not _is_served(router, victim))
            victim.start()
            await _until(victim.ready)
            found.kills.append((victim.url, start, time.monotonic()))
            await _until(lambda victim=victim: _is_served(router, victim))
            bar.advance()
    finally:
        over = True
        await working
    found.killed = load.outcomes


async def _capacity(config: FailoverConfig, router: Served, rng: Random) -> float:
    """Return the requests per second with four requests per replica in flight at any time."""
    load = Load(router.url, rng, config.output_tokens)
    start = time.monotonic()
    await load.closed(4 * config.replicas, lambda: load.num_sent < config.capacity_requests)
    return len(load.outcomes) / (time.monotonic() - start)


async def _rolling(
    config: FailoverConfig, replicas: Sequence[Served], router: Served, rng: Random, found: _Found, bar: ProgressBar
) -> None:
    load, is_rolled = Load(router.url, rng, config.output_tokens), False
    rate = config.load * found.capacity
    bar.start_stage(f"rolling restart at {rate:.1f} requests per second", len(replicas))
    working = asyncio.create_task(load.open(rate, lambda: load.num_sent < config.requests or not is_rolled))
    try:
        await _until(lambda: len(load.outcomes) >= config.requests // 20)
        for replica in replicas:
            start = time.monotonic()
            replica.terminate()
            await _until(lambda replica=replica: replica.exit_code is not None)
            replica.start()
            await _until(replica.ready)
            await _until(lambda replica=replica: _is_served(router, replica))
            found.restarts.append(time.monotonic() - start)
            bar.advance()
    finally:
        is_rolled = True
        await working
    found.rolled = load.outcomes


def _is_served(router: Served, replica: Served) -> bool:
    return takes_requests(fleet_of(router.url).get(replica.url))


def _is_busy(router: Served, replica: Served) -> bool:
    entry = fleet_of(router.url).get(replica.url)
    return entry is not None and takes_requests(entry) and entry["streams"] > 0


async def _until(probe: Callable[[], bool]) -> None:
    """Wait until the condition holds. Raises TimeoutError after WAIT_SECONDS."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await asyncio.to_thread(probe):
            await asyncio.sleep(POLL_SECONDS)


def _report(config: FailoverConfig, found: _Found, ejections: Sequence[float]) -> BenchmarkReport:
    killed, rolled = found.killed, found.rolled
    broken = [one for one in killed if one.started and not one.ended]
    values = {
        "kill.rounds": len(found.kills),
        "kill.requests": len(killed),
        "kill.lost": sum(one.is_lost for one in killed),
        "kill.started": len(broken),
        "kill.typed_errors": sum(one.typed for one in broken),
        "kill.eject_seconds_max": max(ejections, default=None),
        "rolling.requests": len(rolled),
        "rolling.lost": sum(not one.ended for one in rolled),
        "rolling.non_2xx": sum(one.status is not None and not 200 <= one.status < 300 for one in rolled),
        "rolling.capacity_per_second": found.capacity,
        "rolling.rate_per_second": config.load * found.capacity,
        "rolling.restart_seconds_max": max(found.restarts, default=None),
    }
    return BenchmarkReport(
        "lab failover",
        values,
        model=config.label or "none",
        seed=config.seed,
        threads=1,
        setup={
            "replicas": config.replicas,
            "workers": config.workers,
            "load": config.load,
            "envoy": bool(config.envoy),
            "output_tokens": config.output_tokens,
            "eject_seconds": list(ejections),
            "restart_seconds": found.restarts,
        },
        sheets=[
            ReportTable(
                f"{config.replicas} replicas of {config.label or 'no model'}, no client retries",
                ("what", "times", "requests", "lost", "cut off", "typed error", "non-2xx"),
                (
                    _row("kill -9", len(found.kills), killed),
                    _row(f"restart, {config.load:.0%} load", len(found.restarts), rolled),
                ),
            ),
            ReportTable(
                "time to ejection",
                ("", "s"),
                (("last request sent to a killed replica", max(ejections, default=None)),),
            ),
        ],
        problems=_problems(found, has_typed_errors=not config.envoy),
    )


def _row(label: str, times: int, outcomes: Sequence[Outcome]) -> tuple[Any, ...]:
    broken = [one for one in outcomes if one.started and not one.ended]
    refused = sum(one.status is not None and one.status >= 300 for one in outcomes)
    typed = sum(one.typed for one in broken)
    return label, times, len(outcomes), sum(one.is_lost for one in outcomes), len(broken), typed, refused


def _problems(found: _Found, *, has_typed_errors: bool) -> list[str]:
    problems: list[str] = []
    lost = [one for one in found.killed if one.is_lost]
    if lost:
        problems.append(f"kill: {len(lost)} requests were lost, the first with: {lost[0].status} {lost[0].error}")
    untyped = [one for one in found.killed if one.started and not one.ended and not one.typed]
    if untyped and has_typed_errors:  # Envoy cuts the connection
        problems.append(f"kill: {len(untyped)} streams ended without a typed error, the first with: {untyped[0].error}")
    failed = [one for one in found.rolled if not one.ended]
    if failed:
        problems.append(f"rolling: {len(failed)} requests failed, the first with: {failed[0].status} {failed[0].error}")
    return problems
