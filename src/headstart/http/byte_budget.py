"""Budget: a limit on the bytes that all requests of one process hold together; each request holds a Lease.

A tenant with several requests leaves a part of the budget free for other tenants: it may hold at most LENT times what
is free then. So one tenant may hold three quarters, two three sevenths each, and a further one always finds bytes.
"""

from types import TracebackType
from typing import Self

from headstart.core.errors import QueueFullError

LENT = 3  # times the free bytes


def may_tenant_hold_more(total: int, own: int, more: int, limit: int, num_tenants: int) -> bool:
    """Return whether a tenant that holds `own` of `total` may hold `more`: below the limit, or within its share of it.

    `num_tenants`: those that hold anything, it included. What is lent is not taken back, so with n tenants up to
    1 + 1/2 + ... + 1/n times the limit are held.
    """
    return total + more <= limit or own + more <= limit // num_tenants


class ByteBudget:
    """A limit on bytes shared by all requests; `what` names the bytes in error messages.

    `admits_one`: one request alone may hold any number of bytes, so that each can be served at some time.
    """

    def __init__(self, max_bytes: int, what: str, *, admits_one: bool = True) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.num_refused = 0
        self._what = what
        self._admits_one = admits_one
        self._held_by: dict[str, int] = {}  # tenant -> bytes; without keys there are no tenants

    def lease(self, num_bytes: int = 0, tenant: str = "") -> "ByteLease":
        """Return a lease of that size. Raises QueueFullError if that exceeds the limit."""
        lease = ByteLease(self, tenant)
        if num_bytes:
            lease.grow(num_bytes)
        return lease

    def has_room(self, more: int, lease: "ByteLease") -> bool:
        """Return whether a request may hold `more` bytes."""
        free = self.max_bytes - self.held_bytes - more
        if free < 0:
            return self._admits_one and self.held_bytes <= lease.num_bytes
        held = self._held_by.get(lease.tenant, 0)
        return held <= lease.num_bytes or held + more <= LENT * free

    def check_room(self, more: int, lease: "ByteLease") -> None:
        """Raise QueueFullError unless `has_room`."""
        if not self.has_room(more, lease):
            self.num_refused += 1
            raise QueueFullError(
                f"{self.held_bytes} bytes of {self._what} are held, this one needs {more} more and the limit is "
                f"{self.max_bytes}, a part of it for other tenants: try again later"
            )

    def adjust_held_bytes(self, num_bytes: int, tenant: str) -> None:
        """Count bytes, or fewer if negative."""
        self.held_bytes += num_bytes
        if tenant:
            self._held_by[tenant] = self._held_by.get(tenant, 0) + num_bytes
            if not self._held_by[tenant]:
                del self._held_by[tenant]


class ByteLease:
    """The part of a Budget that one request holds, until it is released or its `with` statement ends."""

    __slots__ = ("_budget", "num_bytes", "tenant")

    def __init__(self, budget: ByteBudget, tenant: str = "") -> None:
        self._budget = budget
        self.tenant = tenant
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
            self._budget.check_room(num_bytes, self)
        self.force_resize(self.num_bytes + num_bytes)

    def set(self, num_bytes: int) -> None:
        """Hold `num_bytes`. Raises as `grow`."""
        self.grow(num_bytes - self.num_bytes)

    def force_resize(self, num_bytes: int) -> None:
        """Hold exactly `num_bytes`, even over the budget."""
        self._budget.adjust_held_bytes(num_bytes - self.num_bytes, self.tenant)
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Hold nothing. Idempotent."""
        self.force_resize(0)
