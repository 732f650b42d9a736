"""PublisherTrust: when a publisher of KV events is suspended, and for how long.

A strike is a batch that cannot be read, a removal that cannot be read, or an index that exceeded its capacity. Several
strikes in a short time, or more bytes than any engine publishes, suspend the publisher; a suspension soon after another
one is twice as long. Time is an argument: seconds, of any steady clock.
"""

from collections import deque

MAX_STRIKES = 8  # within STRIKE_SECONDS
STRIKE_SECONDS = 60.0
FIRST_SUSPENSION = 5.0  # seconds
MAX_SUSPENSION = 300.0
BURST_BYTES = 2**30  # a replay of 10,000 batches of a full prefill step is 600 MB
BYTES_PER_SECOND = 2**26  # an engine that prefills 100,000 tokens a second publishes 1 MB


class UntrustedPublisherError(Exception):
    """The publisher is suspended."""


class PublisherTrust:
    """The strikes and bytes of one publisher."""

    def __init__(self) -> None:
        self._strikes: deque[float] = deque(maxlen=MAX_STRIKES)
        self._bytes = float(BURST_BYTES)  # that may still arrive at once
        self._refilled_at = 0.0
        self._suspended_at = -MAX_SUSPENSION
        self._suspension = 0.0

    def strike(self, reason: str, now: float) -> bool:
        """Count a strike; return whether it is the first in STRIKE_SECONDS and is logged.

        Raises UntrustedPublisherError if there were too many.
        """
        is_first = not self._strikes or now - self._strikes[-1] > STRIKE_SECONDS
        self._strikes.append(now)
        if len(self._strikes) == MAX_STRIKES and now - self._strikes[0] <= STRIKE_SECONDS:
            raise UntrustedPublisherError(f"{reason}, and {MAX_STRIKES} such faults within {STRIKE_SECONDS:.0f} s")
        return is_first

    def received(self, num_bytes: int, now: float) -> None:
        """Count bytes. Raises UntrustedPublisherError if there were too many."""
        self._bytes += (now - self._refilled_at) * BYTES_PER_SECOND
        self._bytes = min(self._bytes, BURST_BYTES) - num_bytes
        self._refilled_at = now
        if self._bytes < 0:
            raise UntrustedPublisherError(
                f"it sent more than {BURST_BYTES >> 20} MiB at more than {BYTES_PER_SECOND >> 20} MiB a second"
            )

    def suspend(self, now: float) -> float:
        """Reset strikes and bytes, and return for how many seconds the publisher is suspended."""
        is_again = now - self._suspended_at <= 2 * self._suspension + STRIKE_SECONDS
        self._suspension = min(2 * self._suspension, MAX_SUSPENSION) if is_again else FIRST_SUSPENSION
        self._suspension = max(self._suspension, FIRST_SUSPENSION)
        self._suspended_at = now
        self._strikes.clear()
        self._bytes = BURST_BYTES
        return self._suspension
