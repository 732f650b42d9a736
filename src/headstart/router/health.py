"""Health: whether a replica is asked at all, by what became of the requests sent there; a body may know more.

One refused connection or three failures in a row eject it; it comes back after a second, and after twice as long each
time it fails again, up to half a minute. The one request that then finds it well ends that.
"""

FAILURES = 3
MIN_AWAY = 1.0  # seconds
MAX_AWAY = 30.0


class Health:
    """The state of one replica. `draining`: it said itself that it takes nothing new. `absent`: a body looked, and
    there is nobody, or nobody who is ready."""

    __slots__ = ("_away", "_failures", "_until", "absent", "draining", "num_ejections")

    def __init__(self) -> None:
        self.draining = False
        self.absent = False
        self.num_ejections = 0
        self._failures = 0
        self._away = 0.0
        self._until = 0.0

    def is_up(self, now: float) -> bool:
        """Whether it is not ejected at the moment."""
        return now >= self._until

    def back_at(self) -> float:
        """When its ejection ends, or ended."""
        return self._until

    def failed(self, now: float, *, refused: bool = False) -> bool:
        """A request failed there; whether that ejects it now. `refused`: there was no connection at all."""
        if not self.is_up(now):
            return False
        self._failures += FAILURES if refused or self._away else 1  # on probation one is enough
        if self._failures < FAILURES:
            return False
        self._failures = 0
        self._away = min(max(2 * self._away, MIN_AWAY), MAX_AWAY)
        self._until = now + self._away
        self.num_ejections += 1
        return True

    def present(self) -> None:
        """A body looked, and it is there and takes requests; what failed before it was started again is forgotten."""
        if self.absent or self.draining:
            self._failures, self._away, self._until = 0, 0.0, 0.0
        self.absent = self.draining = False

    def succeeded(self, now: float) -> None:
        """A request was answered; of one that was sent before an ejection that proves nothing."""
        if self.is_up(now):
            self._failures, self._away = 0, 0.0
