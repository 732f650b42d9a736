"""Budget: a limit on the bytes that all requests of one process hold together; each request holds a Lease."""

from types import TracebackType
from typing import Self

from headstart.core.errors import QueueFullError


class Budget:
    """A limit on bytes shared by all requests; `what` names the bytes in error messages.

    `admits_one`: one request alone may hold any number of bytes, so that each can be served at some time.
    """

    def __init__(self, max_bytes: int, what: str, *, admits_one: bool = True) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.num_refused = 0
        self._what = what
        self._admits_one = admits_one

    def lease(self, num_bytes: int = 0) -> "Lease":
        """Return a lease of that size. Raises QueueFullError if that exceeds the limit."""
        lease = Lease(self)
        if num_bytes:
            lease.grow(num_bytes)
        return lease

    def has_room(self, more: int, own: int) -> bool:
        """Return whether a request that holds `own` bytes may hold `more`."""
        return self.held_bytes + more <= self.max_bytes or (self._admits_one and self.held_bytes <= own)

    def check(self, more: int, own: int) -> None:
        """Raise QueueFullError unless `has_room`."""
        if not self.has_room(more, own):
            self.num_refused += 1
            raise QueueFullError(
                f"{self.held_bytes} bytes of {self._what} are held, this one needs {more} more and the limit is "
                f"{self.max_bytes}: try again later"
            )


class Lease:
    """The part of a Budget that one request holds, until it is released or its `with` statement ends."""

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def grow(self, num_bytes: int) -> None:
        """Hold `num_bytes` more, or fewer if negative. Raises QueueFullError, and then nothing has changed."""
        if num_bytes > 0:
            self._budget.check(num_bytes, self.num_bytes)
        self.resize(self.num_bytes + num_bytes)

    def set(self, num_bytes: int) -> None:
        """Hold `num_bytes`. Raises as `grow`."""
        self.grow(num_bytes - self.num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Hold exactly `num_bytes`, even over the budget."""
        self._budget.held_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Hold nothing. Idempotent."""
        self.resize(0)
