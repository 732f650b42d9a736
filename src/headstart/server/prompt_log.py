"""PromptLog: bodies of recent requests, by tenant, for `headstart lint --against`. In memory only; off by default.

It holds prompts: a tenant reads its own bodies and no others, whatever its role. Bounded in bytes, per tenant and in
total; the oldest go first. Thread-safe.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from headstart.openai.canonical.canonical_body import canonical_body
from headstart.openai.canonical.prompt_rules import PromptRules
from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json
from headstart.openai.tokenizer.tenant_cache import TenantCache

TENANT_SHARE = 4  # a tenant may use a quarter of the bytes
ENTRY_BYTES = 200  # overhead per body: key, tuple, table slot
MAX_LISTED = 1000


class KeptBody(NamedTuple):
    """A body as it was sent to `path`, and the number of requests before it."""

    path: str
    data: bytes
    number: int


class PromptLog:
    """The bodies of all tenants."""

    def __init__(self, max_bytes: int, rules: PromptRules) -> None:
        """`max_bytes` 0: nothing is kept. `rules`: of the server; what is read is the prompt after them."""
        self.is_on = max_bytes > 0
        self._rules = rules
        self._bodies: TenantCache[KeptBody] = TenantCache(max(max_bytes // TENANT_SHARE, 1), max_bytes, _size)
        self._numbers = itertools.count()

    def add(self, tenant: str, path: str, data: bytes) -> None:
        """Keep the body of a request; one that exceeds the tenant's share alone is not kept."""
        if self.is_on:
            number = next(self._numbers)
            self._bodies.put(tenant, number.to_bytes(8, "big"), KeptBody(path, data, number))

    def bodies(self, tenant: str, last: int) -> list[Json]:
        """Return the last bodies of a tenant, the oldest first, as the rules for prompts leave them."""
        return [self._listed(body) for body in self._bodies.values(tenant)[-last:]]

    def _listed(self, kept: KeptBody) -> Json:
        values = parse_json(kept.data)
        return {"path": kept.path, "body": canonical_body(kept.path, kept.data, values, self._rules).values}


def listing(bodies: Sequence[Json]) -> Json:
    """Return the JSON of /v1/cache/requests."""
    return {"object": "list", "data": list(bodies)}


def _size(body: KeptBody) -> int:
    return ENTRY_BYTES + len(body.data)
