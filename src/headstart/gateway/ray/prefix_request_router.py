"""PrefixRequestRouter: Ray Serve's RequestRouter (2.60), answered by the policy core of this package.

It holds no policy itself: the argument of a call is a PlacementRequest, which asks the router of the ingress. Ray
pickles this module by value, so nothing else is defined here.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headstart.gateway.ray.placement_ticket import PlacementRequest, RayReplicaListNotifier, RayRouterWarmupCall


class PrefixRequestRouter(RequestRouter):
    """Ranks the replicas as a request's ticket does, and reports the list of replicas to the ticket's fleet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fleet: RayReplicaListNotifier | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates, each in a rank of its own, best first. None: Ray asks again after a pause."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # without it, Ray asks again without a pause
        ticket = pending_request.args[0]
        assert isinstance(ticket, PlacementRequest | RayRouterWarmupCall), "a call without a ticket"
        if ticket.fleet is not self._fleet:
            self._fleet = ticket.fleet
            self._report()
        by_url = {replica.replica_metadata["url"]: replica for replica in candidate_replicas}
        return [[by_url[name]] for name in await ticket.rank_replicas(by_url.keys())]

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Note the replicas that run now."""
        super().update_replicas(list(replicas))
        self._report()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Note that a replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._report()

    def _report(self) -> None:
        if self._fleet is not None:
            self._fleet.report_urls(replica.replica_metadata["url"] for replica in self.curr_replicas.values())
