"""LoadEstimate: the expected duration of loads, from recent measurements. Pure: no clock, one thread.

    seconds = latency + blocks waiting or requested x seconds per block

The average is per block, so that the fixed costs of small loads have little weight in it. An estimate without new
measurements decays after some seconds, so that eventually a load is tried again; while that one is in flight, the old
estimate applies to all others.
"""

KEEP = 0.7  # weight of the past at every measurement
FADE_SECONDS = 5.0  # without a load, after which the estimate begins to decay; also its half-life


class LoadEstimate:
    """An exponentially weighted average."""

    def __init__(self) -> None:
        self._seconds, self._blocks, self._latency = 0.0, 0.0, 0.0
        self._last_at = float("-inf")  # when a load was requested or measured
        self._was_raised = False  # since the last measurement

    def expected(self, num_blocks: int, now: float) -> float:
        """Return the expected seconds to load so many blocks; 0.0 as long as nothing has been measured."""
        if not self._blocks:
            return 0.0
        idle = now - self._last_at - FADE_SECONDS
        fade = 0.5 ** (idle / FADE_SECONDS) if idle > 0 else 1.0
        return (self._latency + num_blocks * self._seconds / self._blocks) * fade

    def blocks_per_s(self) -> float:
        """Return the blocks per second while loading; 0.0: not measured."""
        return self._blocks / self._seconds if self._seconds else 0.0

    def asked(self, now: float) -> None:
        """Record the start of a load."""
        self._last_at = now

    def measured(self, num_blocks: int, seconds: float, latency: float, now: float) -> None:
        """Record that `num_blocks` were read in `seconds`, by a load that had waited for `latency` before."""
        is_first = not self._blocks
        self._latency = latency if is_first else KEEP * self._latency + (1 - KEEP) * latency
        self._seconds = KEEP * self._seconds + seconds
        self._blocks = KEEP * self._blocks + num_blocks
        self._last_at = now
        self._was_raised = False

    def too_slow(self, num_blocks: int, seconds: float, now: float) -> None:
        """Record that a load was given up after `seconds`, within which `num_blocks` should have been read."""
        if not self._blocks:
            self._blocks = float(num_blocks)
        per_block = self._seconds / self._blocks * (1 if self._was_raised else 2)
        self._seconds = self._blocks * max(per_block, seconds / num_blocks)
        self._was_raised = True
        self._last_at = now
