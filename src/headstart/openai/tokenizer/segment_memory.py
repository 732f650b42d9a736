"""SegmentMemory: a cache of the tokens of text segments, bounded in bytes per tenant and in total.

Entries of one isolation domain (a tenant, narrowed by a `cache_salt`) are found by requests of that domain only, so
that tokenization times reveal nothing about other tenants. The domains of a tenant share its byte limit, so salts add
no second share. Texts are not stored: the key of an entry is a SHA-256 of domain and text. Thread-safe.
"""

import hashlib
from array import array
from collections.abc import Sequence

from headstart.openai.tokenizer.tenant_cache import Scope, TenantCache

MAX_TENANT_BYTES = 8 << 20  # the tokens of about 6 million characters
MAX_BYTES = 64 << 20
ENTRY_BYTES = 320  # overhead per entry: key, array object, table slot


class SegmentMemory:
    """The cached segments of all tenants. Above `max_bytes`, the least recently used tenant's oldest are evicted."""

    def __init__(self, max_tenant_bytes: int = MAX_TENANT_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self._segments: TenantCache[array[int]] = TenantCache(max_tenant_bytes, max_bytes, _size)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def num_bytes(self) -> int:
        """The bytes held for all tenants."""
        return self._segments.num_bytes

    def find(self, scope: Scope, texts: Sequence[str]) -> "list[tuple[bytes, array[int] | None]]":
        """Return the key of each text, and its token ids if they are cached. The arrays must not be modified."""
        hashed = hashlib.sha256(len(scope.domain).to_bytes(8, "little") + scope.domain)
        keys: list[bytes] = []
        for text in texts:
            own = hashed.copy()
            own.update(text.encode("utf-8", "surrogatepass"))
            keys.append(own.digest())
        found = self._segments.find(scope.tenant, keys)
        num_hits = sum(token_ids is not None for token_ids in found)
        self.num_hits += num_hits
        self.num_misses += len(found) - num_hits
        return list(zip(keys, found, strict=True))

    def remember(self, scope: Scope, key: bytes, token_ids: "array[int]") -> None:
        """Store the token ids of a text under its key from `find`, for requests of the same scope."""
        if scope.remembers:
            self._segments.put(scope.tenant, key, token_ids)


def _size(token_ids: "array[int]") -> int:
    return ENTRY_BYTES + token_ids.itemsize * len(token_ids)
