"""One progress bar on stderr, for everything that may take longer than two seconds."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A bar with a changing label: drawn by `progress`, or one line per stage in `log`, or no output."""

    def __init__(self, progress: Progress | None = None, log: TextIO | None = None) -> None:
        self._progress = progress
        self._log = log
        self._task = progress.add_task("", total=None) if progress else None

    def stage(self, label: str, total: int | None = None) -> None:
        """Restart with a new label and no progress out of `total` (None: unknown)."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, total=total, description=label)
        elif self._log is not None:
            print(f"... {label}", file=self._log, flush=True)

    def advance(self, steps: int = 1) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, steps)


QUIET = Bar()


@contextmanager
def progress_bar() -> Generator[Bar, None, None]:
    """Yield a bar on stderr that is removed at the end of the block; without a terminal, one line per stage."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Bar(log=sys.stderr)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress)
