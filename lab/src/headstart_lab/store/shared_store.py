"""Experiment: two servers on one folder. Measures how much of A's KV B loads, the delay, and tenant isolation.

Both are real `headstart serve` processes of one model. All requests are sent one after the other; B gets a prompt only
after A has answered it, so that cached tokens at B can only come from the folder.
"""

import time
from array import array
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from headstart.measurement.machine import ContentionLog
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup
from headstart.workload.request_record import median
from headstart.workload.synthetic import random_tokens
from headstart_lab.runners.served_replica import Answer, Launch, Replica, ask_in_turn, differing, problems, replica

BLOCK_SIZE = 16
SMALLEST_VOCABULARY = 512  # every model has these tokens
OWNER, OTHER = KEYS = ("key-of-the-owner", "key-of-another")
COLUMNS = ("what is sent", "prompts", "B computed, share", "TTFT at A, ms", "at B, ms")


@dataclass(frozen=True, slots=True)
class SiblingsConfig:
    """Sizes; delays in seconds between A's answer and the same prompt at B."""

    prompts: int = 64
    tokens: int = 1024  # of each
    runs: int = 3
    settle: float = 1.0  # between the last prompt to A and the first to B
    delays: tuple[float, ...] = (0.0, 0.1, 0.5)
    prompts_per_delay: int = 16
    tenant_prompts: int = 8
    folder: Path | None = None  # where the store is made; None: the temporary folder


QUICK = SiblingsConfig(prompts=4, tokens=256, runs=1, delays=(0.0, 0.5), prompts_per_delay=2, tenant_prompts=2)


@dataclass(slots=True)
class _Pair:
    """The same prompts at A and then at B."""

    at_a: list[Answer] = field(default_factory=list[Answer])
    at_b: list[Answer] = field(default_factory=list[Answer])

    @property
    def computed_share(self) -> float:
        """Return the computed share of B's prompt tokens."""
        return sum(answer.computed_tokens for answer in self.at_b) / sum(answer.prompt_tokens for answer in self.at_b)


@dataclass(slots=True)
class _Tenants:
    """Tokens that B loaded of prompts that A computed for the owner."""

    by_other: int = 0  # requested with another tenant's key: must be 0
    by_owner: int = 0  # requested with the owner's key: must not be 0, otherwise `by_other` proves nothing


@dataclass(slots=True)
class _Found:
    """The results of all runs, with their problems."""

    settled: list[_Pair] = field(default_factory=list[_Pair])
    delayed: dict[float, list[_Pair]] = field(default_factory=dict[float, list[_Pair]])
    tenants: _Tenants = field(default_factory=_Tenants)
    problems: list[str] = field(default_factory=list[str])


def run_siblings(setup: EngineSetup, config: SiblingsConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Start both servers once and repeat everything `runs` times with new prompts."""
    log = ContentionLog.empty()
    with TemporaryDirectory(prefix="headstart-lab-", dir=config.folder) as scratch, ExitStack() as stack:
        launch = _launch(setup, config, Path(scratch))
        bar.start_stage("starting A and B", None)
        a, b = (stack.enter_context(replica(launch, launch.folder / "store")) for _ in range(2))
        lab = _Lab(a, b, config, Random(setup.seed), bar, log)
        found = lab.measure()
    return _report(setup, config, found, a.dtype, log)


def _launch(setup: EngineSetup, config: SiblingsConfig, scratch: Path) -> Launch:
    """Return the launch settings of servers with two tenants each and a pool for the prompts of one phase."""
    blocks = (config.prompts + 4) * (-(-config.tokens // BLOCK_SIZE) + 1) + 64
    flags = ("--num-blocks", str(blocks), "--threads", str(setup.threads), "--dtype", setup.dtype)
    return Launch(setup.model, scratch, flags, KEYS)


@dataclass(frozen=True, slots=True)
class _Lab:
    """Two servers and the requests sent to them."""

    a: Replica
    b: Replica
    config: SiblingsConfig
    rng: Random
    bar: ProgressBar
    log: ContentionLog

    def measure(self) -> _Found:
        found = _Found(delayed={delay: [] for delay in self.config.delays})
        for server in (self.a, self.b):
            ask_in_turn(server, self._prompts(2), key=OWNER)  # includes one-time costs of a process
        for number in range(self.config.runs):
            label = f"run {number + 1} of {self.config.runs}"
            with self._counted(found, label):
                found.settled.append(self._settled(label))
                for delay in self.config.delays:
                    found.delayed[delay].append(self._delayed(delay, label))
            self._tenants(found, label)
        return found

    def _settled(self, label: str) -> _Pair:
        """Send all prompts to A, wait, send all prompts to B."""
        prompts = self._prompts(self.config.prompts)
        at_a = self._ask(self.a, prompts, f"{label}: to A")
        time.sleep(self.config.settle)
        return _Pair(at_a, self._ask(self.b, prompts, f"{label}: to B"))

    def _delayed(self, delay: float, label: str) -> _Pair:
        """Send each prompt to A and, `delay` seconds after its answer, to B."""
        pair = _Pair()
        self.bar.start_stage(f"{label}: to B {delay} s after A", self.config.prompts_per_delay)
        for prompt in self._prompts(self.config.prompts_per_delay):
            pair.at_a.append(self.a.ask(prompt, key=OWNER))
            time.sleep(delay)
            pair.at_b.append(self.b.ask(prompt, key=OWNER))
            self.bar.advance()
        return pair

    def _tenants(self, found: _Found, label: str) -> None:
        """Send the owner's prompts to A, then to B with another tenant's key, then to B with the owner's."""
        prompts = self._prompts(self.config.tenant_prompts)
        asked = [self._ask(self.a, prompts, f"{label}: the owner's to A")]
        time.sleep(self.config.settle)
        before = self.b.prompt_tokens(key=OWNER)
        asked.append(self._ask(self.b, prompts, f"{label}: the same to B, by another tenant", OTHER))
        loaded = (self.b.prompt_tokens(key=OWNER) - before)["store"]
        asked.append(self._ask(self.b, prompts, f"{label}: the same to B, by the owner"))
        found.tenants.by_other += max(loaded, sum(answer.cached_tokens for answer in asked[1]))
        found.tenants.by_owner += sum(answer.cached_tokens for answer in asked[2])
        found.problems += problems(f"{label}, tenants", [answer for answers in asked for answer in answers])

    @contextmanager
    def _counted(self, found: _Found, label: str) -> Generator[None]:
        """Compare B's own counters over the block with the usage in its answers."""
        before, pairs = self.b.prompt_tokens(key=OWNER), len(found.settled)
        yield
        counted = (self.b.prompt_tokens(key=OWNER) - before)["computed"]
        new = [*found.settled[pairs:], *(runs[-1] for runs in found.delayed.values())]
        found.problems += problems(label, [answer for pair in new for answer in (*pair.at_a, *pair.at_b)])
        said = sum(answer.computed_tokens for pair in new for answer in pair.at_b)
        if counted != said:
            found.problems.append(f"{label}: B's /metrics count {counted} computed tokens, its answers {said}")

    def _ask(self, server: Replica, prompts: "Sequence[array[int]]", label: str, key: str = OWNER) -> list[Answer]:
        self.bar.start_stage(label, len(prompts))
        return ask_in_turn(server, prompts, key=key, bar=self.bar, log=self.log)

    def _prompts(self, count: int) -> "list[array[int]]":
        return [random_tokens(self.config.tokens, SMALLEST_VOCABULARY, self.rng) for _ in range(count)]


def _report(
    setup: EngineSetup, config: SiblingsConfig, found: _Found, dtype: str, log: ContentionLog
) -> BenchmarkReport:
    shares = {delay: [pair.computed_share for pair in pairs] for delay, pairs in found.delayed.items()}
    settled = [pair.computed_share for pair in found.settled]
    pairs = [*found.settled, *(pair for pairs in found.delayed.values() for pair in pairs)]
    wrong = sum(differing(pair.at_a, pair.at_b) for pair in pairs)
    values: dict[str, Any] = {
        "computed_by_b": median(settled),
        "computed_by_b_after_s": {f"{delay:g}": median(runs) for delay, runs in shares.items()},
        "least_possible": 1 / config.tokens,  # the last token of a prompt is always computed
        "ttft_a_ms": _ttft_ms(found.settled, "at_a"),
        "ttft_b_ms": _ttft_ms(found.settled, "at_b"),
        "answers_differ": wrong,
        "tokens_loaded_of_another_tenant": found.tenants.by_other,
        "tokens_loaded_by_their_owner": found.tenants.by_owner,
    }
    if found.tenants.by_other:
        found.problems.append(f"B loaded {found.tenants.by_other} tokens of another tenant")
    if not found.tenants.by_owner:
        found.problems.append("B loaded none of the owner's tokens either: the tenant test proves nothing")
    if wrong and dtype == "float32":
        found.problems.append(f"{wrong} answers of B differ in float32 from A's")
    rows = [_row(f"all to A, {config.settle:g} s, all to B", found.settled)]
    rows += [_row(f"each to A, {delay:g} s, to B", pairs) for delay, pairs in found.delayed.items()]
    delays = tuple(f"{delay:g}" for delay in shares)
    drawn: dict[str, tuple[float | None, ...]] = {"computed by B": tuple(median(runs) for runs in shares.values())}
    return BenchmarkReport(
        "lab siblings",
        values,
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=setup.threads,
        spread={
            "computed_by_b": min_and_max(settled),
            **{f"computed_by_b_after_{delay:g}_s": min_and_max(runs) for delay, runs in shares.items()},
        },
        setup={
            "prompts": config.prompts,
            "prompt_tokens": config.tokens,
            "settle_s": config.settle,
            "prompts_per_delay": config.prompts_per_delay,
            "tenant_prompts": config.tenant_prompts,
            "dtype": dtype,
        },
        contention=log.as_dict(),
        sheets=[
            ReportTable(f"two servers, one folder, prompts of {config.tokens} tokens", COLUMNS, tuple(rows)),
            ReportTable(
                "the owner's prompts, computed by A, at B",
                ("tokens loaded by another tenant", "by the owner"),
                ((found.tenants.by_other, found.tenants.by_owner),),
            ),
        ],
        charts=[ReportChart("computed by B", "seconds after A's answer", "share of tokens", delays, drawn)],
        problems=found.problems,
    )


def _row(label: str, pairs: list[_Pair]) -> tuple[Any, ...]:
    count = sum(len(pair.at_b) for pair in pairs)
    share = median(pair.computed_share for pair in pairs)
    return label, count, share, _ttft_ms(pairs, "at_a"), _ttft_ms(pairs, "at_b")


def _ttft_ms(pairs: list[_Pair], at: str) -> float:
    """Return the median over the successful answers."""
    return 1e3 * median([answer.ttft for pair in pairs for answer in getattr(pair, at) if not answer.error] or [nan])
