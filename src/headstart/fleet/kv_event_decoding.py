"""Decoding of KV events: batches of vLLM, SGLang and Headstart, old shapes and new, to the events of core/events.py.

Batch and event may each be an array or a map, arrays may end early, hashes are ints of 64 bits or bytes; unknown keys
and unknown events are left out. Nothing here raises for what a publisher sent: what cannot be read is counted.

Hashes become handles (bytes), equal for equal hashes. What is in a block's name beside tokens becomes its domain:
the cache salt, as `event_domain` names it; images and embeddings, of which a router knows nothing, as a domain that no
prompt has, so that such blocks are known and never promised.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from headstart.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.core.hashing import BlockHash
from headstart.server.requests import narrow_domain

MAX_BLOCKS = 256  # in one event that comes out: longer ones come in pieces, so that a caller can pause between them
USABLE_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))  # these keep all tokens
_BATCH = ("ts", "events", "data_parallel_rank")
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def event_domain(cache_salt: str | None) -> bytes:
    """The isolation domain of a prompt by the `cache_salt` its replica sees, as events name it; empty without one.

    The same for engines of every kind, since one prompt may go to any of them: what Headstart publishes of a salt where
    its tenants have no domains of their own. Of vLLM's plain salts the same is made here. SGLang's events hold none, so
    its salted blocks are taken for public ones, and salted prompts are never believed to be there.
    """
    return sha256(narrow_domain(b"", cache_salt)).hexdigest().encode() if cache_salt else b""


class EventDecoder:
    """Reads the batches of one publisher, in their order. `kind`: "vllm", "sglang" or "headstart".

    Of the groups of a hybrid model it follows the first that keeps all tokens: the others say nothing of prefixes.
    """

    def __init__(self, kind: str) -> None:
        self.counts = dict.fromkeys(("events", "undecodable", "malformed", "unknown_events", "other_groups"), 0)
        self._salts_are_digests = kind == "headstart"
        self._group: int | None = None

    def cleared(self) -> None:
        """Another publisher may follow."""
        self._group = None

    def decode(self, payload: bytes) -> Iterator[Event]:
        """The events of one batch."""
        try:
            batch = _named(msgspec.msgpack.decode(payload), _BATCH)
            events = batch["events"]
            if not isinstance(events, list):
                raise TypeError("events are no list")
        except (msgspec.DecodeError, ValueError, TypeError, LookupError):
            self.counts["undecodable"] += 1
            return
        for event in events:  # pyright: ignore[reportUnknownVariableType]: whatever the publisher sent
            self.counts["events"] += 1
            try:
                found = self._event(event)
            except (ValueError, TypeError, LookupError, OverflowError):
                self.counts["malformed"] += 1
                continue
            yield from found

    def _event(self, event: Any) -> list[Event]:
        kind = event["type"] if isinstance(event, dict) else event[0]
        fields = _FIELDS.get(kind)
        if fields is None:
            self.counts["unknown_events"] += 1
            return []
        values = _named(event[1:] if isinstance(event, list) else event, fields)
        if kind == "AllBlocksCleared":
            return [AllBlocksCleared()]
        if not self._is_ours(values):
            self.counts["other_groups"] += 1
            return []
        handles = [_handle(value) for value in _list(values["block_hashes"])]
        if kind == "BlockRemoved":
            return [BlockRemoved(tuple(handles))] if handles else []
        return self._stored(handles, values)

    def _is_ours(self, values: dict[str, Any]) -> bool:
        """Whether an event is about the group that is followed; the first usable one is, from then on."""
        group, kind = values.get("group_idx"), values.get("kv_cache_spec_kind")
        if kind is not None and kind not in USABLE_KINDS:
            return False
        if group is None:
            return True
        if self._group is None and values.get("token_ids"):
            self._group = group
        return self._group in (None, group)

    def _stored(self, handles: list[BlockHash], values: dict[str, Any]) -> list[Event]:
        """One event per piece of a chain: in each, only the first block may begin a domain."""
        token_ids, size = array("i", _list(values["token_ids"])), values["block_size"]
        if not token_ids:
            return [BlockStored(tuple(handles), None, token_ids, 0)] if handles else []
        if not isinstance(size, int) or size < 1 or len(token_ids) != size * len(handles):
            raise ValueError("tokens and blocks do not agree")
        parent = None if values.get("parent_block_hash") is None else _handle(values["parent_block_hash"])
        adapter = _adapter(values)
        domains = self._domains(values, adapter, len(handles), at_start=parent is None)
        starts = sorted({*range(0, len(handles), MAX_BLOCKS), *domains})
        found: list[Event] = []
        for start, end in zip(starts, [*starts[1:], len(handles)], strict=True):
            tokens = token_ids[start * size : end * size]
            before = handles[start - 1] if start else parent
            domain = domains.get(start, b"")
            found.append(BlockStored(tuple(handles[start:end]), before, tokens, size, adapter, domain))
        return found

    def _domains(
        self, values: dict[str, Any], adapter: str | None, num_blocks: int, *, at_start: bool
    ) -> dict[int, bytes]:
        """Index of a block -> the domain that begins there."""
        keys = values.get("extra_keys")
        if not isinstance(keys, list):
            return {}
        of_adapter, domains = (adapter, values.get("lora_id")), dict[int, bytes]()
        for index, key in enumerate(_list(keys)[:num_blocks]):
            if not key:
                continue
            rest = _list(key)
            if rest[0] is not None and rest[0] in of_adapter:
                rest = rest[1:]
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


def _named(values: Any, fields: Sequence[str]) -> dict[str, Any]:
    """A map as it is, an array by its fields; those it ends before are missing."""
    if isinstance(values, dict):
        return values  # pyright: ignore[reportUnknownVariableType]: whatever the publisher sent
    if isinstance(values, list):
        return dict(zip(fields, _list(values), strict=False))
    raise TypeError("neither an array nor a map")


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value  # pyright: ignore[reportUnknownVariableType]: whatever the publisher sent
    raise TypeError("no list")


def _handle(value: Any) -> BlockHash:
    """A hash as bytes. The same 64 bits are sent signed by some engines, unsigned by others."""
    if isinstance(value, int):
        return BlockHash((value & (2**64 - 1)).to_bytes(8, "big"))
    if isinstance(value, bytes):
        return BlockHash(value)
    if isinstance(value, str):
        return BlockHash(value.encode())
    raise TypeError("no hash")


def _adapter(values: dict[str, Any]) -> str | None:
    """Its name; of engines that send a number only, one that nobody has: which adapter it is, is not known."""
    name, number = values.get("lora_name"), values.get("lora_id")
    if isinstance(name, str):
        return name
    return None if number is None else f"lora_id {number}"
