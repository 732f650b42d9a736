"""One progress bar on stderr, for everything that may take longer than two seconds."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A bar with a changing label; `quiet` draws nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None) if progress else None

    def stage(self, label: str, total: int | None = None) -> None:
        """Starts over: a new label, nothing done yet of `total` (None: not known)."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, total=total, description=label)

    def advance(self, steps: int = 1) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, steps)


QUIET = Bar(None)


@contextmanager
def progress_bar() -> Generator[Bar, None, None]:
    """A bar on stderr that is gone when the block ends; silent unless stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress)
