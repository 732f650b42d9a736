"""Decoding of KV events: batches of vLLM, SGLang and Headstart, old shapes and new, to those of core/cache/events.py.

Batch and event may each be an array or a map, arrays may end early, hashes are ints of 64 bits or bytes; unknown keys
and unknown events are ignored. Nothing here raises for a publisher's input: what cannot be read is counted.

A batch is split into raw events first, and only the fields in use are decoded, each with its own type and bound: the
memory that a batch takes stays below ten times its bytes, whatever it contains.

Hashes become handles (bytes), equal for equal hashes. The parts of a block's identity besides its tokens become its
domain: the cache salt, as `domain_of_cache_salt` encodes it; images and embeddings, which a router cannot see,
become a domain that no prompt has, so that such blocks are indexed but never predicted as hits.

Shapes of KV events on the wire: raw fields of batches and events, and the bounds of each value.

Nothing is decoded before its type and size are known: arrays are counted by their heads, and unused fields are skipped.
All functions raise msgspec.DecodeError, RecursionError, TypeError, ValueError or IndexError for invalid input.
"""

from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import chain
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.core.cache.hashing import BlockHash
from headstart.openai.engine_requests import salted_domain

MAX_BLOCKS = 256  # in one decoded event: longer ones are split, so that a caller can pause in between
MAX_BLOCK_SIZE = 65_536  # tokens
MAX_EXTRA_BYTES = 2**21  # of all extra keys of an event
MIN_EVENT_BYTES = 8  # on average over many events: the shortest known one has 16
FEW_EVENTS = 1_024  # events that may be shorter
USABLE_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))  # these keep all tokens
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, LookupError, OverflowError, RecursionError)
MAX_ITEMS = 2**21  # tokens or hashes of one event: a prompt of two million tokens
MAX_HASH_BYTES = 64  # SHA-512; vLLM's are 8 or 32
MAX_VALUE_BYTES = 1_024  # of an adapter's name, a group, a parent
_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_EMPTY = Raw()


class ArrayEventBatch(Struct, array_like=True):
    """A batch that is an array. Later fields are skipped."""

    ts: Raw = _EMPTY
    events: Raw = _EMPTY


class MapEventBatch(Struct):
    """A batch that is a map. Other keys are skipped."""

    events: Raw = _EMPTY


class BlocksStoredFields(Struct):
    """Stored blocks. An array has these fields in this order."""

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


class BlocksStoredArray(BlocksStoredFields, array_like=True, tag="BlockStored"):
    """Stored blocks, as an array."""


class BlocksStoredMap(BlocksStoredFields, tag_field="type", tag="BlockStored"):
    """Stored blocks, as a map."""


class BlocksRemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    """Removed blocks, as an array."""

    block_hashes: Raw
    medium: Raw = _EMPTY
    group_idx: int | None = None


class CacheClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    """Removal of all blocks, as an array."""


class BlocksRemovedMap(Struct, tag_field="type", tag="BlockRemoved"):
    """Removed blocks, as a map."""

    block_hashes: Raw
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class CacheClearedMap(Struct, tag_field="type", tag="AllBlocksCleared"):
    """Removal of all blocks, as a map."""


Stored = BlocksStoredArray | BlocksStoredMap
Removed = BlocksRemovedArray | BlocksRemovedMap
Cleared = CacheClearedArray | CacheClearedMap


T = TypeVar("T")


class _KindOfArray(Struct, array_like=True):
    type: str


class _KindOfMap(Struct):
    type: str


def _decoder(kind: type[T]) -> Callable[[bytes | Raw], T]:
    return msgspec.msgpack.Decoder(kind).decode


_array_batch, _map_batch = _decoder(ArrayEventBatch), _decoder(MapEventBatch)
_array_event = msgspec.msgpack.Decoder(BlocksStoredArray | BlocksRemovedArray | CacheClearedArray).decode
_map_event = msgspec.msgpack.Decoder(BlocksStoredMap | BlocksRemovedMap | CacheClearedMap).decode
_array_kind, _map_kind = _decoder(_KindOfArray), _decoder(_KindOfMap)
_texts, _bytes, _ints = _decoder(list[str]), _decoder(list[bytes]), _decoder(list[int])
_anything = msgspec.msgpack.Decoder().decode
read_raws = _decoder(list[Raw])
read_tokens = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]).decode


def raw_events_of_batch(payload: bytes) -> Raw:
    """Return the array of events of a batch."""
    return (_array_batch if is_msgpack_array(payload) else _map_batch)(payload).events


def decode_event_fields(raw: Raw) -> Stored | Removed | Cleared | None:
    """Return the fields of an event; None for an unknown kind."""
    of_array = is_msgpack_array(raw)
    try:
        return _array_event(raw) if of_array else _map_event(raw)
    except msgspec.ValidationError:
        if (_array_kind if of_array else _map_kind)(raw).type not in _KINDS:
            return None
        raise


def is_stored_event(raw: Raw) -> bool:
    """Return whether an unreadable event is at least known to store blocks."""
    try:
        return (_array_kind if is_msgpack_array(raw) else _map_kind)(raw).type == "BlockStored"
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False


def is_msgpack_array(raw: bytes | Raw) -> bool:
    """Return whether the first byte is that of an array."""
    first = memoryview(raw)[0]
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def msgpack_array_length(raw: Raw) -> int:
    """Return the length of an array, from its head alone."""
    head = bytes(memoryview(raw)[:5])
    first = head[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F
    if first not in (0xDC, 0xDD):
        raise TypeError("no list")
    return int.from_bytes(head[1 : 3 if first == 0xDC else 5], "big")


def decode_msgpack_value(raw: Raw, max_bytes: int = MAX_VALUE_BYTES) -> Any:
    """Return the decoded value; None if it is missing."""
    if len(raw) > max_bytes:
        raise ValueError(f"{len(raw)} bytes, more than {max_bytes}")
    return _anything(raw) if raw else None


def decode_block_hash_list(raw: Raw) -> list[int] | list[bytes] | list[str]:
    """Return the block hashes, all of the type of the first one."""
    num = msgpack_array_length(raw)
    if num > MAX_ITEMS:
        raise ValueError(f"{num} hashes, more than {MAX_ITEMS}")
    if not num:
        return []
    first = memoryview(raw)[1 if num < 16 else 3 if num < 2**16 else 5]
    if 0xC4 <= first <= 0xC6:
        return _bytes(raw)
    return _texts(raw) if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB else _ints(raw)


def block_hashes_as_bytes(hashes: list[Any]) -> tuple[BlockHash, ...]:
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


def decode_block_hash(raw: Raw) -> BlockHash | None:
    """Return one hash as bytes; None if it is missing."""
    value = decode_msgpack_value(raw)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | bytes | str):
        raise TypeError("no hash")
    return block_hashes_as_bytes([value])[0]


def domain_of_cache_salt(cache_salt: str | None) -> bytes:
    """Return the isolation domain of a prompt whose replica sees `cache_salt`, as in events; empty without a salt.

    It is the same for all engines, since a prompt may go to any of them: the value that Headstart publishes for a salt
    if its tenants have no domains of their own. For vLLM's plain salts the same value is computed here. SGLang's events
    hold no salts, so its salted blocks are taken for public ones, and salted prompts are never predicted as cached.
    """
    return sha256(salted_domain(b"", cache_salt)).hexdigest().encode() if cache_salt else b""


class KVEventDecoder:
    """Decodes the batches of one publisher, in order. `kind`: "vllm", "sglang" or "headstart".

    Of the groups of a hybrid model it follows the first that keeps all tokens: the others say nothing about prefixes.
    `num_unknown_removals` grows with everything unreadable that may have removed blocks: a caller that misses a removal
    would predict blocks that are gone, and must start with an empty index.
    """

    def __init__(self, kind: str) -> None:
        self.counts = dict.fromkeys(("events", "undecodable", "malformed", "unknown_events", "other_groups"), 0)
        self.num_unknown_removals = 0
        self._salts_are_digests = kind == "headstart"
        self._group: int | None = None

    def reset(self) -> None:
        """Reset the state that belongs to one publisher."""
        self._group = None

    def decode(self, payload: bytes) -> Iterator[Event]:
        """Return the events of one batch."""
        return chain.from_iterable(map(self.decode_event, self.split_batch(payload)))

    def split_batch(self, payload: bytes) -> list[Raw]:
        """Return the raw events of one batch; none of a batch that cannot be read, which is counted."""
        try:
            events = raw_events_of_batch(payload)
            count = msgpack_array_length(events)
            if count > max(FEW_EVENTS, len(events) // MIN_EVENT_BYTES):
                raise ValueError(f"{count} events in {len(events)} bytes")
            return read_raws(events)
        except _UNREADABLE:
            self.counts["undecodable"] += 1
            self.num_unknown_removals += 1
            return []

    def decode_event(self, raw: Raw) -> Iterator[Event]:
        """Yield one event in pieces of at most MAX_BLOCKS blocks; count it as malformed if any piece cannot be read."""
        self.counts["events"] += 1
        try:
            event = decode_event_fields(raw)
            if event is None:
                self.counts["unknown_events"] += 1
            elif isinstance(event, Cleared):
                yield AllBlocksCleared()
            elif not self._is_ours(event):
                self.counts["other_groups"] += 1
            elif isinstance(event, Stored):
                yield from self._stored(event)
            else:
                hashes = decode_block_hash_list(event.block_hashes)
                for start in range(0, len(hashes), MAX_BLOCKS):
                    yield BlockRemoved(block_hashes_as_bytes(hashes[start : start + MAX_BLOCKS]))
        except _UNREADABLE:
            self.counts["malformed"] += 1
            self.num_unknown_removals += not is_stored_event(raw)

    def _is_ours(self, event: Stored | Removed) -> bool:
        """Return whether an event belongs to the followed group; the first usable group is followed."""
        kind = None if isinstance(event, BlocksRemovedArray) else event.kv_cache_spec_kind
        if kind is not None and kind not in USABLE_KINDS:
            return False
        group = event.group_idx
        if group is None:
            return True
        if self._group is None and isinstance(event, Stored) and len(event.token_ids) > 1:
            self._group = group
        return self._group in (None, group)

    def _stored(self, event: Stored) -> Iterator[Event]:
        """Yield one event per piece of a chain: in each, only the first block may begin a domain."""
        hashes, num_tokens = decode_block_hash_list(event.block_hashes), msgpack_array_length(event.token_ids)
        if not num_tokens:
            for start in range(0, len(hashes), MAX_BLOCKS):
                yield BlockStored(block_hashes_as_bytes(hashes[start : start + MAX_BLOCKS]), None, array("i"), 0)
            return
        size = event.block_size
        if size is None or not 1 <= size <= MAX_BLOCK_SIZE or num_tokens != size * len(hashes):
            raise ValueError(f"{num_tokens} tokens in {len(hashes)} blocks of {size}")
        if num_tokens > MAX_ITEMS:
            raise ValueError(f"{num_tokens} tokens, more than {MAX_ITEMS}")
        token_ids, before = array("i", read_tokens(event.token_ids)), decode_block_hash(event.parent_block_hash)
        name, number = decode_msgpack_value(event.lora_name), decode_msgpack_value(event.lora_id)
        adapter = _adapter(name, number)
        domains = self._domains(event.extra_keys, (adapter, number), len(hashes), at_start=before is None)
        starts = sorted({*range(0, len(hashes), MAX_BLOCKS), *domains})
        for start, end in zip(starts, [*starts[1:], len(hashes)], strict=True):
            tokens, handles = token_ids[start * size : end * size], block_hashes_as_bytes(hashes[start:end])
            yield BlockStored(handles, before, tokens, size, adapter, domains.get(start, b""))
            before = handles[-1]

    def _domains(self, extra: Raw, of_adapter: tuple[Any, Any], num_blocks: int, *, at_start: bool) -> dict[int, bytes]:
        """Return the domains by the index of the block at which they begin."""
        if not extra or not is_msgpack_array(extra):
            return {}
        domains, keys = dict[int, bytes](), decode_msgpack_value(extra, MAX_EXTRA_BYTES)
        for index, key in enumerate(keys[:num_blocks]):
            if not key:
                continue
            if not isinstance(key, list):
                raise TypeError("extra keys are no list")
            rest: list[Any] = key[1:] if key[0] is not None and key[0] in of_adapter else key
            if rest:
                domains[index] = self._domain(rest, may_be_salt=at_start and index == 0)
        return domains

    def _domain(self, keys: list[Any], *, may_be_salt: bool) -> bytes:
        only = keys[0] if len(keys) == 1 else None
        if isinstance(only, str) and self._salts_are_digests:
            return only.encode()
        if isinstance(only, str) and may_be_salt:
            return domain_of_cache_salt(only)
        return sha256(b"extra keys" + msgspec.msgpack.encode(keys)).digest()


def _adapter(name: object, number: object) -> str | None:
    """Return the adapter's name; for engines that send only a number, a name that no adapter has."""
    if isinstance(name, str):
        return name
    return None if number is None else f"lora_id {number}"
