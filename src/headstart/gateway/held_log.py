"""HeldLog: a log that buffers its lines until the router's banner, so that the first address on stderr is the router's.

The states of replicas are known before the banner, and their lines contain the replicas' addresses.
"""

from typing import TextIO

from headstart.http.logs import Log

MAX_LINES = 1_000  # at this number they are written, with or without the banner


class HeldLog(Log):
    """As Log, but nothing is written before `release`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._lines: list[str] | None = []  # None: released

    def line(self, text: str) -> None:
        """Write a line, or buffer it until `release`."""
        if self._lines is None:
            super().line(text)
            return
        self._lines.append(text)
        if len(self._lines) >= MAX_LINES:
            self.release()

    def release(self) -> None:
        """Write the buffered lines in order, and all later ones at once. Calling it twice is harmless."""
        lines, self._lines = self._lines, None
        for text in lines or ():
            super().line(text)
