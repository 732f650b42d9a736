"""Recent: what went through the router lately, for the explainer alone. Bounded in requests and in bytes.

Prompts are kept as they were routed: text, or token ids where a client sent those. They are indexed by the names of
their leading runs of `chunk` characters, so the longest common prefix is a bisection among names and one comparison in
the run where prompts part. The tenant is in every name: prompts of two tenants have none in common.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_REQUESTS = 1000
MAX_BYTES = 32 << 20
CHUNK = 1024  # characters of a run, or token ids
NAME_BYTES = 16
ENTRY_BYTES = 1024  # of an entry beside its prompt and names, about
BYTES_PER_NAME = 200


@dataclass(slots=True, eq=False)
class Seen:
    """One request as the router saw it. Times in seconds on the body's clock."""

    request_id: str
    tenant: str
    prompt: "str | array[int]"
    at: float = 0.0  # when it was sent
    is_chat: bool = False  # the prompt is `reading.conversation`'s
    domain: bytes = b""
    model: str = ""
    adapter: str | None = None
    endpoint: str = ""  # the replica it was sent to; empty: none yet
    why: str = ""  # there, in the policy's words
    block_size: int = 16  # tokens
    prompt_tokens: int = 0  # as the engine counts; 0: not known
    predicted_tokens: int | None = None  # believed to be cached there
    cached_tokens: int | None = None  # as the engine reported
    reported_at: float | None = None

    @property
    def scope(self) -> tuple[bytes, str, str | None]:
        """Who may share its cache: prompts of another scope have other blocks, though they be equal."""
        return self.domain, self.model, self.adapter


class Nearest(NamedTuple):
    """An earlier request and how many leading characters (or token ids) it has in common."""

    seen: Seen
    common: int


class RecentRoutings:
    """The last requests, by id, by age and by how their prompts begin."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES, *, chunk: int = CHUNK) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.chunk = chunk
        self.num_bytes = 0  # of all that is kept, about
        self._order = 0
        self._seen: dict[str, tuple[int, Seen, list[bytes]]] = {}  # oldest first; its number, and its names
        self._by_name: dict[bytes, dict[str, None]] = {}  # ids of the requests that begin so, oldest first

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[Seen]:
        """Oldest first."""
        return (seen for _, seen, _ in self._seen.values())

    def add(self, seen: Seen) -> None:
        """Remembers a request that is sent, in the place of an older one of its id; forgets the oldest if it must."""
        self._forget(seen.request_id)
        names = _names(seen.tenant, seen.prompt, self.chunk)
        self._seen[seen.request_id] = (self._order, seen, names)
        self._order += 1
        self.num_bytes += _bytes_of(seen, names)
        for name in names:
            self._by_name.setdefault(name, {})[seen.request_id] = None
        while len(self._seen) > self.max_requests or (self.num_bytes > self.max_bytes and self._seen):
            self._forget(next(iter(self._seen)))

    def reported(self, request_id: str, cached_tokens: int, prompt_tokens: int = 0, at: float | None = None) -> None:
        """Notes what an engine said of a request; nothing if it is forgotten already."""
        found = self._seen.get(request_id)
        if found is not None:
            seen = found[1]
            seen.cached_tokens, seen.reported_at = cached_tokens, at
            seen.prompt_tokens = prompt_tokens or seen.prompt_tokens

    def find(self, request_id: str, tenant: str | None) -> Seen | None:
        """A tenant's request, None if there is none; `tenant` None: anybody's."""
        found = self._seen.get(request_id)
        return found[1] if found is not None and tenant in (None, found[1].tenant) else None

    def nearest(
        self, asked: Seen, *, scope: tuple[bytes, str, str | None] | None = None, endpoint: str | None = None
    ) -> Nearest | None:
        """The same tenant's request with the longest common prefix; of equals the newest, those of its own scope first.

        Of those that came before, if it was added itself. None if no other begins alike.
        `scope`, `endpoint`: only of these.
        """
        entry = self._seen.get(asked.request_id)
        own = entry is not None and entry[1] is asked
        order, names = (
            (entry[0], entry[2])
            if entry is not None and own
            else (self._order, _names(asked.tenant, asked.prompt, self.chunk))
        )

        def others(name: bytes) -> list[tuple[int, Seen]]:
            found = (self._seen[request_id] for request_id in self._by_name.get(name, ()))
            return [
                (number, seen)
                for number, seen, _ in found
                if number < order
                and (scope is None or seen.scope == scope)
                and (endpoint is None or seen.endpoint == endpoint)
            ]

        low, high = 0, len(names)  # names[:low] are there, names[high] is not
        while low < high:
            middle = (low + high) // 2
            if others(names[middle]):
                low = middle + 1
            else:
                high = middle
        if not low:
            return None
        start = (low - 1) * self.chunk
        best: tuple[int, bool, int, Seen] | None = None
        for number, seen in others(names[low - 1]):
            common = start + _common(asked.prompt[start : start + self.chunk], seen.prompt[start : start + self.chunk])
            if best is None or (common, seen.scope == asked.scope, number) > best[:3]:
                best = (common, seen.scope == asked.scope, number, seen)
        return Nearest(best[3], best[0]) if best is not None and best[0] else None

    def check(self) -> None:
        """Asserts that bounds and index hold; O(all), for tests."""
        assert len(self._seen) <= self.max_requests and self.num_bytes <= self.max_bytes
        assert self.num_bytes == sum(_bytes_of(seen, names) for _, seen, names in self._seen.values())
        indexed = {(name, request_id) for name, ids in self._by_name.items() for request_id in ids}
        assert indexed == {(name, key) for key, (_, _, names) in self._seen.items() for name in names}
        assert all(self._by_name.values()), "a name that nobody has is kept"

    def _forget(self, request_id: str) -> None:
        found = self._seen.pop(request_id, None)
        if found is None:
            return
        _, seen, names = found
        self.num_bytes -= _bytes_of(seen, names)
        for name in names:
            ids = self._by_name[name]
            del ids[request_id]
            if not ids:
                del self._by_name[name]


def _bytes_of(seen: Seen, names: list[bytes]) -> int:
    return ENTRY_BYTES + sys.getsizeof(seen.prompt) + BYTES_PER_NAME * len(names)


def _names(tenant: str, prompt: "str | array[int]", chunk: int) -> list[bytes]:
    """Names of the empty prefix, and of all that end with a whole run."""
    owner = tenant.encode()
    kind = b"text" if isinstance(prompt, str) else b"ids"
    digest = hashlib.blake2b(kind + len(owner).to_bytes(8, "little") + owner, digest_size=NAME_BYTES)
    names = [digest.digest()]
    for start in range(0, len(prompt) - chunk + 1, chunk):
        run = prompt[start : start + chunk]
        digest.update(run.encode("utf-8", "surrogatepass") if isinstance(run, str) else run.tobytes())
        names.append(digest.digest())
    return names


def _common(one: "str | array[int]", other: "str | array[int]") -> int:
    """Leading items that both have, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
