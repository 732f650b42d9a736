"""Pending: the blocks that wait to be written, in order of priority. For one thread, no I/O.

Pinned ones first, then those used since they were offered, then the rest; among equals the first offered, so that the
head of a chain precedes its tail. A block that is offered again replaces its earlier offer.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable
from typing import NamedTuple

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash


class Offer(NamedTuple):
    """One block of the pool, valid as long as the block has this version."""

    block: int
    version: int
    key: BlockKey
    offered_at: float = float("inf")


_Offers = OrderedDict[BlockHash, Offer]


class Pending:
    """At most `max_blocks` offers."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._pinned, self._used, self._rest = self._places = (_Offers(), _Offers(), _Offers())
        self._kept: Container[BlockHash] = ()

    def __len__(self) -> int:
        return sum(map(len, self._places))

    def add(self, offer: Offer) -> int:
        """Add an offer; return the number dropped for it (0 or 1): the oldest of the lowest priority."""
        block_hash = offer.key.block_hash
        place = self._pinned if block_hash in self._kept else self._used if block_hash in self._used else self._rest
        place[block_hash] = offer
        return self._drop(len(self) - self._max_blocks, self._places)

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """Mark blocks as used."""
        for block_hash in block_hashes:
            if (offer := self._rest.pop(block_hash, None)) is not None:
                self._used[block_hash] = offer

    def keep(self, block_hashes: Container[BlockHash]) -> None:
        """Set the pinned blocks: these, and only these."""
        self._kept = block_hashes
        for place in (self._used, self._rest):
            for block_hash in [block_hash for block_hash in place if block_hash in block_hashes]:
                self._pinned[block_hash] = place.pop(block_hash)
        for block_hash in [block_hash for block_hash in self._pinned if block_hash not in block_hashes]:
            self._used[block_hash] = self._pinned.pop(block_hash)

    def oldest(self) -> float:
        """Return when the oldest of the next ones of each kind was offered; inf: there are none."""
        return min((next(iter(place.values())).offered_at for place in self._places if place), default=float("inf"))

    def remove(self, block_hashes: Iterable[BlockHash]) -> None:
        """Remove these."""
        for block_hash in block_hashes:
            for place in self._places:
                place.pop(block_hash, None)

    def clear(self) -> int:
        """Remove all; return their number."""
        return self._drop(len(self), self._places)

    def take(self, num: int) -> list[Offer]:
        """Remove and return the next `num`, or all there are."""
        taken: list[Offer] = []
        for place in self._places:
            while place and len(taken) < num:
                taken.append(place.popitem(last=False)[1])
        return taken

    def put_back(self, taken: Iterable[Offer]) -> None:
        """Return offers from `take` to the front of their kind, unless they have been offered again since."""
        for offer in reversed(list(taken)):
            block_hash = offer.key.block_hash
            if not any(block_hash in place for place in self._places):
                place = self._pinned if block_hash in self._kept else self._used
                place[block_hash] = offer
                place.move_to_end(block_hash, last=False)

    def shed(self, num_left: int) -> int:
        """Drop the oldest unpinned offers until `num_left` of them remain; return the number dropped."""
        places = (self._used, self._rest)
        return self._drop(sum(map(len, places)) - num_left, places)

    def _drop(self, num: int, places: tuple[_Offers, ...]) -> int:
        """Drop up to `num`, the lowest priority first."""
        left = num
        for place in reversed(places):
            while place and left > 0:
                place.popitem(last=False)
                left -= 1
        return max(0, num) - max(0, left)
