"""Logs on stderr: one JSON object per line, or text on a terminal. Never prompts, completions, keys or salts."""

import json
import shutil
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

_CLEAR = "\r\x1b[2K"  # moves to the first column and erases the line


class ServerLog:
    """A log that writes to `stream`, by default to the current sys.stderr.

    `is_terminal` overrides the stream's isatty(), for pipes whose lines are passed on to a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, is_terminal: bool | None = None) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._status = ""
        self._lock = threading.Lock()  # lines of replicas are written from threads

    @property
    def is_terminal(self) -> bool:
        """Whether the lines go to a terminal."""
        if self._is_terminal is not None:
            return self._is_terminal
        with suppress(ValueError):  # the stream is closed
            return (self._stream or sys.stderr).isatty()
        return False

    def event(self, name: str, fields: Mapping[str, object], *, level: str = "info", text: str | None = None) -> None:
        """Write one JSON line: time (UTC), level, event and the fields that are not None. JSON escapes control bytes.

        On a terminal, write the local time and `text` instead, if `text` is given.
        """
        if text is not None and self.is_terminal:
            self.write_line(f"{datetime.now():%H:%M:%S} {escape_unprintable(text)}")
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {"ts": now, "level": level, "event": name}
        line.update({key: value for key, value in fields.items() if value is not None})
        self.write_line(json.dumps(line, default=str))

    def log_exception(self, name: str, error: BaseException, request_id: str) -> None:
        """Write an internal error with its traceback, for the operator only."""
        text = "".join(traceback.format_exception(error))
        fields = {"request_id": request_id, "error": f"{type(error).__name__}: {error}", "traceback": text}
        self.event(name, fields, level="error")

    def write_line(self, text: str) -> None:
        """Write a line for people, above the status line if there is one."""
        text = escape_unprintable(text, "\n")
        with self._lock:
            self._write(f"{_CLEAR}{text}\n{self._status}\r" if self._status else f"{text}\n")

    def show_status_line(self, text: str) -> None:
        """Show `text` as the status line below all lines on a terminal; an empty text removes it."""
        if not self.is_terminal:
            return
        with self._lock:
            is_shown, self._status = bool(self._status), text[: shutil.get_terminal_size().columns - 1]
            if text or is_shown:
                self._write(f"{_CLEAR}{self._status}\r" if text else _CLEAR)

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stderr
        with suppress(OSError, ValueError):  # a closed log stream must not fail requests
            stream.write(text)
            stream.flush()


def escape_unprintable(text: str, kept: str = "") -> str:
    """Return `text` with non-printable characters escaped, but those in `kept`: others choose paths, labels, errors.

    So no escape sequence of a client, a server or a replica reaches a terminal.
    """
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)
