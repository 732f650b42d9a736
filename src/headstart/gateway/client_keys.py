"""ClientKeys: isolation domains of clients whose keys the router forwards and only the replicas can check.

The router's index must separate what the replicas separate, and must not reveal one client's prompts to another:

- No replica checks keys: all clients share the caches and the index; placeholder keys change nothing.
- A replica checks keys: the domain is an HMAC of the client's credentials with a secret of the process.
- All replicas that check keys run engines with one cache for all keys: a key shares the index once such a replica has
  answered it with success, and until one refuses it.

The router learns whether a replica checks keys from its probes, which carry no key if clients' keys are forwarded, and
from its answers. Invariant: a key that no key-checking replica has accepted shares nothing with any other key.
"""

import hmac
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from headstart.gateway.replicas.replica_monitor import MonitoredReplica

Headers = Iterable[tuple[bytes, bytes]]

CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")
ONE_CACHE = ("vllm", "sglang")  # engines whose keys grant access but do not divide the cache
MAX_ANSWERED = 10_000  # keys remembered as valid; a forgotten key costs one prediction
GUARDED = "/v1/"  # vLLM checks keys under this path; an answer elsewhere says nothing about a key


class ClientKeys:
    """Isolation domains by client key. Changes only its own state and `checks_keys` of `members`, the router's own."""

    def __init__(self, secret: bytes, members: Mapping[str, MonitoredReplica]) -> None:
        self._secret = secret
        self._members = members
        self._answered: OrderedDict[bytes, None] = OrderedDict()  # digests of keys, least recently used first

    def domain(self, headers: Headers) -> bytes:
        """Return the isolation domain of a request; empty: it shares the cache with all clients. Changes nothing."""
        checking = [member for member in self._members.values() if _may_check_keys(member)]
        if not checking:
            return b""
        digest = self._digest(headers)
        is_shared = digest in self._answered and all(member.metrics.kind in ONE_CACHE for member in checking)
        return b"" if is_shared else digest

    def answered(self, headers: Headers, path: str, status: int | None, member: MonitoredReplica) -> None:
        """Update what is known of keys from the status with which a replica answered a request with these headers."""
        if not path.startswith(GUARDED):
            return
        if status == 401:
            member.checks_keys = True
            self._answered.pop(self._digest(headers), None)
        elif status == 200 and member.checks_keys:
            digest = self._digest(headers)
            self._answered[digest] = None
            self._answered.move_to_end(digest)
            if len(self._answered) > MAX_ANSWERED:
                self._answered.popitem(last=False)
        elif status == 200 and member.checks_keys is None and not any(name in CREDENTIALS for name, _ in headers):
            member.checks_keys = False

    def _digest(self, headers: Headers) -> bytes:
        """Return an HMAC of all credentials, in order, each prefixed with its length."""
        parts = [part for name, value in headers if name in CREDENTIALS for part in (name, value)]
        packed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._secret, b"client key/" + packed, "sha256")


def _may_check_keys(member: MonitoredReplica) -> bool:
    """Return whether a routable replica checks keys, or has not yet shown that it does not."""
    return member.endpoint is not None and member.checks_keys is not False
