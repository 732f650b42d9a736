"""KV events: changes of the prefix index; replayed in order they reproduce it exactly.

Field names are vLLM's, so that routers and dashboards made for vLLM can read them; the wire format is in
engine/kv_event_publisher.py. The blocks of an event belong to one chain, and never to both a public prefix
and the private part after it.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.cache.hashing import BlockHash
from headstart.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one chain that can now be found."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None  # of the block before the first one, None at position 0
    token_ids: "array[int]"  # of all of them, packed int32
    block_size: int
    adapter: str | None = None
    domain: bytes = b""  # isolation domain, if the first block here is the first private one of its chain; else empty


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can no longer be found."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole index is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
EventSink = Callable[[list[Event]], None]  # must neither block nor raise: it is called between two steps


class _Chain:
    """A BlockStored event that may still grow."""

    __slots__ = ("adapter", "block_hashes", "domain", "parent", "tokens")

    def __init__(self, block_hash: BlockHash, parent: BlockHash | None, tokens: bytes) -> None:
        self.block_hashes = [block_hash]
        self.parent = parent
        self.tokens = [tokens]
        self.adapter: str | None = None
        self.domain = b""


class BlockEventLog:
    """A BlockListener (core/cache/block_pool.py) that collects events until they are drained.

    Consecutively published blocks of one chain become one event, and so do consecutively removed blocks. All other
    order is kept. Call `publishing` before blocks of a sequence are published.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pending: list[_Chain | list[BlockHash] | AllBlocksCleared] = []
        self._seq: Sequence | None = None

    def set_publishing_request(self, seq: Sequence) -> None:
        """Set the sequence whose blocks are published next; it supplies the parent of the first block."""
        self._seq = seq

    def on_block_published(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Record a published block."""
        last = self._pending[-1] if self._pending else None
        if isinstance(last, _Chain) and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
            last.tokens.append(tokens)
        else:
            self._pending.append(self._begin(block_hash, parent, tokens))

    def on_block_removed(self, block_hash: BlockHash) -> None:
        """Record a removed block."""
        last = self._pending[-1] if self._pending else None
        if isinstance(last, list):
            last.append(block_hash)
        else:
            self._pending.append([block_hash])

    def on_cache_cleared(self) -> None:
        """Record that the index is empty."""
        self._pending.append(AllBlocksCleared())

    def drain(self) -> list[Event]:
        """Return the events since the last call, in order; [] if there are none."""
        if not self._pending:
            return []
        pending, self._pending, self._seq = self._pending, [], None
        return [self._event(item) for item in pending]

    def _begin(self, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> _Chain:
        """Begin a new event; the hash of a region border is replaced by the hash of the block before it."""
        seq = self._seq
        assert seq is not None, "call `publishing` before a block is published"
        chain = _Chain(block_hash, parent, tokens)
        chain.adapter = seq.request.adapter
        if parent == seq.region:
            chain.domain = seq.request.domain
            chain.parent = seq.block_hashes[seq.num_public_blocks - 1] if seq.num_public_blocks else None
        elif parent == seq.root:
            chain.parent = None
        return chain

    def _event(self, item: _Chain | list[BlockHash] | AllBlocksCleared) -> Event:
        if isinstance(item, _Chain):
            token_ids = array("i", b"".join(item.tokens))
            return BlockStored(
                tuple(item.block_hashes), item.parent, token_ids, self._block_size, item.adapter, item.domain
            )
        return BlockRemoved(tuple(item)) if isinstance(item, list) else item
