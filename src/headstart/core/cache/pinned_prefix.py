"""Prefix: one pinned prefix, its state and its usage counters."""

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PrefixState(Enum):
    """The state of a prefix. Failed ones hold no blocks."""

    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"


class PrefixInfo(NamedTuple):
    """A snapshot of a pinned prefix. Units: tokens, blocks, seconds of the engine's clock."""

    name: str
    tenant: str  # empty: public
    state: PrefixState
    error: str | None  # why it failed
    num_tokens: int
    num_blocks: int
    hits: int  # requests that reused some of it
    tokens_saved: int  # reused by those requests
    last_used: float | None  # when the last of them was admitted


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """The registry's mutable record. `domain` is empty for a public prefix."""

    name: str
    tenant: str
    domain: bytes
    token_ids: "array[int]"  # whole blocks
    block_hashes: list[BlockHash] = field(default_factory=list[BlockHash])  # block hashes
    state: PrefixState = PrefixState.WARMING
    error: str | None = None
    request_id: str = ""  # of the request that computes it, while there is one
    num_attempts: int = 0
    hits: int = 0
    tokens_saved: int = 0
    last_used: float | None = None

    @property
    def is_pinned(self) -> bool:
        return self.state is not PrefixState.FAILED

    def snapshot(self) -> PrefixInfo:
        """Return a snapshot. Changes nothing."""
        return PrefixInfo(
            self.name,
            self.tenant,
            self.state,
            self.error,
            len(self.token_ids),
            len(self.block_hashes) if self.is_pinned else 0,
            self.hits,
            self.tokens_saved,
            self.last_used,
        )


def make_pinned_prefix(
    name: str, token_ids: Iterable[int], block_size: int, tenant: str = "", domain: bytes = b""
) -> PinnedPrefix:
    """Create a prefix of the whole blocks of `token_ids`. Raises InvalidRequestError (name, length)."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"{name[:80]!a} is not a valid prefix name; use up to 64 letters, digits, '.', '_' and '-'", param="name"
        )
    assert bool(tenant) == bool(domain), f"tenant {tenant!r} and its isolation domain go together"
    tokens = array("i", token_ids)
    if len(tokens) < block_size:
        raise InvalidRequestError(
            f"prefix {name!r} has {len(tokens)} tokens that later prompts can share: less than one block of "
            f"{block_size}, and only whole blocks are shared; make it longer"
        )
    return PinnedPrefix(name, tenant, domain, tokens[: len(tokens) // block_size * block_size])
