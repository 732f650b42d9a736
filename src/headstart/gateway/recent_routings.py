"""RecentRoutings: the latest requests of the router, for the explainer only. Bounded in requests and in bytes.

Prompts are kept as they were routed: text, or token ids if a client sent those. Nothing is computed of them before a
request is to be explained. Prompts of two tenants have none in common.
"""

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from headstart.common_prefix import common_prefix_length

MAX_REQUESTS = 1000
MAX_BYTES = 16 << 20
ENTRY_BYTES = 1024  # of an entry without its prompt, approximately


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request as the router saw it. Times in seconds on the event loop's clock."""

    request_id: str
    tenant: str
    prompt: "str | array[int]"
    at: float = 0.0  # when it was sent
    is_chat: bool = False  # the prompt is a text of `conversation` (request_reader.py)
    domain: bytes = b""
    model: str = ""
    adapter: str | None = None
    session: str | None = None  # as the client named it
    endpoint: str = ""  # the replica it was sent to; empty: none yet
    why: str = ""  # the reason for that replica, in the policy's words
    block_size: int = 16  # tokens
    prompt_tokens: int = 0  # by the engine's count; 0: unknown
    predicted_tokens: int | None = None  # predicted to be cached there
    cached_tokens: int | None = None  # as the engine reported
    reported_at: float | None = None

    @property
    def cache_scope(self) -> tuple[bytes, str, str | None]:
        """The scope of its cache: prompts of different scopes share no blocks, even if they are equal."""
        return self.domain, self.model, self.adapter


class NearestRequest(NamedTuple):
    """An earlier request and the number of leading characters (or token ids) in common."""

    seen: RoutedRequest
    common: int


class RecentRoutings:
    """The latest requests, by id and by age."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of all entries, approximately
        self._seen: dict[str, RoutedRequest] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Iterate over the requests, oldest first."""
        return iter(self._seen.values())

    def add(self, seen: RoutedRequest) -> None:
        """Add a sent request, replacing an older one of the same id; drop the oldest ones if a bound is exceeded."""
        self._forget(seen.request_id)
        self._seen[seen.request_id] = seen
        self.num_bytes += _bytes_of(seen)
        while len(self._seen) > self.max_requests or (self.num_bytes > self.max_bytes and self._seen):
            self._forget(next(iter(self._seen)))

    def record_usage(
        self, request_id: str, cached_tokens: int, prompt_tokens: int = 0, at: float | None = None
    ) -> None:
        """Record what an engine reported of a request; ignored if the request has been dropped."""
        seen = self._seen.get(request_id)
        if seen is not None:
            seen.cached_tokens, seen.reported_at = cached_tokens, at
            seen.prompt_tokens = prompt_tokens or seen.prompt_tokens

    def find(self, request_id: str, tenant: str | None) -> RoutedRequest | None:
        """Return a tenant's request, None if there is none; `tenant` None: of any tenant."""
        seen = self._seen.get(request_id)
        return seen if seen is not None and tenant in (None, seen.tenant) else None

    def find_nearest(
        self, asked: RoutedRequest, *, scope: tuple[bytes, str, str | None] | None = None, endpoint: str | None = None
    ) -> NearestRequest | None:
        """Return the same tenant's request with the longest common prefix; of equals the newest, the same scope first.

        Only earlier requests count if `asked` was added itself. None if no other request begins alike.
        `scope`, `endpoint`: consider only these.
        """
        nearest: NearestRequest | None = None
        best = (1, False)  # characters or token ids in common, and whether the scope is the same
        for seen in takewhile(lambda one: one is not asked, self):
            if (
                seen.tenant != asked.tenant
                or type(seen.prompt) is not type(asked.prompt)
                or scope not in (None, seen.cache_scope)
                or endpoint not in (None, seen.endpoint)
            ):
                continue
            found = (common_prefix_length(asked.prompt, seen.prompt), seen.cache_scope == asked.cache_scope)
            if found >= best:
                best, nearest = found, NearestRequest(seen, found[0])
        return nearest

    def _forget(self, request_id: str) -> None:
        seen = self._seen.pop(request_id, None)
        if seen is not None:
            self.num_bytes -= _bytes_of(seen)


def _bytes_of(seen: RoutedRequest) -> int:
    return ENTRY_BYTES + sys.getsizeof(seen.prompt)
