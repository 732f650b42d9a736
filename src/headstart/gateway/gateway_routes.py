"""Paths of a router: those it answers itself, those it forwards, and the access that each of them needs.

The list of paths forwarded for all clients is closed: engines have administration under /v1 too (load adapters, put
engines to sleep), and with a replica key every client would have that key's rights. All other paths under /v1 are
forwarded for administrators.

ClientKeyDomains: isolation domains of clients whose keys the router forwards and only the replicas can check.

The router's index must separate what the replicas separate, and must not reveal one client's prompts to another:

- No replica checks keys: all clients share the caches and the index; placeholder keys change nothing.
- A replica checks keys: the domain is an HMAC of the client's credentials with a secret of the process.
- All replicas that check keys run engines with one cache for all keys: a key shares the index once such a replica has
  answered it with success, and until one refuses it.

The router learns whether a replica checks keys from its probes, which carry no key if clients' keys are forwarded, and
from its answers. Invariant: a key that no key-checking replica has accepted shares nothing with any other key.
"""

import hmac
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from headstart.apis.api_table import APIS, OTHER
from headstart.gateway.replicas.replica_monitor import MonitoredReplica
from headstart.http.auth import ACCESS, RequiredAccess

PROXIED = frozenset(  # generation routes of Headstart, vLLM and SGLang; each takes a JSON object
    (
        *(path for api in (*APIS, OTHER) for path in (api.path, *api.other_paths) if path),
        *("/v1/completions/render", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
        *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify", "/v1/moderations", "/v1/decisions"),
        *("/v1/audio/speech", "/v1/images/generations"),
        *("/v1/tokenize", "/v1/detokenize"),
    )
)
OWN = (
    *(path for api in APIS for path in api.get_paths),
    *("/v1/models", "/v1/fleet", "/v1/cache/stats", "/v1/cache/explain", "/v1/prefixes", "/reset_prefix_cache"),
    *("/v1/cache/tree", "/v1/cache/live", "/"),
    *("/health", "/readyz", "/livez", "/metrics", "/version", "/ping", "/load", "/tokenizer_info"),
)
ROUTES = (*sorted(PROXIED), *OWN)
ROUTER_ACCESS: Mapping[str, RequiredAccess] = {
    **ACCESS,
    "/metrics": RequiredAccess.MONITOR,
    "/load": RequiredAccess.MONITOR,
    "/v1/cache/stats": RequiredAccess.MONITOR,  # as /metrics
    "/v1/cache/tree": RequiredAccess.ADMIN,  # a replica may take the router for an administrator
    "/v1/cache/live": RequiredAccess.ADMIN,  # as /v1/fleet
}
_PLAIN = re.compile(r"/v1(/[A-Za-z0-9_-]+)+")  # no dots, nothing encoded: the replica sees exactly this path
_REPLICAS_OWN = ("/v1/prefixes", "/v1/cache")  # a replica's administration, for which the router has its own routes
Headers = Iterable[tuple[bytes, bytes]]

CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")
ONE_CACHE = ("vllm", "sglang")  # engines whose keys grant access but do not divide the cache
MAX_ANSWERED = 10_000  # keys remembered as valid; a forgotten key costs one prediction
GUARDED = "/v1/"  # vLLM checks keys under this path; an answer elsewhere says nothing about a key


def is_forwarded_path(path: str, *, is_admin: bool) -> bool:
    """Return whether a POST to `path` is forwarded to a replica unchanged. Changes nothing."""
    if path in PROXIED:
        return True
    return is_admin and _PLAIN.fullmatch(path) is not None and not path.startswith(_REPLICAS_OWN)


class ClientKeyDomains:
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

    def learn_key_acceptance(self, headers: Headers, path: str, status: int | None, member: MonitoredReplica) -> None:
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
