"""PrefixQueue: a waiting queue in the order k-LPM, with the methods that vLLM's scheduler calls."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

WINDOW = 64  # oldest waiting requests that are compared: a comparison costs some lookups for each


class Waiting(Protocol):
    """A request, as far as its order is concerned."""

    num_preemptions: int
    num_computed_tokens: int


R = TypeVar("R", bound=Waiting)


class PrefixQueue(Generic[R]):
    """Of every `k` admissions the first is the oldest request; the others have the longest cached prefix.

    So a request with r older ones is admitted within k(r + 1) admissions (arXiv 2502.04677). Preempted requests go
    before all others and are not counted. `match` returns the cached tokens or blocks of a request's prefix;
    `is_admitted` whether a request that was taken out was admitted, rather than skipped until the next step.
    """

    def __init__(self, k: int, match: Callable[[R], int], is_admitted: Callable[[R], bool]) -> None:
        self._k, self._match, self._is_admitted = k, match, is_admitted
        self._requests: list[R] = []  # by age
        self._ages: WeakKeyDictionary[R, int] = WeakKeyDictionary()
        self._next_age = count()
        self._matches: dict[R, int] = {}  # of this step
        self._taken: R | None = None
        self._num_admissions = 0

    def begin_step(self) -> None:
        """Forget the matches of the step before: blocks have been written and evicted since."""
        self._count()
        self._matches.clear()

    def peek_request(self) -> R:
        """Return the request to try next. Raises IndexError if there is none."""
        self._count()
        if not self._requests:
            raise IndexError("peek from an empty queue")
        oldest = self._requests[0]
        if self._num_admissions % self._k == 0 or oldest.num_preemptions:
            return oldest
        return max(self._requests[:WINDOW], key=self._match_of)  # the oldest of equal ones

    def pop_request(self) -> R:
        """Remove and return the request that `peek_request` returns."""
        request = self.peek_request()
        self._remove(request)
        self._taken = None if request.num_preemptions else request
        return request

    def add_request(self, request: R) -> None:
        """Add a request: the newest, or at its old place."""
        if request not in self._ages:
            self._ages[request] = next(self._next_age)
        insort(self._requests, request, key=self._age)

    def prepend_request(self, request: R) -> None:
        """Return a preempted request to its place."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[R]) -> None:
        """Return requests that were skipped to their places."""
        self._count()
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: R) -> None:
        """Remove a request. Raises ValueError if it is not here."""
        if request not in self._requests:
            raise ValueError("the request is not in this queue")
        self._remove(request)

    def remove_requests(self, requests: Iterable[R]) -> None:
        """Remove those of these requests that are here."""
        gone = set(requests)
        self._requests = [request for request in self._requests if request not in gone]

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, place: int) -> R:
        """Return a request by its place in the order of age."""
        return self._requests[place]

    def __iter__(self) -> Iterator[R]:
        """Iterate over the requests, by age."""
        return iter(self._requests)

    def _count(self) -> None:
        """Count the last request that was taken out, if it was admitted."""
        taken, self._taken = self._taken, None
        if taken is not None and self._is_admitted(taken):
            self._num_admissions += 1

    def _remove(self, request: R) -> None:
        del self._requests[bisect_left(self._requests, self._age(request), key=self._age)]

    def _match_of(self, request: R) -> int:
        if request not in self._matches:
            self._matches[request] = self._match(request)
        return self._matches[request]

    def _age(self, request: R) -> tuple[bool, int]:
        return (not request.num_preemptions, self._ages[request])
