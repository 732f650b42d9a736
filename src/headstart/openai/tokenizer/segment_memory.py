"""SegmentMemory: a cache of the tokens of text segments, bounded in bytes per tenant and in total.

Entries of one isolation domain (a tenant, narrowed by a `cache_salt`) are found by requests of that domain only, so
that tokenization times reveal nothing about other tenants. The domains of a tenant share its byte limit, so salts add
no second share. Texts are not stored: the key of an entry is a SHA-256 of domain and text. Thread-safe.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_TENANT_BYTES = 8 << 20  # the tokens of about 6 million characters
MAX_BYTES = 64 << 20
ENTRY_BYTES = 320  # overhead per entry: key, array object, table slot
TENANT_BYTES = 1024  # overhead per tenant


class Scope(NamedTuple):
    """The isolation domain whose segments are looked up, and whether new ones are stored."""

    tenant: str = ""  # whose byte limit the segments count against
    domain: bytes = b""
    remembers: bool = True


class _Segments:
    """The cached segments of one tenant, least recently used first."""

    __slots__ = ("entries", "num_bytes")

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self.num_bytes = TENANT_BYTES


class SegmentMemory:
    """The cached segments of all tenants. Above `max_bytes`, the least recently used tenant's oldest are evicted."""

    def __init__(self, max_tenant_bytes: int = MAX_TENANT_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.num_bytes = 0  # of all tenants
        self._max_tenant_bytes = max_tenant_bytes
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, _Segments] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(segments.entries) for segments in self._tenants.values())

    def find(self, scope: Scope, texts: Sequence[str]) -> "list[tuple[bytes, array[int] | None]]":
        """Return the key of each text, and its token ids if they are cached. The arrays must not be modified."""
        hashed = hashlib.sha256(len(scope.domain).to_bytes(8, "little") + scope.domain)
        found: list[tuple[bytes, array[int] | None]] = []
        for text in texts:
            own = hashed.copy()
            own.update(text.encode("utf-8", "surrogatepass"))
            found.append((own.digest(), None))
        with self._lock:
            segments = self._tenants.get(scope.tenant)
            if segments is not None:
                self._tenants.move_to_end(scope.tenant)
                entries = segments.entries
                for index, (key, _) in enumerate(found):
                    if (token_ids := entries.get(key)) is not None:
                        entries.move_to_end(key)
                        found[index] = (key, token_ids)
            num_hits = sum(token_ids is not None for _, token_ids in found)
            self.num_hits += num_hits
            self.num_misses += len(found) - num_hits
        return found

    def remember(self, scope: Scope, key: bytes, token_ids: "array[int]") -> None:
        """Store the token ids of a text under its key from `find`, for requests of the same scope."""
        num_bytes = _size(token_ids)
        if not scope.remembers or TENANT_BYTES + num_bytes > min(self._max_tenant_bytes, self._max_bytes):
            return
        with self._lock:
            segments = self._tenants.get(scope.tenant)
            if segments is None:
                segments = self._tenants[scope.tenant] = _Segments()
                self.num_bytes += TENANT_BYTES
            if key in segments.entries:
                return
            segments.entries[key] = token_ids
            segments.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._tenants.move_to_end(scope.tenant)
            while segments.num_bytes > self._max_tenant_bytes:
                self._forget_one(segments)
            while self.num_bytes > self._max_bytes:
                tenant, oldest = next(iter(self._tenants.items()))
                self._forget_one(oldest)
                if not oldest.entries:
                    del self._tenants[tenant]
                    self.num_bytes -= TENANT_BYTES

    def _forget_one(self, segments: _Segments) -> None:
        _, gone = segments.entries.popitem(last=False)
        segments.num_bytes -= _size(gone)
        self.num_bytes -= _size(gone)


def _size(token_ids: "array[int]") -> int:
    return ENTRY_BYTES + token_ids.itemsize * len(token_ids)
