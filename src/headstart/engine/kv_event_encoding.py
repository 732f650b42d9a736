"""KV events as msgpack, in the format of vLLM 0.32: the payload of one batch.

An array [time, events, data parallel rank]; each event is a map with its kind in "type". Block hashes are bytes, or
their last 64 bits as int, which is vLLM's default.
"""

from hashlib import sha256

import msgspec

from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.core.cache.hashing import BlockHash

BlockKey = bytes | int


class KVEventEncoder:
    """Encoder of events to msgpack, for one KV cache group of full attention and data parallel rank 0."""

    def __init__(self, medium: str, *, int_block_hashes: bool = False) -> None:
        self._medium = medium
        self._as_int = int_block_hashes
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, ts: float, events: list[Event]) -> bytes:
        """Return the payload of one batch; `ts` in seconds."""
        return self._encoder.encode([ts, [self._event(event) for event in events], 0])

    def _event(self, event: Event) -> "_Stored | _Removed | _Cleared":
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                return _Stored(
                    block_hashes=[self._key(block_hash) for block_hash in event.block_hashes],
                    parent_block_hash=None if parent is None else self._key(parent),
                    token_ids=event.token_ids.tolist(),
                    block_size=event.block_size,
                    lora_id=None,
                    medium=self._medium,
                    lora_name=event.adapter,
                    extra_keys=_extra_keys(event),
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            case BlockRemoved():
                return _Removed([self._key(block_hash) for block_hash in event.block_hashes], self._medium, group_idx=0)
            case AllBlocksCleared():
                return _Cleared()

    def _key(self, block_hash: BlockHash) -> BlockKey:
        return int.from_bytes(block_hash[-8:], "big") if self._as_int else block_hash


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Event with vLLM's field names, order and defaults (vllm/distributed/kv_events.py, 0.32), as the classes below."""

    block_hashes: list[BlockKey]
    parent_block_hash: BlockKey | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # per block: the adapter; for a first block also the domain
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[BlockKey]
    medium: str | None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


def _extra_keys(event: BlockStored) -> list[tuple[str, ...] | None]:
    """Return the block hash inputs beside tokens, where vLLM puts them: the adapter per block, the domain in the first.

    The domain is sent as a digest: equal for equal domains, without the tenant's name.
    """
    adapter = () if event.adapter is None else (event.adapter,)
    domain = (sha256(event.domain).hexdigest(),) if event.domain else ()
    first = adapter + domain
    return [first or None, *[adapter or None] * (len(event.block_hashes) - 1)]
