"""Budget: a limit on the bytes that all requests of one process hold together; each request holds a Lease."""

from headstart.core.errors import QueueFullError


class Budget:
    """A limit on bytes shared by all requests; `what` names the bytes in error messages."""

    def __init__(self, max_bytes: int, what: str) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._what = what

    def lease(self, num_bytes: int = 0) -> "Lease":
        """Return a lease of that size. Raises QueueFullError unless nothing is held: then any size is granted."""
        lease = Lease(self)
        if num_bytes:
            lease.grow(num_bytes)
        return lease

    def has_room(self, more: int, own: int) -> bool:
        """Return whether `more` bytes fit in the budget, or only the caller's `own` bytes are held."""
        return self.held_bytes <= own or self.held_bytes + more <= self.max_bytes

    def check(self, more: int, own: int) -> None:
        """Raise QueueFullError if `more` bytes exceed the budget while others than the caller's `own` are held."""
        if not self.has_room(more, own):
            raise QueueFullError(
                f"{self.held_bytes} bytes of {self._what} are held, this one needs {more} more and the limit is "
                f"{self.max_bytes}: try again later"
            )


class Lease:
    """The part of a Budget that one request holds, until it is released."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Hold `num_bytes` more. Raises QueueFullError, and then nothing has changed."""
        self._budget.check(num_bytes, self.num_bytes)
        self.resize(self.num_bytes + num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Hold exactly `num_bytes`, even over the budget."""
        self._budget.held_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Hold nothing. Idempotent."""
        self.resize(0)
