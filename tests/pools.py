"""Chains of blocks for tests of the pool: four tokens to a block."""

from array import array
from collections.abc import Iterable

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash, extend_block_hashes, root_hash

ROOT = root_hash(b"")
STRIDE = 16


def names_of(tokens: range) -> list[BlockHash]:
    names: list[BlockHash] = []
    extend_block_hashes(names, array("i", tokens), 4, ROOT)
    return names


def publish_chain(pool: BlockPool, blocks: list[int], tokens: range, tenant: str = "") -> list[BlockHash]:
    ids, names = array("i", tokens), names_of(tokens)
    for index, block in enumerate(blocks):
        raw = ids[index * 4 : index * 4 + 4].tobytes()
        assert pool.publish(block, names[index], names[index - 1] if index else ROOT, raw, tenant)
    return names


def lookup(pool: BlockPool, names: list[BlockHash], tokens: Iterable[int]) -> list[int]:
    return pool.match_prefix(names, ROOT, array("i", tokens).tobytes(), STRIDE)


class Index:
    """A listener that keeps what can be found."""

    def __init__(self) -> None:
        self.names: set[BlockHash] = set()
        self.removed_names: list[BlockHash] = []
        self.num_clears = 0

    def on_block_published(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        assert block_hash not in self.names
        self.names.add(block_hash)

    def on_block_removed(self, block_hash: BlockHash) -> None:
        self.names.remove(block_hash)
        self.removed_names.append(block_hash)

    def on_cache_cleared(self) -> None:
        self.names.clear()
        self.num_clears += 1
