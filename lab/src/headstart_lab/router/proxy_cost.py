"""Experiment: latency that a router adds to the first byte and to every token. Fake replicas, 200 concurrent streams.

Client and replicas are the same for all and stay in their own processes; direct, ours and the peers are measured in
turn. The added latency is a router's percentile minus the direct one of the same turn.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from headstart.core.errors import ConfigError
from headstart.gateway.picker.envoy_process import find_envoy
from headstart.measurement.machine import ContentionLog, ContentionMeter, describe_machine
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable, min_and_max
from headstart_lab.runners.route_process import OURS, Entrant, RouterProcess, parse_peer, running_router
from headstart_lab.runners.stream_load import Plan

TARGET_MS = 2.0  # first byte, median
BUSY = 0.8  # of a core: above this, the measuring process is itself the bottleneck
DIRECT = "direct"
WITH_ENVOY = "ours with Envoy"
ENVOY = "envoy"  # the program's name
ADDED = ("first_byte", "token", "inter_token")
_VERSION = re.compile(r"/(\d+\.\d+\.\d+[^/]*)/")
_LOAD_NAMES = {"first_byte": "first", "token": "later", "inter_token": "gaps"}


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The load: `streams` at a time of `tokens` each, `runs` turns of `seconds`."""

    streams: int = 200
    tokens: int = 50
    token_ms: float = 40.0
    ttft_ms: float = 100.0
    steps: bool = False  # each replica's answers get their tokens all at once, as from an engine's steps
    replicas: int = 1
    prompt_bytes: int = 2048
    seconds: float = 15.0
    runs: int = 5
    policy: str = "cost"  # of our router
    envoy: str = ""  # Envoy's binary, or auto; empty: our router is measured without it only
    target_ms: float | None = TARGET_MS

    @property
    def stream_seconds(self) -> float:
        """Return the duration of one stream."""
        return (self.ttft_ms + (self.tokens - 1) * self.token_ms) / 1e3


QUICK = ProxyConfig(streams=20, tokens=10, token_ms=20.0, ttft_ms=20.0, replicas=2, seconds=1.0, runs=1, target_ms=None)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one side."""

    found: dict[str, Any]  # the client's findings
    router_seconds: float  # CPU, while measuring
    replica_seconds: float
    envoy_seconds: float  # of the router's

    def added(self, name: str, rank: int, direct: "Turn") -> float | None:
        """Return the milliseconds added, compared with no router."""
        key = f"{_LOAD_NAMES[name]}_p{rank}_ms"
        mine, theirs = self.found[key], direct.found[key]
        return None if mine is None or theirs is None else mine - theirs

    def cores(self, seconds: float) -> float:
        """Return the cores that client, replicas and router used."""
        return (self.found["client_cpu_seconds"] + self.router_seconds + self.replica_seconds) / seconds


def run_beside_peers(config: ProxyConfig, peer: Sequence[str] = (), bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure our router and every NAME=ENVIRONMENT of `peer`. Raises ConfigError."""
    return run_proxy(config, [parse_peer(text) for text in peer], bar)


def run_proxy(config: ProxyConfig, peers: Sequence[Entrant] = (), bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure every side `runs` times, in turn. Raises ConfigError if one does not start."""
    log = ContentionLog.empty()
    sides: list[Entrant] = [Entrant(OURS.name, policy=config.policy), *peers]
    if config.envoy:
        sides.insert(1, Entrant(WITH_ENVOY, policy=config.policy, flags=("--envoy", config.envoy)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headstart-proxy-")))
        bar.start_stage("starting replicas and routers", None)
        replicas = [stack.enter_context(fake_replica(config, folder)) for _ in range(config.replicas)]
        urls = [replica.url for replica in replicas]
        routers = [stack.enter_context(running_router(side, urls, folder)) for side in sides]
        bar.start_stage("streaming", config.runs * (len(routers) + 1))
        turns: list[dict[str, Turn]] = []
        for run in range(config.runs):
            order = [None, *routers] if run % 2 == 0 else [*reversed(routers), None]
            found: dict[str, Turn] = {}
            for router in order:
                found[router.name if router else DIRECT] = _turn(config, router, replicas, log)
                bar.advance()
            turns.append(found)
        versions = {router.name: router.version for router in routers}
    return _report(config, turns, versions, log)


class FakeReplica:
    """The process of a fake replica."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.url = url
        self._process = psutil.Process(process.pid)

    def cpu_seconds(self) -> float:
        """Return the CPU time so far."""
        times = self._process.cpu_times()
        return times.user + times.system


@contextmanager
def fake_replica(config: ProxyConfig, folder: Path) -> Generator[FakeReplica]:
    """Start a fake replica for the length of a block. Raises ConfigError if it does not start."""
    words = ["headstart_lab.runners.fake_replica", "--stamps", "--ttft-ms", str(config.ttft_ms)]
    words += ["--token-ms", str(config.token_ms), *(["--steps"] if config.steps else [])]
    log = folder / f"replica-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise ConfigError(f"a fake replica did not start: {log.read_text().strip()[-500:]}")
        yield FakeReplica(process, url)
    finally:
        process.kill()
        process.communicate()


def _turn(
    config: ProxyConfig, router: RouterProcess | None, replicas: Sequence[FakeReplica], log: ContentionLog
) -> Turn:
    """Measure one side. CPU times are read when the client reports the start and the end of measuring."""
    plan = Plan(
        urls=(router.url,) if router else tuple(replica.url for replica in replicas),
        model="fake",
        streams=config.streams,
        tokens=config.tokens,
        stream_seconds=config.stream_seconds,
        warm_up=1.5 * config.stream_seconds,
        seconds=config.seconds,
        prompt_bytes=config.prompt_bytes,
    )
    readers: list[Callable[[], float]] = [
        router.cpu_seconds if router else float,
        lambda: sum(replica.cpu_seconds() for replica in replicas),
        lambda: router.cpu_seconds(ENVOY) if router else 0.0,
    ]
    meter = ContentionMeter()
    meter.start()
    start = [read() for read in readers]
    command = [sys.executable, "-m", "headstart_lab.runners.stream_load", json.dumps(asdict(plan))]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        try:
            marks: list[list[float]] = []
            lines: list[str] = []
            for line in client.stdout:
                marks.append([read() for read in readers])
                lines.append(line.decode())
        except BaseException:
            client.kill()
            raise
    if len(lines) != 3:
        raise ConfigError(f"the client ended with code {client.returncode} and printed {lines}")
    begin, end, last = marks
    log.kept.append(meter.cores_used_by_others(sum(last[:2]) - sum(start[:2])))
    spent = [one - other for one, other in zip(end, begin, strict=True)]
    return Turn(json.loads(lines[-1]), *spent)


def _report(
    config: ProxyConfig, turns: list[dict[str, Turn]], versions: dict[str, str], log: ContentionLog
) -> BenchmarkReport:
    values: dict[str, Any] = {}
    spreads: dict[str, list[float]] = {}
    problems: list[str] = []

    def keep(key: str, found: Sequence[float | None]) -> float | None:
        known = [value for value in found if value is not None]
        values[key] = median(known) if known else None
        if known:
            spreads[key] = min_and_max(known)
        return values[key]

    rows: list[tuple[Any, ...]] = []
    for side in (DIRECT, *versions):
        mine = [turn[side] for turn in turns]
        for name in ADDED:
            for rank in (50, 99):
                if side == DIRECT:
                    key = f"{_LOAD_NAMES[name]}_p{rank}_ms"
                    keep(f"{side}.{name}_p{rank}_ms", [turn.found[key] for turn in mine])
                else:
                    added = [turn[side].added(name, rank, turn[DIRECT]) for turn in turns]
                    keep(f"{side}.added_{name}_p{rank}_ms", added)
        for rank in (50, 99):
            keep(f"{side}.ttft_p{rank}_ms", [turn.found[f"ttft_p{rank}_ms"] for turn in mine])
        if side != DIRECT:
            keep(f"{side}.cpu_s_per_1000_requests", [_per_1000(turn, "requests") for turn in mine])
            keep(f"{side}.cpu_s_per_1000_tokens", [_per_1000(turn, "tokens") for turn in mine])
            if any(turn.envoy_seconds for turn in mine):
                keep(f"{side}.envoy_cpu_s_per_1000_requests", [_envoy_per_1000(turn) for turn in mine])
        keep(f"{side}.requests_per_s", [turn.found["requests"] / config.seconds for turn in mine])
        keep(f"{side}.busy_cores", [turn.cores(config.seconds) for turn in mine])
        values[f"{side}.errors"] = sum(sum(turn.found["errors"].values()) for turn in mine)
        rows.append(_row(side, values))
        problems += _problems(side, config, mine)
    added = values[f"{OURS.name}.added_first_byte_p50_ms"]
    if config.target_ms is not None and added is not None and added > config.target_ms:
        problems.append(
            f"ours adds {added:.2f} ms to the first byte in the median; the maximum is {config.target_ms:g}"
        )
    columns = ("", "1st byte p50", "p99", "token p50", "p99", "gap p99", "CPU s/1000 req", "errors")
    title = f"{config.streams} streams of {config.tokens} tokens, one each {config.token_ms:g} ms; added ms"
    return BenchmarkReport(
        "lab proxy",
        values,
        runs=config.runs,
        spread=spreads,
        setup={
            **asdict(config),
            "envoy": _version_of(config.envoy),
            "router_versions": versions,
            "order": "direct, ours, peers; every other run backwards",
        },
        contention=log.as_dict(),
        sheets=[ReportTable(title, columns, tuple(rows))],
        problems=problems,
    )


def _version_of(envoy: str) -> str:
    """Return the name and version of an Envoy, as `--envoy` names it; empty: there is none."""
    if not envoy:
        return ""
    words = [str(find_envoy(envoy)), "--version"]
    found = _VERSION.search(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    return f"{ENVOY} {found[1]}" if found else ENVOY


def _row(side: str, values: dict[str, Any]) -> tuple[Any, ...]:
    """Return a table row: latency added by a side; for direct, the latency without any router."""
    prefix = f"{side}." if side == DIRECT else f"{side}.added_"
    names = ("first_byte_p50_ms", "first_byte_p99_ms", "token_p50_ms", "token_p99_ms", "inter_token_p99_ms")
    figures = tuple(values[prefix + name] for name in names)
    label = "(direct)" if side == DIRECT else side
    return (label, *figures, values.get(f"{side}.cpu_s_per_1000_requests"), values[f"{side}.errors"])


def _problems(side: str, config: ProxyConfig, turns: Sequence[Turn]) -> list[str]:
    found: list[str] = []
    errors = {why: count for turn in turns for why, count in turn.found["errors"].items()}
    if errors:
        why, count = max(errors.items(), key=lambda item: item[1])
        found.append(f"{side}: {sum(errors.values())} requests failed, most of them ({count}) with: {why}")
    if not all(turn.found["requests"] for turn in turns):
        found.append(f"{side}: no request ended while measuring")
    client = max(turn.found["client_cpu_seconds"] for turn in turns) / config.seconds
    replica = max(turn.replica_seconds for turn in turns) / config.seconds / config.replicas
    for who, share in (("the client", client), ("a replica", replica)):
        if share > BUSY:
            found.append(f"{side}: {who} used {share:.2f} of a core; its own delays are in these figures")
    cores, most = describe_machine()["cores"] or 1, max(turn.cores(config.seconds) for turn in turns)
    if most > BUSY * cores and config.target_ms is not None:
        found.append(f"{side}: {most:.2f} of {cores} cores were busy: these are figures of a saturated machine")
    return found


def _per_1000(turn: Turn, what: str) -> float | None:
    """Return the router's CPU seconds per 1,000 requests or tokens."""
    count = turn.found[what]
    return turn.router_seconds / count * 1e3 if count else None


def _envoy_per_1000(turn: Turn) -> float | None:
    """Return the CPU seconds of the router's Envoy alone per 1,000 requests."""
    count = turn.found["requests"]
    return turn.envoy_seconds / count * 1e3 if count else None
