"""FingerprintMemory: the fingerprints of answered requests by tenant and id of the answer. Bounded in bytes."""

from headstart.openai.diagnostics.prompt_fingerprint import PromptFingerprint
from headstart.openai.tokenizer.tenant_cache import TenantCache

KEY_BYTES = 128
TENANT_SHARE = 2  # a tenant may fill this part of the memory


class FingerprintMemory:
    """Fingerprints; beyond the bounds the least recently used are dropped. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` 0: nothing is kept."""
        self._cache = TenantCache[PromptFingerprint](
            max_bytes // TENANT_SHARE, max_bytes, lambda value: KEY_BYTES + value.num_bytes
        )

    @property
    def num_bytes(self) -> int:
        """The bytes that all tenants' fingerprints take."""
        return self._cache.num_bytes

    def __len__(self) -> int:
        return len(self._cache)

    def find(self, tenant: str, answer_id: str) -> PromptFingerprint | None:
        """Return the fingerprint of a tenant's request; None if it has none with this id, or no longer."""
        return self._cache.find(tenant, [answer_id.encode()])[0]

    def put(self, tenant: str, answer_id: str, value: PromptFingerprint) -> None:
        """Store the fingerprint of an answered request."""
        self._cache.put(tenant, answer_id.encode(), value)
