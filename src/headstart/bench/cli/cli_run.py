"""The functions that run a benchmark, publish its report and exit.

Free of torch until a verb runs: thread settings come first.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import typer

from headstart.bench.cli.bench_flags import BenchTarget
from headstart.config.options import EngineOptions
from headstart.core.errors import ConfigError, HeadstartError
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.model.setup.threads import configure_num_threads
from headstart.model.weights.shapes import SHAPES

if TYPE_CHECKING:
    from headstart.bench.suite import SuitePlan
    from headstart.measurement.report import BenchmarkReport
    from headstart.measurement.runner import EngineSetup, JobRunner
    from headstart.workload.slo import Slo

MAX_BLOCKS = 16_384
"""KV blocks for a workload in this process; larger workloads share them, as they would in a server."""
STD = 0.2
"""Standard deviation of the weights: large enough that every token affects the output, so that a wrong KV block shows.
"""


def resolve_or_create_bench_model(name: str, cache: Path, seed: int = 0, bar: ProgressBar = QUIET) -> str:
    """Return a value for `EngineOptions.model`: a folder or hub id unchanged, or the folder made for a shape name.

    An existing folder takes precedence over a shape of the same name. Raises ConfigError if the cache is not writable.
    """
    if name not in SHAPES or Path(name).is_dir():
        return name
    folder = cache / f"{name}-std{STD}-seed{seed}"
    if folder.is_dir():
        return str(folder)
    from headstart.model.weights.init_model import write_random_model

    bar.start_stage(f"making {name} with random weights", None)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as scratch:
            made = write_random_model(name, Path(scratch) / "model", std=STD, seed=seed, progress=False)
            _move(made, folder)
    except OSError as error:
        raise ConfigError(f"cannot write models into {cache}: {error.strerror}; set XDG_CACHE_HOME") from error
    return str(folder)


def _move(made: Path, folder: Path) -> None:
    """Move a complete model into place atomically. A concurrent process may already have made the same one."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def report_usage_errors() -> Generator[None]:
    """Report errors raised in the block as the user's mistake: one line, and exit code 2."""
    try:
        yield
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def slo_from_ms(ttft: float | None, tpot: float | None, e2e: float | None) -> "Slo":
    """Return limits in ms as an Slo."""
    from headstart.workload.slo import Slo

    return Slo(*(None if limit is None else limit / 1e3 for limit in (ttft, tpot, e2e)))


def run_suite_plan(plan: "SuitePlan", where: BenchTarget) -> None:
    """Measure a plan on the requested target, publish, exit."""
    from headstart.bench.suite import run_suite

    def bench(runner: "JobRunner", seed: int, bar: "ProgressBar") -> "BenchmarkReport":
        return run_suite(runner, replace(plan, seed=seed, is_guarded=where.is_in_process), bar)

    run_bench_on_target(bench, where, plan.build(512, Random(0)).num_blocks_without_sharing())


def run_bench_on_target(
    bench: "Callable[[JobRunner, int, ProgressBar], BenchmarkReport]", where: BenchTarget, num_blocks: int
) -> None:
    """Measure the requested target: `bench` gets a runner and the seed. `num_blocks`: KV that a local engine needs."""
    seed = where.choose_seed()
    if where.is_in_process:

        def on_engine(setup: "EngineSetup", bar: "ProgressBar") -> "BenchmarkReport":
            from headstart.measurement.inprocess import EngineRunner

            bar.start_stage("loading the model", None)
            options = setup.options(num_blocks=min(num_blocks + 64, MAX_BLOCKS), caching=where.caching)
            with closing(EngineRunner.from_setup(setup, options)) as runner:
                return bench(runner, seed, bar)

        run_model_bench_and_exit(on_engine, where.with_default_model())
        return

    def on_server(bar: "ProgressBar") -> "BenchmarkReport":
        from headstart.bench.endpoint_runner import EndpointRunner
        from headstart.bench.streamed_request import EndpointTarget

        target = EndpointTarget(where.against, where.model, where.api_key, where.timeout)
        bar.start_stage(f"connecting to {where.against}", None)
        with closing(EndpointRunner.connect(target, where.vocab_size, Random(f"{seed}/probe"))) as runner:
            return bench(runner, seed, bar)

    run_and_exit(on_server, where.plot)


def run_model_bench_and_exit(
    bench: "Callable[[EngineSetup, ProgressBar], BenchmarkReport]", where: BenchTarget
) -> None:
    """Set threads before torch is imported, find or make the model, measure, publish, exit."""

    def on_model(bar: "ProgressBar") -> "BenchmarkReport":
        count, seed = configure_num_threads(where.threads), where.choose_seed()
        _check(where.model, EngineOptions(dtype=where.dtype, threads=where.threads, quantization=where.quantization))
        from headstart.engine.assembly import build_engine
        from headstart.measurement.runner import BUNDLED, EngineSetup

        found = resolve_or_create_bench_model(where.model, _cache_folder(), seed, bar)
        return bench(
            EngineSetup(build_engine, found, where.model or BUNDLED, where.dtype, count, seed, where.quantization), bar
        )

    run_and_exit(on_model, where.plot)


def _check(model: str, options: EngineOptions) -> None:
    """Raise ConfigError for options that no engine supports, before torch is imported. A shape name is no folder."""
    from headstart.engine.engine_checks import check_engine_can_start

    check_engine_can_start(options if model in SHAPES and not Path(model).is_dir() else replace(options, model=model))


def run_and_exit(bench: "Callable[[ProgressBar], BenchmarkReport]", plot: Path | None) -> None:
    """Run a benchmark under its progress bar; exit code 1: invalid, 2: cannot run, 130: interrupted."""
    from headstart.measurement.progress_bar import progress_bar
    from headstart.measurement.report import check_plot, print_and_plot_report

    try:
        with report_usage_errors():
            check_plot(plot)
            with progress_bar() as bar:
                report = bench(bar)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(print_and_plot_report(report, spin_count=os.environ.get("GOMP_SPINCOUNT"), plot=plot))


def _cache_folder() -> Path:
    """Return the folder of models made for benchmarks."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "headstart" / "bench-models"
