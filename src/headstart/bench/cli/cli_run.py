"""Common options of the verbs of `headstart bench`, and the functions that run a benchmark and exit.

Free of torch until a verb runs: thread settings come first.
"""

import os
import secrets
import sys
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.config.options import EngineOptions
from headstart.core.errors import HeadstartError
from headstart.model.setup.threads import prepare_threads
from headstart.model.weights.shapes import SHAPES

if TYPE_CHECKING:
    from headstart.bench.progress_bar import Bar
    from headstart.bench.report import Report
    from headstart.bench.runners.engines import Setup
    from headstart.bench.runners.runner import Runner
    from headstart.workload.slo import Slo

Model = Annotated[
    str,
    typer.Option(help="Folder, hub id, or a shape such as tiny, llama-100m (random weights, made once and kept)."),
]
Dtype = Annotated[str, typer.Option(help="auto | bfloat16 | float32. auto: the checkpoint's.")]
Threads = Annotated[int, typer.Option(help="Compute threads; 0: as many as the cgroup grants cores.")]
Seed = Annotated[int, typer.Option(help="Seed of prompts, arrivals and random weights.")]
Runs = Annotated[int, typer.Option(min=1, help="Repetitions; figures are medians, the spread is in the JSON.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller repetitions: a quick check, not a figure.")]
Plot = Annotated[Path | None, typer.Option(metavar="PNG", help="Also draw the result into this file.")]
Against = Annotated[str, typer.Option(metavar="URL", help="Measure this OpenAI endpoint instead of a local engine.")]
Named = Annotated[
    str,
    typer.Option(
        "--model",
        help="Folder, hub id or shape (tiny, llama-100m); with --against the name to send.",
        show_default=False,
    ),
]
ApiKey = Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.", show_default=False)]
VocabSize = Annotated[int, typer.Option(min=2, help="With --against: prompts are random token ids below this.")]
Timeout = Annotated[float, typer.Option(min=1, help="With --against: seconds a request may take.")]
NewSeed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of prompts and arrivals. Default: 0; with --against a new one, for new prompts."),
]
Quantization = Annotated[str, typer.Option(help="none | int8.")]
Caching = Annotated[bool, typer.Option("--caching/--no-caching", help="Prefix caching of the local engine.")]
SloTtft = Annotated[float | None, typer.Option(min=0, metavar="MS", help="Limit of the time to the first token.")]
SloTpot = Annotated[float | None, typer.Option(min=0, metavar="MS", help="Limit of the time per output token.")]
SloE2e = Annotated[float | None, typer.Option(min=0, metavar="MS", help="Limit of the end-to-end latency.")]

MAX_BLOCKS = 16_384
"""KV blocks for a workload in this process; larger workloads share them, as they would in a server."""


@dataclass(frozen=True, slots=True)
class Where:
    """The target: an engine in this process, or the server at `against`; and the file of the plot."""

    model: str
    against: str = ""
    api_key: str = ""
    vocab_size: int = 512
    timeout: float = 300.0
    dtype: str = "auto"
    threads: int = 0
    quantization: str = "none"
    caching: bool = True
    asked_seed: int | None = None
    plot: Path | None = None

    @property
    def is_here(self) -> bool:
        return not self.against

    def seed(self) -> int:
        """Return the requested seed, else 0, or a new one where prompts must be new to be cold."""
        if self.asked_seed is not None:
            return self.asked_seed
        return 0 if self.is_here else secrets.randbelow(2**31)


@contextmanager
def refusing() -> Generator[None]:
    """Report errors raised in the block as the user's mistake: one line, and exit code 2."""
    try:
        yield
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def limits(ttft: float | None, tpot: float | None, e2e: float | None) -> "Slo":
    """Return limits in ms as an Slo."""
    from headstart.workload.slo import Slo

    return Slo(*(None if limit is None else limit / 1e3 for limit in (ttft, tpot, e2e)))


def run_on_runner(bench: "Callable[[Runner, int, Bar], Report]", where: Where, num_blocks: int) -> None:
    """Measure the requested target: `bench` gets a runner and the seed. `num_blocks`: KV that a local engine needs."""
    seed = where.seed()
    if where.is_here:

        def on_engine(setup: "Setup", bar: "Bar") -> "Report":
            from headstart.bench.runners.engine_runner import EngineRunner

            bar.stage("loading the model", None)
            options = setup.options(num_blocks=min(num_blocks + 64, MAX_BLOCKS), caching=where.caching)
            with closing(EngineRunner.build(setup, options)) as runner:
                return bench(runner, seed, bar)

        run_on_model(on_engine, where.model or "tiny", where.dtype, where.threads, seed, where.plot, where.quantization)
        return

    def on_server(bar: "Bar") -> "Report":
        from headstart.bench.runners.endpoint_runner import EndpointRunner
        from headstart.bench.runners.streamed_request import Target

        target = Target(where.against, where.model, where.api_key, where.timeout)
        bar.stage(f"connecting to {where.against}", None)
        with closing(EndpointRunner.connect(target, where.vocab_size, Random(f"{seed}/probe"))) as runner:
            return bench(runner, seed, bar)

    finish(on_server, where.plot)


def run_on_model(
    bench: "Callable[[Setup, Bar], Report]",
    model: str,
    dtype: str,
    threads: int,
    seed: int,
    plot: Path | None,
    quantization: str = "none",
) -> None:
    """Set threads before torch is imported, find or make the model, measure, publish, exit."""

    def on_model(bar: "Bar") -> "Report":
        count = prepare_threads(threads)
        _check(model, EngineOptions(dtype=dtype, threads=threads, quantization=quantization))
        from headstart.assembly import build_engine
        from headstart.bench.bench_models import find_model
        from headstart.bench.runners.engines import BUNDLED, Setup

        found = find_model(model, _cache_folder(), seed, bar)
        return bench(Setup(build_engine, found, model or BUNDLED, dtype, count, seed, quantization), bar)

    finish(on_model, plot)


def _check(model: str, options: EngineOptions) -> None:
    """Raise ConfigError for options that no engine supports, before torch is imported. A shape name is no folder."""
    from headstart.engine_checks import check_engine

    check_engine(options if model in SHAPES and not Path(model).is_dir() else replace(options, model=model))


def finish(bench: "Callable[[Bar], Report]", plot: Path | None) -> None:
    """Run a benchmark under its progress bar; exit code 1: invalid, 2: cannot run, 130: interrupted."""
    from headstart.bench.progress_bar import progress_bar
    from headstart.bench.report import check_plot, publish

    try:
        with refusing():
            check_plot(plot)
            with progress_bar() as bar:
                report = bench(bar)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(publish(report, spin_count=os.environ.get("GOMP_SPINCOUNT"), plot=plot))


def _cache_folder() -> Path:
    """Return the folder of models made for benchmarks."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "headstart" / "bench-models"
