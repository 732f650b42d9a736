"""Paths of a router: those it answers itself, those it forwards, and the access that each of them needs.

The list of paths forwarded for all clients is closed: engines have administration under /v1 too (load adapters, put
engines to sleep), and with a replica key every client would have that key's rights. All other paths under /v1 are
forwarded for administrators.
"""

import re
from collections.abc import Mapping

from headstart.apis.api_table import APIS, OTHER
from headstart.http.auth import ACCESS, Access

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
ROUTER_ACCESS: Mapping[str, Access] = {
    **ACCESS,
    "/metrics": Access.MONITOR,
    "/load": Access.MONITOR,
    "/v1/cache/stats": Access.MONITOR,  # as /metrics
    "/v1/cache/tree": Access.ADMIN,  # a replica may take the router for an administrator
    "/v1/cache/live": Access.ADMIN,  # as /v1/fleet
}
_PLAIN = re.compile(r"/v1(/[A-Za-z0-9_-]+)+")  # no dots, nothing encoded: the replica sees exactly this path
_REPLICAS_OWN = ("/v1/prefixes", "/v1/cache")  # a replica's administration, for which the router has its own routes


def is_passed_on(path: str, *, is_admin: bool) -> bool:
    """Return whether a POST to `path` is forwarded to a replica unchanged. Changes nothing."""
    if path in PROXIED:
        return True
    return is_admin and _PLAIN.fullmatch(path) is not None and not path.startswith(_REPLICAS_OWN)
