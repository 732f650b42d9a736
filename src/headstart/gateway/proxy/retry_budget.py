"""RetryBudget: limits retries to a share of the requests in flight, so that they do not overload the replicas."""

MIN_RETRIES = 3  # at once; a share of few requests is less than one


class RetryBudget:
    """At most `share` of the requests in flight may be retries. A retry counts until its request ends."""

    def __init__(self, share: float) -> None:
        self.num_active = 0  # requests in flight
        self.num_retrying = 0  # of these, requests that were sent again
        self.num_refused = 0
        self._share = share

    def take(self) -> bool:
        """Return whether one more request may be sent again; if so, it counts until `give_back`."""
        if self.num_retrying >= max(self._share * self.num_active, MIN_RETRIES if self._share else 0):
            self.num_refused += 1
            return False
        self.num_retrying += 1
        return True

    def give_back(self) -> None:
        """Count a retried request as ended."""
        self.num_retrying -= 1
