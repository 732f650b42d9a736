"""ClientKeys: isolation domains of clients whose keys the router passes on and only the replicas know.

The index of a router must keep apart what the replicas keep apart, and must not tell one client of another's prompts:

- no replica checks keys: all clients share the caches, and the index; placeholder keys change nothing.
- a replica checks keys: the domain is an HMAC of the client's credentials with a secret of the process.
- all replicas that check keys are of engines with one cache for all keys: a key shares the index once such a replica
  has answered it, and until it is refused.

Whether a replica checks keys is learned from its looks, which carry no key where clients' keys are passed on, and from
its answers. Invariant: a key that was never answered by a replica that checks keys shares nothing with any other.
"""

import hmac
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from headstart.gateway.replicas.replica_monitor import MonitoredReplica

Headers = Iterable[tuple[bytes, bytes]]

CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")
ONE_CACHE = ("vllm", "sglang")  # engines whose keys let clients in, and do not divide the cache
MAX_ANSWERED = 10_000  # keys that are remembered to be valid; a forgotten one misses one prediction
GUARDED = "/v1/"  # vLLM checks keys under this path; an answer elsewhere says nothing of a key


class ClientKeys:
    """Changes nothing but what it remembers of keys, and `checks_keys` of `members`, which are the router's own."""

    def __init__(self, secret: bytes, members: Mapping[str, MonitoredReplica]) -> None:
        self._secret = secret
        self._members = members
        self._answered: OrderedDict[bytes, None] = OrderedDict()  # digests of keys, the last used last

    def domain(self, headers: Headers) -> bytes:
        """Return the isolation domain of a request; empty: it shares with all. Changes nothing."""
        checking = [member for member in self._members.values() if _may_check_keys(member)]
        if not checking:
            return b""
        digest = self._digest(headers)
        is_shared = digest in self._answered and all(member.metrics.kind in ONE_CACHE for member in checking)
        return b"" if is_shared else digest

    def answered(self, headers: Headers, path: str, status: int | None, member: MonitoredReplica) -> None:
        """Learn from the status with which a replica answered a request with these headers."""
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
        """Return an HMAC of all credentials, in their order, each behind its length."""
        parts = [part for name, value in headers if name in CREDENTIALS for part in (name, value)]
        told = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._secret, b"client key/" + told, "sha256")


def _may_check_keys(member: MonitoredReplica) -> bool:
    """Return whether a replica that can be asked checks keys, or has not shown that it does not."""
    return member.endpoint is not None and member.checks_keys is not False
