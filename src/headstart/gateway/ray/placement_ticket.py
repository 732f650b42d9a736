"""PlacementRequest: one request's question to Ray's request router.

RayReplicaListNotifier: tells of the replicas that Ray lists.

Ray calls its request router in a thread of its own, the router of this package lives on the event loop of the ingress.
Both classes carry values from one to the other; neither blocks.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from headstart.core.errors import NoReplicaError
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.router.routing_decision import RoutedInFlight

Place = Callable[[Collection[str]], RoutedInFlight]
"""Places a request at one of the named replicas, and records that. Raises NoReplicaError."""


class RayReplicaListNotifier:
    """The replicas that Ray lists. Create it on the loop on which `changed` is to be called."""

    def __init__(self, changed: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._changed = changed
        self._urls: frozenset[str] | None = None

    def report_urls(self, urls: Iterable[str]) -> None:
        """Pass on the addresses of all replicas that Ray lists now. May be called from any thread."""
        self.loop.call_soon_threadsafe(self._report, frozenset(urls))

    def _report(self, urls: frozenset[str]) -> None:
        if urls != self._urls:
            self._urls = urls
            self._changed([ReplicaAddress(url) for url in sorted(urls)])


class PlacementRequest:
    """One request for a placement. It is answered once: `decision` is the request at its replica, or the error.

    A replica receives `request_id` in its place.
    """

    def __init__(self, request_id: str, fleet: RayReplicaListNotifier, place: Place) -> None:
        self.request_id = request_id
        self.fleet = fleet
        self.decision: asyncio.Future[RoutedInFlight] = fleet.loop.create_future()
        self.refused: Callable[[], object] = lambda: None  # called if Ray cannot use the decision
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.request_id,)

    async def rank_replicas(self, names: Collection[str]) -> Sequence[str]:
        """Return the names of the candidates, best first; none if there is no decision to make. From any loop."""
        if asyncio.get_running_loop() is self.fleet.loop:
            return self._rank(names)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ranked(names), self.fleet.loop))

    async def _ranked(self, names: Collection[str]) -> Sequence[str]:
        return self._rank(names)

    def _rank(self, names: Collection[str]) -> Sequence[str]:
        if self.decision.done():  # the chosen replica is full or gone for Ray, or the request has ended
            self.refused()
            return ()
        try:
            in_flight = self._place(names)
        except NoReplicaError as error:
            self.decision.set_exception(error)
            return ()
        self.decision.set_result(in_flight)
        return [in_flight.endpoint.name, *in_flight.fallbacks]


class RayRouterWarmupCall:
    """A call that goes to any replica: by it Ray's request router gets to know the fleet before the first request."""

    def __init__(self, fleet: RayReplicaListNotifier) -> None:
        self.fleet = fleet

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("introduction",)

    async def rank_replicas(self, names: Collection[str]) -> Sequence[str]:
        """Return the names as they come."""
        return tuple(names)
