"""Block hashes: chained SHA-256 over packed token ids, the one key space of engine, router, events and simulator.

A block's hash depends on all tokens before it, so equal hashes mean equal prefixes. Invariants: Python's `hash()` is
never used (predictable: CVE-2025-25183); every field of the root is length-prefixed, so ("m", "xs") and ("mx", "s")
differ; each block is hashed once (vLLM #3402: the naive form is O(L^2)). The chain itself is an argument, `HashChain`:
`hash_block_chain` here, or compiled code that gives the same (model/kernels/block_hashes.py).
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NewType, cast

BlockHash = NewType("BlockHash", bytes)
FORMAT_VERSION = b"headstart-block-1"
HASH_BYTES = 32
_PAGE = b"/page"
_PAGE_HEAD = HASH_BYTES - 4 - len(_PAGE)  # bytes of a page's name that are of its block's
HashChain = Callable[[bytes, bytes, int], list[bytes]]


def pack_tokens_as_int32(token_ids: Iterable[int]) -> "array[int]":
    """Return `token_ids` as packed int32; packed input is returned as it is.

    Raises OverflowError for an id outside int32 and TypeError for anything but an int.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    return array("i", token_ids)


@lru_cache(maxsize=256)
def root_hash(model: bytes, *, adapter: str | None = None, domain: bytes = b"") -> BlockHash:
    """Return the hash of the empty prefix of one model, adapter and domain: the parent of every first block."""
    digest = hashlib.sha256(FORMAT_VERSION)
    for field in (model, b"" if adapter is None else b"=" + adapter.encode(), domain):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return BlockHash(digest.digest())


def private_parent_hash_for_domain(parent: BlockHash, domain: bytes) -> BlockHash:
    """Return the parent hash of the first private block after a public prefix, for one isolation domain."""
    digest = hashlib.sha256(FORMAT_VERSION + b"/region")
    for field in (parent, domain):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return BlockHash(digest.digest())


def checkpoint_page_hash(block_hash: BlockHash, index: int) -> BlockHash:
    """Return the name of one page of the checkpoint behind a block, as long as a hash; see checkpoints.py."""
    return BlockHash(block_hash[:_PAGE_HEAD] + index.to_bytes(4, "little") + _PAGE)


def is_checkpoint_page_hash(block_hash: BlockHash) -> bool:
    """Return whether a hash names a page of a checkpoint."""
    return block_hash.endswith(_PAGE)


def extend_block_hashes(
    hashes: list[BlockHash],
    token_ids: "array[int]",
    block_size: int,
    root: BlockHash,
    *,
    until: int | None = None,
    parent: BlockHash | None = None,
    chain: HashChain | None = None,
) -> None:
    """Append to `hashes` the hashes of the full blocks of `token_ids[:until]` that it does not hold yet.

    The parent of the first of them is `parent` if given, else the last element of `hashes`, else `root`. `chain`
    computes them; None: `hash_block_chain`.
    """
    end = len(token_ids) if until is None else until
    raw = token_ids[len(hashes) * block_size : end].tobytes()
    last = parent or (hashes[-1] if hashes else root)
    new_hashes = (chain or hash_block_chain)(last, raw, token_ids.itemsize * block_size)
    hashes += cast("list[BlockHash]", new_hashes)  # one cast: calling BlockHash for each costs a tenth of the hashing


def hash_block_chain(parent: bytes, raw: bytes, stride: int) -> list[bytes]:
    """Return the hashes of the whole blocks of `stride` bytes in `raw`: each of the hash before it and its bytes."""
    new, hashes = hashlib.sha256().copy, list[bytes]()
    for start in range(0, len(raw) - stride + 1, stride):
        digest = new()  # copying an empty digest is cheaper than making one
        digest.update(parent + raw[start : start + stride])
        parent = digest.digest()
        hashes.append(parent)
    return hashes
