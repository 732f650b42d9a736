"""Logs: one JSON object per line on stderr. Never prompts, completions, keys or salts."""

import json
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO


class Log:
    """Writes events to `stream`, by default whatever sys.stderr is when an event happens."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def event(self, name: str, fields: Mapping[str, object], *, level: str = "info") -> None:
        """Writes one line: time (UTC), level, event and the fields that are not None. JSON escapes control bytes."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {"ts": now, "level": level, "event": name}
        line.update({key: value for key, value in fields.items() if value is not None})
        self.line(json.dumps(line, default=str))

    def failure(self, name: str, error: BaseException, request_id: str) -> None:
        """Writes an error that is ours, with its traceback, for the operator alone."""
        text = "".join(traceback.format_exception(error))
        fields = {"request_id": request_id, "error": f"{type(error).__name__}: {error}", "traceback": text}
        self.event(name, fields, level="error")

    def line(self, text: str) -> None:
        """Writes a line for people."""
        stream = self._stream or sys.stderr
        with suppress(OSError, ValueError):  # nobody reads it any more: no reason to fail requests
            stream.write(text + "\n")
            stream.flush()
