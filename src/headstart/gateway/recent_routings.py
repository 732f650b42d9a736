"""RecentRoutings: the latest requests of the router, for the explainer only. Bounded in requests and in bytes.

Prompts are kept as they were routed: text, or token ids if a client sent those. They are indexed by the hashes of their
leading runs of `chunk` characters, so the longest common prefix is found by a bisection over hashes and one comparison
in the run where prompts diverge. The tenant is part of every hash: prompts of two tenants have none in common.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headstart.common_prefix import common_prefix_length

MAX_REQUESTS = 1000
MAX_BYTES = 16 << 20
CHUNK = 1024  # characters of a run, or token ids
HASH_BYTES = 16
ENTRY_BYTES = 1024  # of an entry without its prompt and hashes, approximately
BYTES_PER_HASH = 200


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
    """The latest requests, by id, by age and by the beginning of their prompts."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES, *, chunk: int = CHUNK) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.chunk = chunk
        self.num_bytes = 0  # of all entries, approximately
        self._order = 0
        self._seen: dict[str, tuple[int, RoutedRequest, list[bytes]]] = {}  # oldest first; its number, and its hashes
        self._by_hash: dict[bytes, dict[str, None]] = {}  # hash -> ids of the requests that begin with it, oldest first

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Iterate over the requests, oldest first."""
        return (seen for _, seen, _ in self._seen.values())

    def add(self, seen: RoutedRequest) -> None:
        """Add a sent request, replacing an older one of the same id; drop the oldest ones if a bound is exceeded."""
        self._forget(seen.request_id)
        hashes = _prefix_hashes(seen.tenant, seen.prompt, self.chunk)
        self._seen[seen.request_id] = (self._order, seen, hashes)
        self._order += 1
        self.num_bytes += _bytes_of(seen, hashes)
        for prefix in hashes:
            self._by_hash.setdefault(prefix, {})[seen.request_id] = None
        while len(self._seen) > self.max_requests or (self.num_bytes > self.max_bytes and self._seen):
            self._forget(next(iter(self._seen)))

    def record_usage(
        self, request_id: str, cached_tokens: int, prompt_tokens: int = 0, at: float | None = None
    ) -> None:
        """Record what an engine reported of a request; ignored if the request has been dropped."""
        found = self._seen.get(request_id)
        if found is not None:
            seen = found[1]
            seen.cached_tokens, seen.reported_at = cached_tokens, at
            seen.prompt_tokens = prompt_tokens or seen.prompt_tokens

    def find(self, request_id: str, tenant: str | None) -> RoutedRequest | None:
        """Return a tenant's request, None if there is none; `tenant` None: of any tenant."""
        found = self._seen.get(request_id)
        return found[1] if found is not None and tenant in (None, found[1].tenant) else None

    def find_nearest(
        self, asked: RoutedRequest, *, scope: tuple[bytes, str, str | None] | None = None, endpoint: str | None = None
    ) -> NearestRequest | None:
        """Return the same tenant's request with the longest common prefix; of equals the newest, the same scope first.

        Only earlier requests count if `asked` was added itself. None if no other request begins alike.
        `scope`, `endpoint`: consider only these.
        """
        entry = self._seen.get(asked.request_id)
        own = entry is not None and entry[1] is asked
        order, hashes = (
            (entry[0], entry[2])
            if entry is not None and own
            else (self._order, _prefix_hashes(asked.tenant, asked.prompt, self.chunk))
        )

        def others(prefix: bytes) -> list[tuple[int, RoutedRequest]]:
            found = (self._seen[request_id] for request_id in self._by_hash.get(prefix, ()))
            return [
                (number, seen)
                for number, seen, _ in found
                if number < order
                and (scope is None or seen.cache_scope == scope)
                and (endpoint is None or seen.endpoint == endpoint)
            ]

        low, high = 0, len(hashes)  # hashes[:low] are indexed, hashes[high] is not
        while low < high:
            middle = (low + high) // 2
            if others(hashes[middle]):
                low = middle + 1
            else:
                high = middle
        if not low:
            return None
        start = (low - 1) * self.chunk
        best: tuple[int, bool, int, RoutedRequest] | None = None
        for number, seen in others(hashes[low - 1]):
            common = start + common_prefix_length(
                asked.prompt[start : start + self.chunk], seen.prompt[start : start + self.chunk]
            )
            if best is None or (common, seen.cache_scope == asked.cache_scope, number) > best[:3]:
                best = (common, seen.cache_scope == asked.cache_scope, number, seen)
        return NearestRequest(best[3], best[0]) if best is not None and best[0] else None

    def check(self) -> None:
        """Assert that bounds and index hold; O(all), for tests."""
        assert len(self._seen) <= self.max_requests and self.num_bytes <= self.max_bytes
        assert self.num_bytes == sum(_bytes_of(seen, hashes) for _, seen, hashes in self._seen.values())
        indexed = {(prefix, request_id) for prefix, ids in self._by_hash.items() for request_id in ids}
        assert indexed == {(prefix, key) for key, (_, _, hashes) in self._seen.items() for prefix in hashes}
        assert all(self._by_hash.values()), "a hash without a request is kept"

    def _forget(self, request_id: str) -> None:
        found = self._seen.pop(request_id, None)
        if found is None:
            return
        _, seen, hashes = found
        self.num_bytes -= _bytes_of(seen, hashes)
        for prefix in hashes:
            ids = self._by_hash[prefix]
            del ids[request_id]
            if not ids:
                del self._by_hash[prefix]


def _bytes_of(seen: RoutedRequest, hashes: list[bytes]) -> int:
    return ENTRY_BYTES + sys.getsizeof(seen.prompt) + BYTES_PER_HASH * len(hashes)


def _prefix_hashes(tenant: str, prompt: "str | array[int]", chunk: int) -> list[bytes]:
    """Return the hashes of the empty prefix, and of all prefixes that end with a whole run."""
    owner = tenant.encode()
    kind = b"text" if isinstance(prompt, str) else b"ids"
    digest = hashlib.blake2b(kind + len(owner).to_bytes(8, "little") + owner, digest_size=HASH_BYTES)
    hashes = [digest.digest()]
    for start in range(0, len(prompt) - chunk + 1, chunk):
        run = prompt[start : start + chunk]
        digest.update(run.encode("utf-8", "surrogatepass") if isinstance(run, str) else run.tobytes())
        hashes.append(digest.digest())
    return hashes
