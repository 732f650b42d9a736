"""StoredResponses: the stored responses of all tenants, for `previous_response_id` and retrieval.

Bounded in bytes, entries and age. A response refers to the one it continues, so a conversation of n turns holds each
turn once. Removing a response keeps the turns that later ones of the conversation need. When the bounds are exceeded,
the least recently used response of the tenant that holds the most bytes is removed: no tenant can evict the responses
of another that holds less.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json

MAX_ENTRIES = 16_384
ENTRY_BYTES = 512  # of the objects of an entry beside its JSON


class StoredResponse(NamedTuple):
    """A stored response as JSON, decoded."""

    response: Json
    items: list[Json]  # of its own input


@dataclass(slots=True, eq=False)
class ConversationTurn:
    """The input and output items of one response, and the turn before. Freed when no entry and no turn refers to it."""

    items: bytes  # JSON
    previous: "ConversationTurn | None"
    num_references: int = 0
    chain_bytes: int = field(init=False)  # of the conversation up to here

    def __post_init__(self) -> None:
        self.chain_bytes = len(self.items) + (0 if self.previous is None else self.previous.chain_bytes)


class StoredConversation(NamedTuple):
    """The items of a conversation, and its last turn, for the response that continues it."""

    items: list[Json]
    last: ConversationTurn


@dataclass(slots=True, eq=False)
class _Entry:
    response: bytes  # JSON
    items: bytes  # JSON of the input
    turn: ConversationTurn
    stored_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + ENTRY_BYTES


@dataclass(slots=True, eq=False)
class _Tenant:
    """The responses of one tenant, least recently used first."""

    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict[str, _Entry])
    num_bytes: int = 0


class StoredResponses:
    """Stored responses by tenant and id. Thread-safe. Times in seconds, from any one clock."""

    def __init__(self, max_bytes: int, max_age: float, max_entries: int = MAX_ENTRIES) -> None:
        """`max_bytes` 0: nothing is stored."""
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._max_entries = max_entries
        self._tenants: dict[str, _Tenant] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_entries = 0

    def add(self, tenant: str, stored: StoredResponse, now: float, previous: ConversationTurn | None = None) -> None:
        """Store a response that continues `previous`. One that exceeds the bounds alone is not stored."""
        encode = msgspec.json.encode
        response, items = stored
        turn = ConversationTurn(encode([*items, *response["output"]]), previous)
        entry = _Entry(encode(response), encode(items), turn, now)
        if entry.num_bytes + len(turn.items) > self._max_bytes:
            return
        with self._lock:
            self._expire(now)
            owned = self._tenants.setdefault(tenant, _Tenant())
            owned.entries[response["id"]] = entry
            self._count(owned, entry.num_bytes, 1)
            self._refer(owned, turn)
            self._shrink()

    def get(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """Return a response of this tenant; None if it has none with this id, or no longer."""
        with self._lock:
            entry = self._used(tenant, response_id, now)
            if entry is None:
                return None
            response, items = entry.response, entry.items
        return StoredResponse(parse_json(response), parse_json(items))

    def history(self, tenant: str, response_id: str, now: float) -> StoredConversation | None:
        """Return the conversation up to the end of a response; None as `get`."""
        with self._lock:
            entry = self._used(tenant, response_id, now)
        if entry is None:
            return None
        turns: list[bytes] = []
        turn: ConversationTurn | None = entry.turn
        while turn is not None:
            turns.append(turn.items)
            turn = turn.previous
        items = [item for text in reversed(turns) for item in parse_json(text)]
        return StoredConversation(items, entry.turn)

    def conversation_bytes(self, tenant: str, response_id: str, now: float) -> int:
        """Return the bytes that `history` or `get` would decode; 0 if the tenant has no such response."""
        with self._lock:
            entry = self._used(tenant, response_id, now)
            return 0 if entry is None else entry.turn.chain_bytes + entry.num_bytes

    def remove(self, tenant: str, response_id: str, now: float) -> bool:
        """Remove a response; return whether it was there."""
        with self._lock:
            self._expire(now)
            return self._remove(tenant, response_id)

    def _used(self, tenant: str, response_id: str, now: float) -> _Entry | None:
        self._expire(now)
        owned = self._tenants.get(tenant)
        entry = None if owned is None else owned.entries.get(response_id)
        if owned is None or entry is None or now - entry.stored_at > self._max_age:
            return None
        owned.entries.move_to_end(response_id)
        return entry

    def _expire(self, now: float) -> None:
        """Remove the old responses at the head of each tenant's order; an old one that was used since stays longer."""
        for tenant, owned in list(self._tenants.items()):
            while owned.entries:
                oldest = next(iter(owned.entries))
                if now - owned.entries[oldest].stored_at <= self._max_age:
                    break
                self._remove(tenant, oldest)

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes or self.num_entries > self._max_entries:
            tenant = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._remove(tenant, next(iter(self._tenants[tenant].entries)))

    def _remove(self, tenant: str, response_id: str) -> bool:
        owned = self._tenants.get(tenant)
        entry = None if owned is None else owned.entries.pop(response_id, None)
        if owned is None or entry is None:
            return False
        self._count(owned, -entry.num_bytes, -1)
        turn: ConversationTurn | None = entry.turn
        while turn is not None:
            turn.num_references -= 1
            if turn.num_references:
                break
            self._count(owned, -len(turn.items), 0)
            turn = turn.previous
        if not owned.entries:
            del self._tenants[tenant]
        return True

    def _refer(self, owned: _Tenant, turn: ConversationTurn | None) -> None:
        """Add a reference to a turn. One without any is counted, and refers to the one before: it is new, or was
        removed while a response that continues it was computed.
        """
        while turn is not None:
            turn.num_references += 1
            if turn.num_references > 1:
                return
            self._count(owned, len(turn.items), 0)
            turn = turn.previous

    def _count(self, owned: _Tenant, num_bytes: int, num_entries: int) -> None:
        owned.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self.num_entries += num_entries
