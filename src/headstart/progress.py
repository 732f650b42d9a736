"""GenerationProgress: a progress bar on stderr while prompts are processed."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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

    def tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._num_tokens += count
        self._progress.update(self._task, rate=self._rate())

    def finished(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
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
