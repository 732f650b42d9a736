"""SideHealth: whether one side of the store works, and when to retry after a failure. No clock, no thread of its own.

```
 works ── failed (max_errors in a row) ──> paused for 1 s ── failed ──> paused for 2, 4 ... 30 s
   ^                                          │
   └──────────────── worked ──────────────────┘
```
Each Health belongs to one thread; others may read `reason`. A side that fails again soon after it recovered resumes
with its last pause, so that an unstable disk is neither retried nor reported all the time.
"""

import errno
import sys
from collections.abc import Callable
from contextlib import suppress

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds


def write_stderr_line(text: str) -> None:
    """Write one line to stderr, if it is still open."""
    with suppress(OSError, ValueError):
        print(f"headstart: KV store: {text}", file=sys.stderr, flush=True)


def describe_error(error: BaseException) -> str:
    """Return an error as text, with its symbol: "No space left on device (ENOSPC)"."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class SideHealth:
    """The state of one side, e.g. "writing"; `max_errors` in a row pause it."""

    def __init__(
        self,
        side: str,
        *,
        max_errors: int = 1,
        longest: float = LONGEST_PAUSE,
        say: Callable[[str], None] = write_stderr_line,
    ) -> None:
        """`longest`: the longest pause in seconds."""
        self.side = side
        self.reason = ""  # why it is paused; empty: it works
        self.num_degraded = 0  # times that it stopped working
        self._max_errors, self._longest = max_errors, longest
        self._say = say
        self._errors = 0  # in a row
        self._pause = 0.0
        self._retry_at = 0.0
        self._works_since = float("-inf")

    @property
    def failure_text(self) -> str:
        """The side and the reason; empty if it works."""
        reason = self.reason
        return f"{self.side}: {reason}" if reason else ""

    def may_attempt(self, now: float) -> bool:
        """Return whether it works, or its pause is over."""
        return not self.reason or now >= self._retry_at

    def record_failure(self, reason: str, now: float) -> None:
        """Record a failed attempt."""
        self._errors += 1
        if not self.reason and self._errors < self._max_errors:
            return
        is_recent = bool(self.reason) or now - self._works_since < self._longest
        self._pause = min(2 * self._pause, self._longest) if self._pause and is_recent else FIRST_PAUSE
        self._retry_at = now + self._pause
        began = not self.reason
        self.reason = reason
        if began:
            self.num_degraded += 1
            self._say(f"{self.side} is paused: {reason}; serving goes on, and it is tried again until it works")

    def record_success(self, now: float) -> None:
        """Record a successful attempt."""
        self._errors = 0
        if self.reason:
            self.reason = ""
            self._works_since = now
            self._say(f"{self.side} works again")
