"""Responses that the router writes itself: errors, the id of an answer, and the routing decision as a header."""

import json
import re
from collections import deque
from math import inf
from typing import Any

from headstart.core.errors import NoReplicaError
from headstart.gateway.proxy.upstream import AttemptError, Failure
from headstart.http.http_errors import HttpError
from headstart.router.routing_decision import RoutingDecision

ID_BYTES = 512  # at the beginning of an answer that are searched for its id
_ID = re.compile(rb'"id"\s*:\s*"([A-Za-z0-9._:-]{1,128})"')
MAX_WATCHED = 20  # decisions
WATCH_SECONDS = 10.0  # for which decisions are noted after the last look
WATCH_INTERVAL = 0.05  # seconds between two that are noted
MAX_EXPLAINED = 16  # replicas in the header that explains a decision: it must fit into a response head


def id_in(piece: bytes) -> str:
    """Return the first id in the beginning of an answer; "" if there is none."""
    found = _ID.search(piece, 0, ID_BYTES)
    return found[1].decode() if found else ""


def decision_header(decision: RoutingDecision) -> bytes:
    """Return the reasons of a routing decision as the value of a header."""
    return json.dumps(_explained(decision), separators=(",", ":")).encode()


class WatchedDecisions:
    """The latest routing decisions with the price of each replica; noted only while someone watches."""

    def __init__(self) -> None:
        self._latest: deque[dict[str, Any]] = deque(maxlen=MAX_WATCHED)
        self._until = self._next = -inf

    def note(self, decision: RoutingDecision, now: float) -> None:
        """Note a decision about a prompt before it is sent; a few each second are enough to watch."""
        if self._next <= now < self._until and decision.view.prompt_tokens:
            self._next = now + WATCH_INTERVAL
            self._latest.appendleft(_explained(decision))

    def watch(self, now: float) -> list[dict[str, Any]]:
        """Return the noted decisions, newest first, and note further ones for a while."""
        self._until = now + WATCH_SECONDS
        return list(self._latest)


def _explained(decision: RoutingDecision) -> dict[str, Any]:
    explanation = decision.explain()
    explanation["candidates"] = explanation["candidates"][:MAX_EXPLAINED]
    explanation["excluded"] = dict(list(explanation["excluded"].items())[:MAX_EXPLAINED])
    return explanation


def replica_lost() -> HttpError:
    """Return the error that ends a stream whose replica was lost."""
    return HttpError(
        502, "the replica was lost in the middle of this answer; send the request again", code="replica_lost"
    )


def too_many_losses(request_id: str, num_losses: int) -> HttpError:
    """Return the error of a request during which too many replicas were lost."""
    return HttpError(
        502,
        f"replicas were lost {num_losses} times while they had request {request_id}; it is not sent to another one",
        code="replica_lost",
        headers={"x-should-retry": "false"},
    )


def no_answer(error: AttemptError, num_attempts: int) -> HttpError:
    """Return the error for a request that no replica answered."""
    if error.failure is Failure.GARBLED:
        message = "the replica's answer could not be read as one of this API; its operator finds more in the metrics"
        return HttpError(502, message, code="bad_replica_answer", headers={"retry-after": "1"})
    unreached = dict.fromkeys((Failure.REFUSED, Failure.UNREACHED), "could not be reached")
    what = {Failure.SILENT: "did not answer in time", **unreached}
    text = what.get(error.failure, "gave no answer")
    return HttpError(
        502,
        f"the replica {text}, attempt {num_attempts} being the last; try again",
        code="replica_unreachable",
        headers={"retry-after": "1"},
    )


def no_replicas(error: NoReplicaError) -> HttpError:
    """Return the error for a request for which no replica was available."""
    reasons = sorted(set(error.reasons.values()))
    why = f" ({', '.join(reasons)})" if reasons else ""
    return HttpError(
        503, f"no replica can take this request now{why}; try again", code="no_replicas", headers={"retry-after": "1"}
    )
