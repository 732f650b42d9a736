"""Health: whether a replica gets requests, from the outcome of earlier requests and from external probes.

One refused connection or three failures in a row eject it. It returns after a second, and after twice as long each time
it fails again, up to half a minute. Then it is on trial (half-open): one request is sent there, and more only after
that one succeeded, or every TRIAL_SECONDS.
"""

from math import inf

FAILURES = 3
MIN_AWAY = 1.0  # seconds
MAX_AWAY = 30.0
TRIAL_SECONDS = 10.0  # for the first token of a trial request; a slower one does not block others


class ReplicaHealth:
    """The health of one replica. `draining`: it reports that it accepts no new requests.

    `absent`: a probe found no process there, or none that is ready. `left_at`: when one of the two began.
    """

    __slots__ = ("_away", "_failures", "_until", "absent", "draining", "left_at", "num_ejections", "up_at")

    def __init__(self) -> None:
        self.draining = False
        self.absent = False
        self.left_at = -inf
        self.num_ejections = 0
        self._failures = 0
        self._away = 0.0
        self._until = 0.0
        self.up_at = 0.0  # when its ejection or the trial that follows ends, or ended

    def is_up(self, now: float) -> bool:
        """Return whether it is neither ejected nor on trial with another request."""
        return now >= self.up_at

    def record_sent(self, now: float) -> None:
        """Record that a request is sent there: the first after an ejection is a trial."""
        if self._away and now >= self._until:
            self.up_at = now + TRIAL_SECONDS

    def record_failed(self, now: float, *, refused: bool = False, sent_at: float | None = None) -> bool:
        """Record a failed request; return whether that ejects the replica.

        `refused`: no connection was possible, or the whole replica is silent. A request sent before the last ejection
        is ignored.
        """
        if now < self._until or (sent_at is not None and sent_at < self._until):
            return False
        self._failures += FAILURES if refused or self._away else 1  # on probation one is enough
        if self._failures < FAILURES:
            return False
        self._failures = 0
        self._away = min(max(2 * self._away, MIN_AWAY), MAX_AWAY)
        self._until = self.up_at = now + self._away
        self.num_ejections += 1
        return True

    def record_unavailable(self, now: float, *, absent: bool = False, draining: bool = False) -> None:
        """Record that it accepts no requests until `present` is called."""
        if not (self.absent or self.draining):
            self.left_at = now
        self.absent, self.draining = absent, draining

    def record_ready(self) -> None:
        """Record that a probe found the replica ready; failures from before its restart are dropped."""
        if self.absent or self.draining:
            self._failures, self._away, self._until, self.up_at = 0, 0.0, 0.0, 0.0
        self.absent = self.draining = False

    def record_succeeded(self, now: float, *, sent_at: float | None = None) -> None:
        """Record an answered request; one sent before an ejection is ignored."""
        if now >= self._until and (sent_at is None or sent_at >= self._until):
            self._failures, self._away, self.up_at = 0, 0.0, self._until
