"""HeldLog: a log whose lines are written after the router's banner, so that the first address on stderr is its own.

States of replicas are known before the banner, and their lines hold the replicas' addresses.
"""

from typing import TextIO

from headstart.http.logs import Log

MAX_LINES = 1_000  # then they are written, banner or not


class HeldLog(Log):
    """As Log, but nothing is written before `release`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._lines: list[str] | None = []  # None: released

    def line(self, text: str) -> None:
        """Write a line for people, or keep it until `release`."""
        if self._lines is None:
            super().line(text)
            return
        self._lines.append(text)
        if len(self._lines) >= MAX_LINES:
            self.release()

    def release(self) -> None:
        """Write what was held, in order, and everything from now on at once. Twice does no harm."""
        lines, self._lines = self._lines, None
        for text in lines or ():
            super().line(text)
