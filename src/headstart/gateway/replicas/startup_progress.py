"""StartupProgress: the number of replicas that are loading or ready, until all are ready."""

from collections.abc import Sequence
from types import TracebackType

from headstart.http.logs import Log

_MAX_NAMES = 6


class StartupProgress:
    """A status line on a terminal, cleared at the end; elsewhere a log line for each change. For use in `with`."""

    def __init__(self, names: Sequence[str], log: Log) -> None:
        self._states = dict.fromkeys(names, "waiting")
        self._log = log

    def __enter__(self) -> "StartupProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._log.status("")

    def loading(self, name: str) -> None:
        """Record that this replica's process was started."""
        self._states[name] = "loading"
        self._report(f"replica {name} is loading")

    def settled(self, name: str, *, is_ready: bool) -> None:
        """Record that this replica is ready, or that its process ended before it was."""
        self._states[name] = "ready" if is_ready else "ended"
        self._report(f"replica {name} is ready ({self._ready})" if is_ready else f"replica {name} ended while loading")

    @property
    def _ready(self) -> str:
        return f"{sum(state == 'ready' for state in self._states.values())} of {len(self._states)}"

    def _report(self, line: str) -> None:
        if not self._log.is_terminal:
            self._log.line(f"headstart: {line}")
            return
        loading = [name for name, state in self._states.items() if state == "loading"]
        more = ", ..." if len(loading) > _MAX_NAMES else ""
        shown = f", loading {', '.join(loading[:_MAX_NAMES])}{more}" if loading else ""
        self._log.status(f"starting replicas: {self._ready} ready{shown}")
