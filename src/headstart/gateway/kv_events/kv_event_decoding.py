"""Decoding of KV events: batches of vLLM, SGLang and Headstart, old shapes and new, to those of core/cache/events.py.

Batch and event may each be an array or a map, arrays may end early, hashes are ints of 64 bits or bytes; unknown keys
and unknown events are ignored. Nothing here raises for a publisher's input: what cannot be read is counted.

A batch is split into raw events first, and only the fields in use are decoded, each with its own type and bound: the
memory that a batch takes stays below ten times its bytes, whatever it contains.

Hashes become handles (bytes), equal for equal hashes. The parts of a block's identity besides its tokens become its
domain: the cache salt, as `event_domain` encodes it; images and embeddings, which a router cannot see, become a domain
that no prompt has, so that such blocks are indexed but never predicted as hits.
"""

from array import array
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from typing import Any

import msgspec
from msgspec import Raw

from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.gateway.kv_events.kv_event_shapes import (
    MAX_ITEMS,
    Cleared,
    Removed,
    RemovedArray,
    Stored,
    count_items,
    is_array,
    is_stored,
    make_handles,
    read_batch,
    read_event,
    read_handle,
    read_hashes,
    read_raws,
    read_tokens,
    read_value,
)
from headstart.openai.engine_requests import narrow_domain

MAX_BLOCKS = 256  # in one decoded event: longer ones are split, so that a caller can pause in between
MAX_BLOCK_SIZE = 65_536  # tokens
MAX_EXTRA_BYTES = 2**21  # of all extra keys of an event
MIN_EVENT_BYTES = 8  # on average over many events: the shortest known one has 16
FEW_EVENTS = 1_024  # events that may be shorter
USABLE_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))  # these keep all tokens
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, LookupError, OverflowError, RecursionError)


def event_domain(cache_salt: str | None) -> bytes:
    """Return the isolation domain of a prompt whose replica sees `cache_salt`, as in events; empty without a salt.

    It is the same for all engines, since a prompt may go to any of them: the value that Headstart publishes for a salt
    if its tenants have no domains of their own. For vLLM's plain salts the same value is computed here. SGLang's events
    hold no salts, so its salted blocks are taken for public ones, and salted prompts are never predicted as cached.
    """
    return sha256(narrow_domain(b"", cache_salt)).hexdigest().encode() if cache_salt else b""


class EventDecoder:
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

    def cleared(self) -> None:
        """Reset the state that belongs to one publisher."""
        self._group = None

    def decode(self, payload: bytes) -> Iterator[Event]:
        """Return the events of one batch."""
        return chain.from_iterable(map(self.read, self.split(payload)))

    def split(self, payload: bytes) -> list[Raw]:
        """Return the raw events of one batch; none of a batch that cannot be read, which is counted."""
        try:
            events = read_batch(payload)
            count = count_items(events)
            if count > max(FEW_EVENTS, len(events) // MIN_EVENT_BYTES):
                raise ValueError(f"{count} events in {len(events)} bytes")
            return read_raws(events)
        except _UNREADABLE:
            self.counts["undecodable"] += 1
            self.num_unknown_removals += 1
            return []

    def read(self, raw: Raw) -> Iterator[Event]:
        """Yield one event in pieces of at most MAX_BLOCKS blocks; count it as malformed if any piece cannot be read."""
        self.counts["events"] += 1
        try:
            event = read_event(raw)
            if event is None:
                self.counts["unknown_events"] += 1
            elif isinstance(event, Cleared):
                yield AllBlocksCleared()
            elif not self._is_ours(event):
                self.counts["other_groups"] += 1
            elif isinstance(event, Stored):
                yield from self._stored(event)
            else:
                hashes = read_hashes(event.block_hashes)
                for start in range(0, len(hashes), MAX_BLOCKS):
                    yield BlockRemoved(make_handles(hashes[start : start + MAX_BLOCKS]))
        except _UNREADABLE:
            self.counts["malformed"] += 1
            self.num_unknown_removals += not is_stored(raw)

    def _is_ours(self, event: Stored | Removed) -> bool:
        """Return whether an event belongs to the followed group; the first usable group is followed."""
        kind = None if isinstance(event, RemovedArray) else event.kv_cache_spec_kind
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
        hashes, num_tokens = read_hashes(event.block_hashes), count_items(event.token_ids)
        if not num_tokens:
            for start in range(0, len(hashes), MAX_BLOCKS):
                yield BlockStored(make_handles(hashes[start : start + MAX_BLOCKS]), None, array("i"), 0)
            return
        size = event.block_size
        if size is None or not 1 <= size <= MAX_BLOCK_SIZE or num_tokens != size * len(hashes):
            raise ValueError(f"{num_tokens} tokens in {len(hashes)} blocks of {size}")
        if num_tokens > MAX_ITEMS:
            raise ValueError(f"{num_tokens} tokens, more than {MAX_ITEMS}")
        token_ids, before = array("i", read_tokens(event.token_ids)), read_handle(event.parent_block_hash)
        name, number = read_value(event.lora_name), read_value(event.lora_id)
        adapter = _adapter(name, number)
        domains = self._domains(event.extra_keys, (adapter, number), len(hashes), at_start=before is None)
        starts = sorted({*range(0, len(hashes), MAX_BLOCKS), *domains})
        for start, end in zip(starts, [*starts[1:], len(hashes)], strict=True):
            tokens, handles = token_ids[start * size : end * size], make_handles(hashes[start:end])
            yield BlockStored(handles, before, tokens, size, adapter, domains.get(start, b""))
            before = handles[-1]

    def _domains(self, extra: Raw, of_adapter: tuple[Any, Any], num_blocks: int, *, at_start: bool) -> dict[int, bytes]:
        """Return the domains by the index of the block at which they begin."""
        if not extra or not is_array(extra):
            return {}
        domains, keys = dict[int, bytes](), read_value(extra, MAX_EXTRA_BYTES)
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
            return event_domain(only)
        return sha256(b"extra keys" + msgspec.msgpack.encode(keys)).digest()


def _adapter(name: object, number: object) -> str | None:
    """Return the adapter's name; for engines that send only a number, a name that no adapter has."""
    if isinstance(name, str):
        return name
    return None if number is None else f"lora_id {number}"
