"""Rendezvous hashing: an order of the replicas for every key, the same in all routers without communication.

Thaler and Ravishankar, 1998. When a replica leaves, only the keys move whose first it was.
"""

from collections.abc import Iterable
from hashlib import sha256


def weight(key: bytes, name: str) -> bytes:
    """Return the weight of a replica's name for a key; to be compared, the largest first."""
    return sha256(len(key).to_bytes(8, "little") + key + name.encode()).digest()


def weights(key: bytes, names: Iterable[str]) -> list[bytes]:
    """Return the weights of many names for one key."""
    prefix = len(key).to_bytes(8, "little") + key
    return [sha256(prefix + name.encode()).digest() for name in names]


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """Return the names in the order of the key."""
    return sorted(names, key=lambda name: weight(key, name), reverse=True)
