"""RecentBodyLog: bodies of recent requests, by tenant, for `headstart lint --against`. In memory only; off by default.

It holds prompts: a tenant reads its own bodies and no others, whatever its role. Bounded in bytes, per tenant and in
total; the oldest go first. Thread-safe.
"""

import itertools
from typing import NamedTuple

from headstart.openai.canonical.canonical_body import canonical_body
from headstart.openai.canonical.nonces import nonce_rule_of_prompt_line
from headstart.openai.canonical.prompt_rules import PromptRules
from headstart.openai.request_json import parse_json_object
from headstart.openai.responses import Json
from headstart.openai.tokenizer.tenant_cache import TenantPartitionedCache
from headstart.reuse.log_report import find_costly_differences
from headstart.reuse.logged_prompt import logged_prompt_of_entry

TENANT_SHARE = 4  # a tenant may use a quarter of the bytes
ENTRY_BYTES = 200  # overhead per body: key, tuple, table slot
MAX_LISTED = 1000
MAX_COMPARED = 100  # earlier bodies that a diagnosis reads


class LoggedBody(NamedTuple):
    """A body as it was sent to `path`, and the id of its answer."""

    path: str
    data: bytes
    answer_id: str


class RecentBodyLog:
    """The bodies of all tenants."""

    def __init__(self, max_bytes: int, rules: PromptRules) -> None:
        """`max_bytes` 0: nothing is kept. `rules`: of the server; what is read is the prompt after them."""
        self.is_on = max_bytes > 0
        self._rules = rules
        self._bodies: TenantPartitionedCache[LoggedBody] = TenantPartitionedCache(
            max(max_bytes // TENANT_SHARE, 1), max_bytes, _size
        )
        self._numbers = itertools.count()

    def add(self, tenant: str, kept: LoggedBody) -> None:
        """Keep the body of a request; one that exceeds the tenant's share alone is not kept."""
        if self.is_on:
            self._bodies.put(tenant, next(self._numbers), kept)

    def last_bodies_of_tenant(self, tenant: str, last: int) -> list[Json]:
        """Return the last bodies of a tenant, the oldest first, as the rules for prompts leave them."""
        return [self._listed(body) for body in self._bodies.values_of_tenant(tenant)[-last:]]

    def request_diagnosis(self, tenant: str, *, answer_id: str = "", body: Json | None = None) -> list[Json]:
        """Return what differs between a request and an earlier one of the tenant, and what that costs.

        The request is the one answered with `answer_id`, or `body`. Empty if it is not kept, or nothing was lost.
        """
        kept = self._bodies.values_of_tenant(tenant)
        if body is None:
            at = next((index for index, one in enumerate(kept) if one.answer_id == answer_id), None)
            if at is None:
                return []
            kept, asked = kept[:at], self._listed(kept[at])
        else:
            asked = {"body": body}
        prompt = logged_prompt_of_entry(0, asked)
        earlier = [
            logged_prompt_of_entry(index + 1, self._listed(one)) for index, one in enumerate(kept[-MAX_COMPARED:])
        ]
        known = [one for one in earlier if one is not None]
        found = [] if prompt is None else find_costly_differences(prompt, known, nonce_rule_of_prompt_line)
        return [{**finding._asdict(), "message": finding.text} for finding in found]

    def _listed(self, kept: LoggedBody) -> Json:
        values = parse_json_object(kept.data)
        return {"path": kept.path, "body": canonical_body(kept.path, kept.data, values, self._rules).values}


def _size(body: LoggedBody) -> int:
    return ENTRY_BYTES + len(body.data)
