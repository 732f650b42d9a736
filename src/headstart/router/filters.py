"""Filters: the replicas that may serve a request, and for all others the reason why not."""

from collections.abc import Collection

from headstart.router.endpoint import Endpoint
from headstart.router.routing_request import RoutingRequest


def filter_endpoints_with_reasons(
    endpoints: Collection[Endpoint], request: RoutingRequest, now: float, tried: frozenset[str] = frozenset()
) -> tuple[list[Endpoint], dict[str, str]]:
    """Return the replicas that may serve `request`, and the reasons of all others by name.

    If all candidates are ejected, the one that returns first is used: without requests their recovery would not be
    noticed. `tried`: the replicas that failed this very request.
    """
    found: list[Endpoint] = []
    ejected: list[Endpoint] = []
    reasons: dict[str, str] = {}
    is_plain = not tried and not request.model and request.subset is None
    if is_plain:  # the usual case: all may serve it
        healthy = [
            endpoint
            for endpoint in endpoints
            if now >= (health := endpoint.health).up_at and not (health.absent or health.draining)
        ]
        if len(healthy) == len(endpoints):
            return healthy, reasons
    for endpoint in endpoints:
        reason = _reason(endpoint, request, now, tried)
        if reason is None:
            found.append(endpoint)
        else:
            reasons[endpoint.name] = reason
            if reason == "ejected":
                ejected.append(endpoint)
    if not found and ejected:
        last = min(ejected, key=lambda endpoint: (endpoint.health.up_at, endpoint.name))
        del reasons[last.name]
        found.append(last)
    return found, reasons


def matches_model_and_subset(endpoint: Endpoint, request: RoutingRequest) -> bool:
    """Return whether a replica may serve the request when it is available."""
    return _mismatch(endpoint, request) is None


def _mismatch(endpoint: Endpoint, request: RoutingRequest) -> str | None:
    if request.subset is not None and endpoint.name not in request.subset:
        return "not in the subset"
    if request.model and endpoint.models and request.model not in endpoint.models:
        return "other models"
    return None


def _reason(endpoint: Endpoint, request: RoutingRequest, now: float, tried: frozenset[str]) -> str | None:
    mismatch = _mismatch(endpoint, request)
    if mismatch is not None:
        return mismatch
    if endpoint.name in tried:
        return "tried"
    if endpoint.health.absent:
        return "absent"
    if endpoint.health.draining:
        return "draining"
    return None if endpoint.health.is_up(now) else "ejected"
