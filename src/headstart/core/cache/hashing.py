"""Block names: chained SHA-256 over packed token ids, the one key space of engine, router, events and simulator.

A block's name depends on everything before it, so equal names mean equal prefixes. Invariants: never Python's `hash()`
(predictable: CVE-2025-25183); every field of the root is length-prefixed, so ("m", "xs") and ("mx", "s") differ; each
block is hashed once (vLLM #3402: the naive form is O(L^2)).
"""

import hashlib
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import NewType, cast

BlockHash = NewType("BlockHash", bytes)
FORMAT_VERSION = b"headstart-block-1"


def pack(token_ids: Iterable[int]) -> "array[int]":
    """Returns `token_ids` as packed int32; what is packed already is returned as it is.

    Raises OverflowError for an id outside int32 and TypeError for what is not an int.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    return array("i", token_ids)


@lru_cache(maxsize=256)
def root_hash(model: bytes, *, adapter: str | None = None, domain: bytes = b"") -> BlockHash:
    """Names the empty prefix of one model, adapter and isolation domain: the parent of every first block."""
    digest = hashlib.sha256(FORMAT_VERSION)
    for field in (model, b"" if adapter is None else b"=" + adapter.encode(), domain):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return BlockHash(digest.digest())


def region_hash(parent: BlockHash, domain: bytes) -> BlockHash:
    """Names the border behind a public prefix: the parent of the first block that belongs to one domain alone."""
    digest = hashlib.sha256(FORMAT_VERSION + b"/region")
    for field in (parent, domain):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return BlockHash(digest.digest())


def extend_hashes(
    hashes: list[BlockHash],
    token_ids: "array[int]",
    block_size: int,
    root: BlockHash,
    *,
    until: int | None = None,
    parent: BlockHash | None = None,
) -> None:
    """Appends to `hashes` the names of the full blocks of `token_ids[:until]` that it does not hold yet.

    The first of them hangs on the last name there is, or on `root` if there is none, or on `parent` if one is given.
    """
    end = len(token_ids) if until is None else until
    last: bytes = parent or (hashes[-1] if hashes else root)
    new, stride = hashlib.sha256().copy, token_ids.itemsize * block_size
    raw = token_ids[len(hashes) * block_size : end].tobytes()
    names: list[bytes] = []
    for start in range(0, len(raw) - stride + 1, stride):
        digest = new()  # copying an empty digest is cheaper than making one
        digest.update(last + raw[start : start + stride])
        last = digest.digest()
        names.append(last)
    hashes += cast("list[BlockHash]", names)  # a cast for all: calling BlockHash for each costs a tenth of the naming
