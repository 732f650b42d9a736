"""ReplicaWait: requests wait while no replica is available for a moment, as when the only one of a model is restarted.

They wait from the moment when the last replica left, so a fleet that stays down refuses requests at once again.
"""

import asyncio
import time
from collections.abc import Collection
from math import inf

from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.router.endpoint import Endpoint
from headstart.router.filters import may_serve
from headstart.router.router import Router


class ReplicaWait:
    """The requests of one router that wait for a replica, for at most `seconds`."""

    def __init__(self, router: Router, seconds: float) -> None:
        self.num_waiting = 0
        self._router = router
        self._seconds = seconds
        self._removed_at = -inf
        self._up = asyncio.Event()

    def on_up(self) -> None:
        """Wake the waiting requests: a probe found a replica ready."""
        if self.num_waiting:
            self._up.set()
            self._up = asyncio.Event()

    def on_removed(self, url: str) -> None:
        """Note that a replica is about to be removed; another one may take its place, as in a rolling update."""
        if url in self._router.endpoints:
            self._removed_at = time.monotonic()

    def is_expected(self, now: float) -> bool:
        """Return whether a replica left a moment ago, so that requests may wait for it or another one."""
        return now < self._last_left(self._router.endpoints.values()) + self._seconds

    def deadline(self, call: ProxiedCall, now: float) -> float:
        """Return until when a request may wait for a replica, on time.monotonic; a time in the past: not at all.

        A request waits only after failures that say nothing about the request and after which the replica returns.
        """
        if not all(failure.is_momentary for failure in call.failures):
            return -inf
        endpoints = [one for one in self._router.endpoints.values() if may_serve(one, call.reading.request)]
        return (now if call.failures and endpoints else self._last_left(endpoints)) + self._seconds

    def _last_left(self, endpoints: Collection[Endpoint]) -> float:
        removed_at = -inf if self._router.endpoints else self._removed_at
        return max((one.health.left_at for one in endpoints), default=removed_at)

    async def wait(self, deadline: float) -> bool:
        """Wait until a replica is up; return False if none was until the deadline."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._up.wait()
        except TimeoutError:
            return False
        finally:
            self.num_waiting -= 1
        return True
