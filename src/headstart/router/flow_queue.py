"""FairQueue: requests that wait in the router, shared out fairly among tenants. No I/O, no clock.

Deficit round robin (Shreedhar and Varghese, 1995) over uncached tokens: tenants take turns, and each may send as many
tokens per round as any other, whatever the number of its requests. Within a tenant smaller `priority` values go first,
equal ones in order of arrival; a priority moves no request past those of other tenants.
"""

from collections import deque
from heapq import heappop, heappush

QUANTUM = 16  # uncached tokens of a tenant per round


class WaitingRequest:
    """One request in the queue. `cost`: its uncached tokens, at least 1."""

    __slots__ = ("cost", "is_waiting", "key", "tenant")

    def __init__(self, tenant: str, priority: int, number: int, cost: int) -> None:
        self.tenant = tenant
        self.key = (priority, number)
        self.cost = cost
        self.is_waiting = True

    def __lt__(self, other: "WaitingRequest") -> bool:
        return self.key < other.key


class _Flow:
    """The waiting requests of one tenant, and the tokens that it may still send in this round."""

    __slots__ = ("deficit", "requests")

    def __init__(self) -> None:
        self.deficit = 0
        self.requests: list[WaitingRequest] = []  # a heap; some have left it

    def head(self) -> WaitingRequest | None:
        """Return the next request, if there is any."""
        while self.requests and not self.requests[0].is_waiting:
            heappop(self.requests)
        return self.requests[0] if self.requests else None


class FairQueue:
    """The waiting requests of all tenants."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_tokens = 0  # uncached ones of all that wait
        self._flows: dict[str, _Flow] = {}
        self._turns: deque[str] = deque()  # tenants with requests; the first one's turn it is
        self._count = 0

    def add(self, tenant: str, priority: int, cost: int) -> WaitingRequest:
        """Add a request, and return it for `remove`."""
        self._count += 1
        request = WaitingRequest(tenant, priority, self._count, max(cost, 1))
        if tenant not in self._flows:
            self._flows[tenant] = _Flow()
            self._turns.append(tenant)
        heappush(self._flows[tenant].requests, request)
        self.num_waiting += 1
        self.num_tokens += request.cost
        return request

    def remove(self, request: WaitingRequest) -> None:
        """Remove a request that waits no longer. Idempotent."""
        if request.is_waiting:
            request.is_waiting = False
            self.num_waiting -= 1
            self.num_tokens -= request.cost

    def pop(self) -> WaitingRequest | None:
        """Remove and return the request that is sent next."""
        while self._turns:
            missing: list[int] = []
            for _ in range(len(self._turns)):
                tenant = self._turns[0]
                flow = self._flows[tenant]
                request = flow.head()
                if request is None:  # without requests a tenant saves nothing up
                    self._turns.popleft()
                    del self._flows[tenant]
                elif request.cost <= flow.deficit:
                    flow.deficit -= request.cost
                    self.remove(request)
                    return request
                else:
                    missing.append(request.cost - flow.deficit)
                    self._turns.rotate(-1)
            rounds = -(-min(missing, default=0) // QUANTUM)
            for flow in self._flows.values():
                flow.deficit += rounds * QUANTUM
        return None
