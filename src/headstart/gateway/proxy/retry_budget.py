"""RetryBudget: of the requests under way only a share may be retries, so that trying again never becomes the load."""

MIN_RETRIES = 3  # at once; with few requests under way a share is nothing


class RetryBudget:
    """`share` of the requests under way. A retry holds its place until its request ends."""

    def __init__(self, share: float) -> None:
        self.num_active = 0  # requests under way
        self.num_retrying = 0  # of them those that were sent again
        self.num_refused = 0
        self._share = share

    def take(self) -> bool:
        """Whether one more request may be sent again; if so, it counts until `give_back`."""
        if self.num_retrying >= max(self._share * self.num_active, MIN_RETRIES if self._share else 0):
            self.num_refused += 1
            return False
        self.num_retrying += 1
        return True

    def give_back(self) -> None:
        """A request that was sent again has ended."""
        self.num_retrying -= 1
