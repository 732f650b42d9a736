"""Experiment: tokens still cached after kill -9 of front end and engine, a new start and the same prompts.

Three forms: with a pause for the writer before the kill, without one, and with the files' pages dropped from memory
before the new start, as after a reboot of the machine. Each run has its own folder.
"""

import time
from array import array
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from headstart.measurement.machine import ContentionLog
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup
from headstart.workload.request_record import median
from headstart.workload.synthetic import random_tokens
from headstart_lab.runners.served_replica import (
    Answer,
    Launch,
    Replica,
    ask_in_turn,
    differing,
    problems,
    replica,
    stored_bytes,
)
from headstart_lab.store import page_cache
from headstart_lab.store.store_opening import OPENINGS, Opening, measure_openings

BLOCK_SIZE = 16
SMALLEST_VOCABULARY = 512  # every model has these tokens
COLUMNS = ("form", "computed / ideal", "TTFT cold ms", "after restart", "warm", "restart / cold", "answers differ")


class Form(NamedTuple):
    """One way of ending the first server."""

    name: str
    grace: float = 0.0  # seconds between the last answer and the kill
    drop_pages: bool = False


GRACE = Form("grace", grace=1.0)
FORMS = (GRACE, Form("no_grace"), Form("pages_dropped", grace=1.0, drop_pages=True))


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """Sizes. The figures at the top of the report are of the first form."""

    prompts: int = 64
    tokens: int = 1024  # of each
    runs: int = 3
    forms: tuple[Form, ...] = FORMS
    warm_ups: int = 2  # prompts before every measurement: the first ones include one-time costs of a process
    openings: tuple[Opening, ...] = OPENINGS
    opening_runs: int = 5
    folder: Path | None = None  # where the stores are made; None: the temporary folder


QUICK = RestartConfig(
    prompts=4, tokens=256, runs=1, forms=(GRACE,), openings=(Opening("small", 100, 4096, 32 << 20),), opening_runs=1
)


@dataclass(slots=True)
class _Restart:
    """One run of one form."""

    cold: list[Answer]
    restart: list[Answer] = field(default_factory=list[Answer])
    warm: list[Answer] = field(default_factory=list[Answer])
    ready: tuple[float, float] = (0.0, 0.0)  # seconds, of both starts
    disk_bytes: int = 0
    dropped_share: float | None = None
    store_tokens: int = 0  # of the prompts after the restart, by the server's counters
    dtype: str = ""
    problems: list[str] = field(default_factory=list[str])

    @property
    def redundancy(self) -> float:
        """Return tokens computed after the restart / those of a lossless cache: the last token of each prompt."""
        return sum(answer.computed_tokens for answer in self.restart) / len(self.restart)

    @property
    def restart_over_cold(self) -> float:
        return _ttft_ms(self.restart) / _ttft_ms(self.cold)


def run_restart(setup: EngineSetup, config: RestartConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure every form `runs` times, in turn, and then the time to open a large store."""
    found = {form: list[_Restart]() for form in config.forms}
    log = ContentionLog.empty()
    with TemporaryDirectory(prefix="headstart-lab-", dir=config.folder) as scratch:
        launch = _launch(setup, config, Path(scratch))
        for number in range(config.runs):
            for form in config.forms:
                rng = Random(f"{setup.seed}/{form.name}/{number}")
                label = f"{form.name}, run {number + 1} of {config.runs}"
                found[form].append(_Measurement(launch, config, form, rng, bar, log).run(label))
        opened = measure_openings(config.openings, Path(scratch), bar, runs=config.opening_runs)
    report = _report(setup, config, found, log)
    report.values |= opened.values
    report.sheets.append(opened.sheet)
    report.problems += opened.problems
    return report


def _launch(setup: EngineSetup, config: RestartConfig, scratch: Path) -> Launch:
    """Return the launch settings of servers whose pool holds all prompts, so that warm ones stay in memory."""
    blocks = (config.prompts + 2 * config.warm_ups) * (-(-config.tokens // BLOCK_SIZE) + 1) + 64
    flags = ("--num-blocks", str(blocks), "--threads", str(setup.threads), "--dtype", setup.dtype)
    return Launch(setup.model, scratch, flags)


@dataclass(frozen=True, slots=True)
class _Measurement:
    """One run of one form, from an empty folder to the last warm prompt."""

    launch: Launch
    config: RestartConfig
    form: Form
    rng: Random
    bar: ProgressBar
    log: ContentionLog

    def run(self, label: str) -> _Restart:
        """Run two server processes, one after the other, on one folder."""
        with TemporaryDirectory(dir=self.launch.folder) as parent:
            store = Path(parent) / "store"
            prompts = self._prompts(self.config.prompts)
            self.bar.start_stage(f"{label}: first start", None)
            with replica(self.launch, store) as server:
                self._warm_up(server)
                found = _Restart(self._ask(server, prompts, f"{label}: cold"), dtype=server.dtype)
                time.sleep(self.form.grace)
                server.kill()
                first_ready = server.ready_seconds
            found.disk_bytes = stored_bytes(store)
            found.dropped_share = page_cache.drop(store) if self.form.drop_pages else None
            self.bar.start_stage(f"{label}: start after kill -9", None)
            with replica(self.launch, store) as server:
                found.ready = (first_ready, server.ready_seconds)
                self._warm_up(server)
                self._after_restart(server, prompts, found, label)
        return found

    def _after_restart(self, server: Replica, prompts: "list[array[int]]", found: _Restart, label: str) -> None:
        before = server.prompt_tokens()
        found.restart = self._ask(server, prompts, f"{label}: after the restart")
        counted = server.prompt_tokens() - before
        found.warm = self._ask(server, prompts, f"{label}: warm")
        found.store_tokens = counted["store"]
        computed = sum(answer.computed_tokens for answer in found.restart)
        for name in ("cold", "restart", "warm"):
            found.problems += problems(f"{self.form.name}, {name}", getattr(found, name))
        if counted["computed"] != computed:
            found.problems.append(f"/metrics counts {counted['computed']} computed tokens, the answers {computed}")

    def _warm_up(self, server: Replica) -> None:
        """Send prompts that were not sent before."""
        ask_in_turn(server, self._prompts(self.config.warm_ups))

    def _prompts(self, count: int) -> "list[array[int]]":
        return [random_tokens(self.config.tokens, SMALLEST_VOCABULARY, self.rng) for _ in range(count)]

    def _ask(self, server: Replica, prompts: "list[array[int]]", label: str) -> list[Answer]:
        self.bar.start_stage(label, len(prompts))
        return ask_in_turn(server, prompts, bar=self.bar, log=self.log)


def _report(
    setup: EngineSetup, config: RestartConfig, found: dict[Form, list[_Restart]], log: ContentionLog
) -> BenchmarkReport:
    forms = {form.name: _figures(runs) for form, runs in found.items()}
    first = next(iter(found.values()))
    keys = ("redundancy_after_restart", "ttft_cold_ms", "ttft_restart_ms", "ttft_warm_ms", "ttft_restart_over_cold")
    rows = tuple((name, *(row[key] for key in (*keys, "answers_differ"))) for name, row in forms.items())
    starts = tuple(
        (name, row["ready_first_s"], row["ready_restart_s"], row["disk_bytes"] / 1e6) for name, row in forms.items()
    )
    every = [run for runs in found.values() for run in runs]
    wrong = sum(differing(run.cold, run.restart) for run in every)
    report = BenchmarkReport(
        "lab restart",
        {**forms[config.forms[0].name], "forms": forms},
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=setup.threads,
        spread={
            "redundancy_after_restart": min_and_max([run.redundancy for run in first]),
            "ttft_cold_ms": min_and_max([_ttft_ms(run.cold) for run in first]),
            "ttft_restart_ms": min_and_max([_ttft_ms(run.restart) for run in first]),
            "ttft_restart_over_cold": min_and_max([run.restart_over_cold for run in first]),
        },
        setup={
            "prompts": config.prompts,
            "prompt_tokens": config.tokens,
            "grace_s": {form.name: form.grace for form in config.forms},
            "warm_ups": config.warm_ups,
            "dtype": first[0].dtype,
        },
        contention=log.as_dict(),
        sheets=[
            ReportTable(f"{config.prompts} prompts of {config.tokens} tokens, kill -9, again", COLUMNS, rows),
            ReportTable("from start to ready", ("form", "first, s", "after kill -9, s", "MB on disk"), starts),
        ],
        charts=[_chart(forms)],
        problems=[problem for run in every for problem in run.problems],
    )
    if wrong and first[0].dtype == "float32":
        report.problems.append(f"{wrong} answers after a restart differ in float32 from those before it")
    return report


def _chart(forms: dict[str, dict[str, Any]]) -> ReportChart:
    whens = ("cold", "restart", "warm")
    series = {name: tuple(row[f"ttft_{when}_ms"] for when in whens) for name, row in forms.items()}
    return ReportChart("time to the first token", "when", "ms, median", whens, series, log_y=True)


def _figures(runs: list[_Restart]) -> dict[str, Any]:
    """Return medians over the runs, and sums for errors."""
    return {
        "redundancy_after_restart": median(run.redundancy for run in runs),
        "ttft_cold_ms": median(_ttft_ms(run.cold) for run in runs),
        "ttft_restart_ms": median(_ttft_ms(run.restart) for run in runs),
        "ttft_warm_ms": median(_ttft_ms(run.warm) for run in runs),
        "ttft_restart_max_ms": median(1e3 * max(answer.ttft for answer in run.restart) for run in runs),
        "ttft_restart_over_cold": median(run.restart_over_cold for run in runs),
        "answers_differ": sum(differing(run.cold, run.restart) for run in runs),
        "store_token_share": median(run.store_tokens / sum(a.prompt_tokens for a in run.restart) for run in runs),
        "ready_first_s": median(run.ready[0] for run in runs),
        "ready_restart_s": median(run.ready[1] for run in runs),
        "disk_bytes": median(run.disk_bytes for run in runs),
        "dropped_page_share": runs[0].dropped_share,
    }


def _ttft_ms(answers: list[Answer]) -> float:
    """Return the median over the successful answers."""
    return 1e3 * median([answer.ttft for answer in answers if answer.error is None] or [nan])
