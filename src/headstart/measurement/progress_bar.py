"""Progress bars on stderr: one for everything that may take longer than two seconds, one for batches of prompts."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressBar:
    """A bar with a changing label: drawn by `progress`, or one line per stage in `log`, or no output."""

    def __init__(self, progress: Progress | None = None, log: TextIO | None = None) -> None:
        self._progress = progress
        self._log = log
        self._task = progress.add_task("", total=None) if progress else None

    def start_stage(self, label: str, total: int | None = None) -> None:
        """Restart with a new label and no progress out of `total` (None: unknown)."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, total=total, description=label)
        elif self._log is not None:
            print(f"... {label}", file=self._log, flush=True)

    def advance(self, steps: int = 1) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, steps)


QUIET = ProgressBar()


@contextmanager
def progress_bar() -> Generator[ProgressBar, None, None]:
    """Yield a bar on stderr that is removed at the end of the block; without a terminal, one line per stage."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressBar(log=sys.stderr)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBar(progress)


class GenerationProgress:
    """A context manager that shows finished requests and tokens per second. Silent unless stderr is a terminal."""

    def __init__(
        self, num_requests: int, *, show: bool = True, console: Console | None = None, label: str = "generating"
    ) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (show and console.is_terminal),
        )
        self._task = self._progress.add_task(label, total=num_requests, rate="")
        self._num_tokens = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    def __enter__(self) -> "GenerationProgress":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def record_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._num_tokens += count
        self._progress.update(self._task, rate=self._rate())

    def record_finished(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count one finished request."""
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens
        self._progress.update(self._task, advance=1, rate=self._rate())

    def _rate(self) -> str:
        elapsed = self._progress.tasks[0].elapsed
        rate = f"{self._num_tokens / elapsed:,.0f} tokens/s" if elapsed else ""
        if self._num_prompt_tokens:
            rate += f", {self._num_cached_tokens / self._num_prompt_tokens:.0%} of the prompts cached"
        return rate
