"""Rendezvous hashing: an order of the replicas for every key, the same in all routers without communication.

Thaler and Ravishankar, 1998. When a replica leaves, only the keys move whose first it was. A weight mixes the digests
of the key and of a name, so that many names take one pass over an array and no digest each.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


def key_digest(text: bytes) -> int:
    """Return the digest of a key or a name, of 64 bits."""
    return int.from_bytes(sha256(text).digest()[:8], "little")


def rendezvous_weights(key: bytes, digests: Sequence[int]) -> NDArray[np.uint64]:
    """Return the weights of names for a key, by their digests; the largest is first (the finalizer of splitmix64)."""
    mixed = np.array(digests, dtype=np.uint64) ^ np.uint64(key_digest(key))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def rendezvous_weight(key: bytes, name: str) -> int:
    """Return the weight of a replica's name for a key."""
    return int(rendezvous_weights(key, [key_digest(name.encode())])[0])


def rank_by_key(key: bytes, names: Iterable[str]) -> list[str]:
    """Return the names in the order of the key."""
    return sorted(names, key=lambda name: rendezvous_weight(key, name), reverse=True)
