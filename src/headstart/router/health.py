"""Health: whether a replica is asked at all, by what became of the requests sent there; a body may know more.

One refused connection or three failures in a row eject it; it comes back after a second, and after twice as long each
time it fails again, up to half a minute. Then it is on trial (half-open): one request goes there, and more only when
that one found it well, or every TRIAL_SECONDS.
"""

FAILURES = 3
MIN_AWAY = 1.0  # seconds
MAX_AWAY = 30.0
TRIAL_SECONDS = 10.0  # for one request on trial to get its first token; whoever is slower keeps nobody else away


class Health:
    """The state of one replica. `draining`: it said itself that it takes nothing new. `absent`: a body looked, and
    there is nobody, or nobody who is ready."""

    __slots__ = ("_away", "_failures", "_trial_until", "_until", "absent", "draining", "num_ejections")

    def __init__(self) -> None:
        self.draining = False
        self.absent = False
        self.num_ejections = 0
        self._failures = 0
        self._away = 0.0
        self._until = 0.0
        self._trial_until = 0.0

    def is_up(self, now: float) -> bool:
        """Whether it is not ejected at the moment, and not on trial with another request."""
        return now >= self._until and now >= self._trial_until

    def back_at(self) -> float:
        """When its ejection or the trial that follows ends, or ended."""
        return max(self._until, self._trial_until)

    def sent(self, now: float) -> None:
        """Note that a request goes there: the first after an ejection is a trial."""
        if self._away and now >= self._until:
            self._trial_until = now + TRIAL_SECONDS

    def failed(self, now: float, *, refused: bool = False, sent_at: float | None = None) -> bool:
        """A request failed there; whether that ejects it now. `refused`: there was no connection at all, or the whole
        replica is silent. Of one that was sent before the last ejection that proves nothing."""
        if now < self._until or (sent_at is not None and sent_at < self._until):
            return False
        self._failures += FAILURES if refused or self._away else 1  # on probation one is enough
        if self._failures < FAILURES:
            return False
        self._failures = 0
        self._away = min(max(2 * self._away, MIN_AWAY), MAX_AWAY)
        self._until, self._trial_until = now + self._away, 0.0
        self.num_ejections += 1
        return True

    def present(self) -> None:
        """A body looked, and it is there and takes requests; what failed before it was started again is forgotten."""
        if self.absent or self.draining:
            self._failures, self._away, self._until, self._trial_until = 0, 0.0, 0.0, 0.0
        self.absent = self.draining = False

    def succeeded(self, now: float, *, sent_at: float | None = None) -> None:
        """A request was answered; of one that was sent before an ejection that proves nothing."""
        if now >= self._until and (sent_at is None or sent_at >= self._until):
            self._failures, self._away, self._trial_until = 0, 0.0, 0.0
