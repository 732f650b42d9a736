"""DecisionLog: writes routing decisions, or recorded requests, as lines of JSON to a file, on its own thread.

Decisions that the disk does not accept in time are dropped and counted: no request waits for its record.
"""

import queue
import sys
import threading
from pathlib import Path

import msgspec

from headstart.core.errors import ConfigError
from headstart.router.decision_log import DecisionRecord

MAX_WAITING = 10_000  # decisions
CLOSE_SECONDS = 5.0


class DecisionLog:
    """Appends to the file at `path`. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.num_dropped = 0
        try:
            self._file = path.expanduser().open("ab")
        except OSError as error:
            raise ConfigError(f"cannot write the decision log {str(path)!r}: {error.strerror}") from error
        self._waiting: queue.Queue[DecisionRecord | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def enqueue(self, decision: DecisionRecord) -> None:
        """Queue a decision. Never waits and never raises."""
        try:
            self._waiting.put_nowait(decision)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write the queued decisions and close the file."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        with self._file as file:
            while (decision := self._waiting.get()) is not None:
                try:
                    file.write(encoder.encode(decision.as_dict()) + b"\n")
                    if self._waiting.empty():
                        file.flush()
                except OSError as error:
                    self.num_dropped += 1
                    if self.num_dropped == 1:
                        print(f"headstart: the decision log cannot be written: {error}", file=sys.stderr, flush=True)
