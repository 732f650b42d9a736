"""The output contract of every benchmark: tables on stderr, one JSON document as the last line of stdout.

An invalid run (outputs differ, token counts do not match, server errors) still prints all its results, states the
problems and exits with code 1.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from headstart.core.errors import ConfigError
from headstart.measurement.machine import describe_machine, describe_versions

CROWDED_CHARS = 48  # total length of the x labels above which they are rotated


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table: a title, column heads, rows of numbers or texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class ReportChart:
    """One figure: bars if `x` holds texts, otherwise lines with a marker at every point."""

    title: str
    x_label: str
    y_label: str
    x: tuple[Any, ...]
    series: dict[str, tuple[float | None, ...]]  # name -> one value per x; None: not measured
    log_y: bool = False


@dataclass(slots=True)
class BenchmarkReport:
    """The result of a benchmark. `values` are keys of its JSON document; `problems` make the run invalid."""

    bench: str
    values: dict[str, Any]
    model: str | None = None  # None: measured without one
    seed: int = 0
    runs: int = 1
    threads: int | None = None
    spread: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # key -> [min, max] over the runs
    setup: dict[str, Any] = field(default_factory=dict[str, Any])  # everything needed to repeat the run
    contention: dict[str, Any] = field(default_factory=dict[str, Any])
    sheets: list[ReportTable] = field(default_factory=list[ReportTable])
    charts: list[ReportChart] = field(default_factory=list[ReportChart])
    problems: list[str] = field(default_factory=list[str])

    def to_document(self, spin_count: str | None) -> dict[str, Any]:
        """Return the JSON document: figures first, then the setup, machine and versions."""
        return {
            "bench": self.bench,
            **self.values,
            "valid": not self.problems,
            "problems": self.problems,
            "model": self.model,
            "seed": self.seed,
            "runs": self.runs,
            "spread": self.spread,
            "threads": self.threads,
            "gomp_spincount": spin_count,
            "setup": self.setup,
            "contention": self.contention,
            "machine": describe_machine(),
            "versions": describe_versions(),
        }


def min_and_max(values: Sequence[float]) -> list[float]:
    """Return [smallest, largest] of the repetitions of one figure."""
    return [min(values), max(values)]


def print_and_plot_report(
    report: BenchmarkReport, *, spin_count: str | None, plot: Path | None = None, stdout: TextIO | None = None
) -> int:
    """Print a report, draw its charts if requested, and return the exit code: 0, or 1 for an invalid run."""
    document = report.to_document(spin_count)
    console = Console(stderr=True)
    for sheet in report.sheets:
        console.print(_table(sheet))
    machine = document["machine"]
    against = report.setup.get("against")
    where = f"at {against}, client" if against else f"threads {report.threads}, GOMP_SPINCOUNT={spin_count}"
    console.print(
        f"{report.model or 'no model'} · {where} on {machine['cpu']}, {machine['cores']} cores · "
        f"seed {report.seed} · {report.runs} runs",
        style="dim",
        highlight=False,
    )
    if report.contention.get("contended_runs"):
        console.print("contended: other processes used the machine; take these figures with care", style="yellow")
    for problem in report.problems:
        console.print(f"INVALID: {problem}", style="bold red", highlight=False, markup=False)
    if plot is not None:
        draw_charts(report.charts, plot)
        console.print(f"plot: {plot}", style="dim", highlight=False)
    print(json.dumps(_plain(document), allow_nan=False), file=stdout or sys.stdout, flush=True)
    return 1 if report.problems else 0


def check_plot(plot: Path | None) -> None:
    """Check before the measurement that a requested plot can be drawn. Raises ConfigError if not."""
    if plot is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'headstart[plots]'")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}")


def draw_charts(charts: Sequence[ReportChart], path: Path) -> None:
    """Draw all charts side by side into one image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * max(len(charts), 1), 4.0), layout="constrained")
    for index, chart in enumerate(charts):
        axes = figure.add_subplot(1, len(charts), index + 1)
        bars, crowded = any(isinstance(x, str) for x in chart.x), False
        width = 0.8 / max(len(chart.series), 1)
        for number, (name, values) in enumerate(chart.series.items()):
            if bars:
                heights = [math.nan if value is None else value for value in values]
                axes.bar([i + number * width for i in range(len(chart.x))], heights, width, label=name)
            else:
                points = [(x, value) for x, value in zip(chart.x, values, strict=True) if value is not None]
                axes.plot([x for x, _ in points], [value for _, value in points], marker="o", label=name)
        if bars:
            middle = width * (len(chart.series) - 1) / 2
            axes.set_xticks([i + middle for i in range(len(chart.x))], list(chart.x))
            crowded = sum(len(str(x)) for x in chart.x) > CROWDED_CHARS
            axes.margins(y=0.05 if crowded else 0.25)  # space for the legend
        if chart.log_y:
            axes.set_yscale("log")
            heights = [value for values in chart.series.values() for value in values if value]
            if bars and heights:
                axes.set_ylim(bottom=min(heights) / 2)  # a log scale has no zero to start bars from
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        if crowded:
            for label in axes.get_xticklabels():
                label.set(rotation=30, horizontalalignment="right")
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        else:
            axes.legend()
    figure.savefig(path, dpi=150)


def _table(sheet: ReportTable) -> Table:
    table = Table(title=sheet.title, title_justify="left", title_style="bold")
    for index, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in sheet.rows:
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _plain(value: Any) -> Any:
    """Return the same value with floats rounded to 6 digits, and None for values without JSON form (nan, inf)."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
