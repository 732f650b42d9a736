"""Shapes of KV events on the wire: raw fields of batches and events, and the bounds of each value.

Nothing is decoded before its type and size are known: arrays are counted by their heads, and unused fields are skipped.
All functions raise msgspec.DecodeError, RecursionError, TypeError, ValueError or IndexError for invalid input.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from headstart.core.cache.hashing import BlockHash

MAX_ITEMS = 2**21  # tokens or hashes of one event: a prompt of two million tokens
MAX_HASH_BYTES = 64  # SHA-512; vLLM's are 8 or 32
MAX_VALUE_BYTES = 1_024  # of an adapter's name, a group, a parent
_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_EMPTY = Raw()


class ArrayBatch(Struct, array_like=True):
    """A batch that is an array. Later fields are skipped."""

    ts: Raw = _EMPTY
    events: Raw = _EMPTY


class MapBatch(Struct):
    """A batch that is a map. Other keys are skipped."""

    events: Raw = _EMPTY


class StoredArray(Struct, array_like=True, tag="BlockStored"):
    """Stored blocks, as an array."""

    block_hashes: Raw
    parent_block_hash: Raw = _EMPTY
    token_ids: Raw = _EMPTY
    block_size: int | None = None
    lora_id: Raw = _EMPTY
    medium: Raw = _EMPTY
    lora_name: Raw = _EMPTY
    extra_keys: Raw = _EMPTY
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class RemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    """Removed blocks, as an array."""

    block_hashes: Raw
    medium: Raw = _EMPTY
    group_idx: int | None = None


class ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    """Removal of all blocks, as an array."""


class StoredMap(Struct, tag_field="type", tag="BlockStored"):
    """Stored blocks, as a map."""

    block_hashes: Raw
    parent_block_hash: Raw = _EMPTY
    token_ids: Raw = _EMPTY
    block_size: int | None = None
    lora_id: Raw = _EMPTY
    lora_name: Raw = _EMPTY
    extra_keys: Raw = _EMPTY
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class RemovedMap(Struct, tag_field="type", tag="BlockRemoved"):
    """Removed blocks, as a map."""

    block_hashes: Raw
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared"):
    """Removal of all blocks, as a map."""


Stored = StoredArray | StoredMap
Removed = RemovedArray | RemovedMap
Cleared = ClearedArray | ClearedMap


T = TypeVar("T")


class _KindOfArray(Struct, array_like=True):
    type: str


class _KindOfMap(Struct):
    type: str


def _decoder(kind: type[T]) -> Callable[[bytes | Raw], T]:
    return msgspec.msgpack.Decoder(kind).decode


_array_batch, _map_batch = _decoder(ArrayBatch), _decoder(MapBatch)
_array_event = msgspec.msgpack.Decoder(StoredArray | RemovedArray | ClearedArray).decode
_map_event = msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap).decode
_array_kind, _map_kind = _decoder(_KindOfArray), _decoder(_KindOfMap)
_texts, _bytes, _ints = _decoder(list[str]), _decoder(list[bytes]), _decoder(list[int])
_anything = msgspec.msgpack.Decoder().decode
read_raws = _decoder(list[Raw])
read_tokens = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]).decode


def read_batch(payload: bytes) -> Raw:
    """Return the array of events of a batch."""
    return (_array_batch if is_array(payload) else _map_batch)(payload).events


def read_event(raw: Raw) -> Stored | Removed | Cleared | None:
    """Return the fields of an event; None for an unknown kind."""
    of_array = is_array(raw)
    try:
        return _array_event(raw) if of_array else _map_event(raw)
    except msgspec.ValidationError:
        if (_array_kind if of_array else _map_kind)(raw).type not in _KINDS:
            return None
        raise


def is_stored(raw: Raw) -> bool:
    """Return whether an unreadable event is at least known to store blocks."""
    try:
        return (_array_kind if is_array(raw) else _map_kind)(raw).type == "BlockStored"
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False


def is_array(raw: bytes | Raw) -> bool:
    """Return whether the first byte is that of an array."""
    first = memoryview(raw)[0]
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def count_items(raw: Raw) -> int:
    """Return the length of an array, from its head alone."""
    head = bytes(memoryview(raw)[:5])
    first = head[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F
    if first not in (0xDC, 0xDD):
        raise TypeError("no list")
    return int.from_bytes(head[1 : 3 if first == 0xDC else 5], "big")


def read_value(raw: Raw, max_bytes: int = MAX_VALUE_BYTES) -> Any:
    """Return the decoded value; None if it is missing."""
    if len(raw) > max_bytes:
        raise ValueError(f"{len(raw)} bytes, more than {max_bytes}")
    return _anything(raw) if raw else None


def read_hashes(raw: Raw) -> list[int] | list[bytes] | list[str]:
    """Return the block hashes, all of the type of the first one."""
    num = count_items(raw)
    if num > MAX_ITEMS:
        raise ValueError(f"{num} hashes, more than {MAX_ITEMS}")
    if not num:
        return []
    first = memoryview(raw)[1 if num < 16 else 3 if num < 2**16 else 5]
    if 0xC4 <= first <= 0xC6:
        return _bytes(raw)
    return _texts(raw) if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB else _ints(raw)


def make_handles(hashes: list[Any]) -> tuple[BlockHash, ...]:
    """Return hashes of one type as bytes. Some engines send the same 64 bits signed, others unsigned."""
    if not hashes:
        return ()
    if isinstance(hashes[0], int):
        handles = tuple([(value & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "big") for value in hashes])
    else:
        handles = tuple(hashes) if isinstance(hashes[0], bytes) else tuple([value.encode() for value in hashes])
    if max(map(len, handles)) > MAX_HASH_BYTES:
        raise ValueError(f"a hash of more than {MAX_HASH_BYTES} bytes")
    return cast("tuple[BlockHash, ...]", handles)  # one cast: calling BlockHash for each hash doubles the cost


def read_handle(raw: Raw) -> BlockHash | None:
    """Return one hash as bytes; None if it is missing."""
    value = read_value(raw)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | bytes | str):
        raise TypeError("no hash")
    return make_handles([value])[0]
