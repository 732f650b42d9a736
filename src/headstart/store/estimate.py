"""LoadEstimate: how long loads take, as measured lately. Pure: no clock, one thread's.

    seconds = latency + blocks waiting or asked for x seconds per block

Blocks count by number, so that the fixed costs of small loads hardly show in the time per block. An estimate that
nothing has confirmed for some seconds fades, so that sooner or later a load is tried again; while that one is under
way, the old estimate holds for all others.
"""

KEEP = 0.7  # of what was known, with every piece measured
FADE_SECONDS = 5.0  # without a load until the estimate begins to fade, and then to half of it


class LoadEstimate:
    """An average that forgets."""

    def __init__(self) -> None:
        self._seconds, self._blocks, self._latency = 0.0, 0.0, 0.0
        self._last_at = float("-inf")  # when a load was asked for or measured
        self._was_raised = False  # since the last measurement

    def expected(self, num_blocks: int, now: float) -> float:
        """Seconds until so many blocks are there; 0.0 as long as nothing has been measured."""
        if not self._blocks:
            return 0.0
        idle = now - self._last_at - FADE_SECONDS
        fade = 0.5 ** (idle / FADE_SECONDS) if idle > 0 else 1.0
        return (self._latency + num_blocks * self._seconds / self._blocks) * fade

    def blocks_per_s(self) -> float:
        """While loading; 0.0: not measured."""
        return self._blocks / self._seconds if self._seconds else 0.0

    def asked(self, now: float) -> None:
        """A load begins."""
        self._last_at = now

    def measured(self, num_blocks: int, seconds: float, latency: float, now: float) -> None:
        """So many blocks were read in so many seconds, of a load that had waited for `latency` before that."""
        is_first = not self._blocks
        self._latency = latency if is_first else KEEP * self._latency + (1 - KEEP) * latency
        self._seconds = KEEP * self._seconds + seconds
        self._blocks = KEEP * self._blocks + num_blocks
        self._last_at = now
        self._was_raised = False

    def too_slow(self, num_blocks: int, seconds: float, now: float) -> None:
        """A load was given up after `seconds`, before which so many blocks should have come."""
        if not self._blocks:
            self._blocks = float(num_blocks)
        per_block = self._seconds / self._blocks * (1 if self._was_raised else 2)
        self._seconds = self._blocks * max(per_block, seconds / num_blocks)
        self._was_raised = True
        self._last_at = now
