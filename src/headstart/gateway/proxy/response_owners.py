"""ResponseOwners: the replica that holds each stored response, by the id of the response.

Only this router's latest answers are known: ids of another router, of before a restart, or beyond MAX_RESPONSES are
unknown, and their requests are answered with 404.
"""

from collections import OrderedDict
from typing import NamedTuple

from headstart.http.http_errors import HttpError

MAX_RESPONSES = 32_768  # about 300 bytes each


class _Owner(NamedTuple):
    replica: str  # URL
    domain: bytes  # of the router's tenant that created the response; empty: the replica alone checks keys


class ResponseOwners:
    """Replicas by response id, least recently used first."""

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    def add(self, response_id: str, replica: str, domain: bytes) -> None:
        """Note that a replica holds a response."""
        if not response_id:
            return
        self._owners[response_id] = _Owner(replica, domain)
        self._owners.move_to_end(response_id)
        if len(self._owners) > self._max_responses:
            self._owners.popitem(last=False)

    def find(self, response_id: str, domain: bytes, param: str) -> str:
        """Return the URL of the replica that holds a response.

        Raises HttpError 404 for an id that is unknown or another tenant's; `param` is the field that contained it.
        """
        owner = self._owners.get(response_id)
        if owner is None or owner.domain != domain:
            message = (
                f"response {response_id[:128]!a} is not known to this router: it was never, or too long ago; "
                "send the whole conversation as input"
            )
            raise HttpError(404, message, code="response_not_found", param=param)
        self._owners.move_to_end(response_id)
        return owner.replica


def replica_gone(response_id: str, param: str) -> HttpError:
    """Return the error for a response whose replica does not serve any more."""
    message = (
        f"the replica that holds response {response_id[:128]!a} is gone, and the response with it; "
        "send the whole conversation as input"
    )
    return HttpError(404, message, code="response_not_found", param=param)
