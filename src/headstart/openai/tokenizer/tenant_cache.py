"""TenantPartitionedCache: values, bounded in bytes, per tenant and in all, the least recently used out. Thread-safe.

Values of one tenant are found by that tenant only. Keys are digests that cover the isolation domain (a tenant, narrowed
by a `cache_salt`), so that the domains of a tenant share its limit but no values.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

TENANT_BYTES = 1024  # overhead per tenant

Value = TypeVar("Value")


class CacheScope(NamedTuple):
    """The isolation domain of a request, and whether it stores new values."""

    tenant: str = ""  # whose byte limit the values count against
    domain: bytes = b""
    remembers: bool = True


class _Entries(Generic[Value]):
    """The values of one tenant, least recently used first."""

    __slots__ = ("num_bytes", "values")

    def __init__(self) -> None:
        self.values: OrderedDict[Hashable, Value] = OrderedDict()
        self.num_bytes = TENANT_BYTES


class TenantPartitionedCache(Generic[Value]):
    """The values of all tenants. Above `max_bytes`, the least recently used tenant's oldest are evicted."""

    def __init__(self, max_tenant_bytes: int, max_bytes: int, size: Callable[[Value], int]) -> None:
        """`size`: the bytes that a value holds, with the overhead of its entry."""
        self.num_bytes = 0  # of all tenants
        self._max_tenant_bytes = max_tenant_bytes
        self._max_bytes = max_bytes
        self._size = size
        self._tenants: OrderedDict[str, _Entries[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(entries.values) for entries in self._tenants.values())

    def find_values(self, tenant: str, keys: Sequence[Hashable]) -> list[Value | None]:
        """Return the value of each key, None if there is none, and mark them as used in this order."""
        with self._lock:
            entries = self._tenants.get(tenant)
            if entries is None:
                return [None] * len(keys)
            self._tenants.move_to_end(tenant)
            values = entries.values
            found: list[Value | None] = []
            for key in keys:
                value = values.get(key)
                if value is not None:
                    values.move_to_end(key)
                found.append(value)
            return found

    def values_of_tenant(self, tenant: str) -> list[Value]:
        """Return the values of a tenant, the least recently used first. Marks none as used."""
        with self._lock:
            entries = self._tenants.get(tenant)
            return [] if entries is None else list(entries.values.values())

    def put(self, tenant: str, key: Hashable, value: Value) -> None:
        """Store a value in the place of an earlier one; one that exceeds a limit alone is not stored."""
        num_bytes = self._size(value)
        if TENANT_BYTES + num_bytes > min(self._max_tenant_bytes, self._max_bytes):
            return
        with self._lock:
            entries = self._tenants.get(tenant)
            if entries is None:
                entries = self._tenants[tenant] = _Entries()
                self.num_bytes += TENANT_BYTES
            before = entries.values.pop(key, None)
            if before is not None:
                num_bytes -= self._size(before)
            entries.values[key] = value
            entries.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._tenants.move_to_end(tenant)
            while entries.num_bytes > self._max_tenant_bytes:
                self._evict_one(entries)
            while self.num_bytes > self._max_bytes:
                name, oldest = next(iter(self._tenants.items()))
                self._evict_one(oldest)
                if not oldest.values:
                    del self._tenants[name]
                    self.num_bytes -= TENANT_BYTES

    def _evict_one(self, entries: _Entries[Value]) -> None:
        _, value = entries.values.popitem(last=False)
        num_bytes = self._size(value)
        entries.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
