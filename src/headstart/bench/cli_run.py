"""What every verb of `headstart bench` shares: common options, and how a benchmark is run and ends.

Free of torch until a verb runs: thread settings come first.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.core.errors import HeadstartError
from headstart.model.threads import prepare_threads

if TYPE_CHECKING:
    from headstart.bench.engines import Setup
    from headstart.bench.progress import Bar
    from headstart.bench.report import Report

Model = Annotated[
    str,
    typer.Option(help="Folder, hub id, or a shape such as tiny, llama-100m (random weights, made once and kept)."),
]
Dtype = Annotated[str, typer.Option(help="auto | bfloat16 | float32. auto: the checkpoint's.")]
Threads = Annotated[int, typer.Option(help="Compute threads; 0: as many as the cgroup grants cores.")]
Seed = Annotated[int, typer.Option(help="Seed of prompts, arrivals and random weights.")]
Runs = Annotated[int, typer.Option(min=1, help="Repetitions; figures are medians, the spread is in the JSON.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller repetitions: a look, not a figure.")]
Plot = Annotated[Path | None, typer.Option(metavar="PNG", help="Also draw the result into this file.")]


def run_on_model(
    bench: "Callable[[Setup, Bar], Report]", model: str, dtype: str, threads: int, seed: int, plot: Path | None
) -> None:
    """Settles threads before torch is imported, finds or makes the model, measures, publishes, exits."""

    def on_model(bar: "Bar") -> "Report":
        count = prepare_threads(threads)
        from headstart.assembly import build_engine
        from headstart.bench.engines import BUNDLED, Setup
        from headstart.bench.models import find_model

        found = find_model(model, _cache_folder(), seed, bar)
        return bench(Setup(build_engine, found, model or BUNDLED, dtype, count, seed), bar)

    finish(on_model, plot)


def finish(bench: "Callable[[Bar], Report]", plot: Path | None) -> None:
    """Runs a benchmark under its progress bar; exit code 1: invalid, 2: cannot run, 130: interrupted."""
    from headstart.bench.progress import progress_bar
    from headstart.bench.report import check_plot, publish

    try:
        check_plot(plot)
        with progress_bar() as bar:
            report = bench(bar)
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(publish(report, spin_count=os.environ.get("GOMP_SPINCOUNT"), plot=plot))


def _cache_folder() -> Path:
    """Where models made for benchmarks are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "headstart" / "bench-models"
