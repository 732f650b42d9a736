"""Compiled pools: the router's model of a prefix cache in compiled code, the same as ModelledPool in Python.

They are in the library of the block hashes (block_hashes.py), so routers need no torch for them. A block takes about
100 bytes instead of 370, and a decision matches all pools in one call. Calls are short and hold the interpreter's lock.
"""

import ctypes
import os
from array import array
from collections.abc import MutableSequence, Sequence
from functools import cache
from typing import Protocol

from headstart.core.cache.hashing import BlockHash
from headstart.model.kernels.block_hashes import HASH_BYTES, find_or_build_hash_library

_POLICIES = {"lru": 1, "2q": 0}
_P, _B, _L, _I = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_int
_CALLS: dict[str, tuple[object, ...]] = {
    "new": (_P, _L, _L, _I, ctypes.c_uint64, _P),
    "free": (None, _P),
    "dismantle": (_L, _P),
    "sizes": (None, _P, _P),
    "match": (_L, _P, _B, _L, _L),
    "match_all": (None, _P, _L, _B, _L, _P),
    "held": (_L, _P, _B, _L),
    "was_evicted": (_I, _P, _B),
    "is_idle_since": (_I, _P, _B, ctypes.c_int64),
    "acquire": (_I, _P, _P, _L, _P, _P),
    "extend": (_L, _P, _P, _L, _I, _P),
    "first_unsure": (_L, _P, _P, _L),
    "num_own": (_L, _P, _P, _L),
    "computed": (None, _P, _P, _L),
    "mark_used": (None, _P, _P, _L),
    "release": (None, _P, _P, _L),
    "keep": (None, _P, _P, _L),
    "distrust": (None, _P, _P, _L),
    "drop": (None, _P, _L),
    "resize": (None, _P, _L),
    "loss": (ctypes.c_double, _P, _L),
    "num_unused_since": (_L, _P, ctypes.c_int64),
    "check": (_I, _P),
}
"""Result and arguments of each function."""


class RequestHeldBlocks(Protocol):
    """The blocks of one request: those of its hashes up to some index, and the last uses of those it found."""

    block_hashes: list[BlockHash]
    blocks: MutableSequence[int]
    serials: MutableSequence[int]
    hit: int


class CompiledPoolFactory:
    """A maker of compiled pools, and the one that matches many at once. `seed`: places in their hash tables."""

    def __init__(self, library: ctypes.CDLL, seed: int) -> None:
        self.calls = {name: getattr(library, f"headstart_pool_{name}") for name in _CALLS}
        for name, (result, *arguments) in _CALLS.items():
            self.calls[name].restype, self.calls[name].argtypes = result, arguments
        self.pricing_kernel = library.headstart_prices  # of all replicas (router/pricing.py)
        self.pricing_kernel.restype, self.pricing_kernel.argtypes = None, (_L, _P, _P, _P, _P, _P)
        self.seed = seed
        self._last: list[BlockHash] = []
        self._joined = b""

    def __call__(
        self, capacity: int, max_blocks: int, eviction_policy: str, former: object | None = None
    ) -> "CompiledModelledPool":
        """Return an empty pool; the clock and the statistics of `former` go on."""
        assert former is None or isinstance(former, CompiledModelledPool)
        return CompiledModelledPool(self, capacity, max_blocks, eviction_policy, former)

    def match_in_all_pools(self, handles: Sequence[int], block_hashes: list[BlockHash]) -> "array[int]":
        """Return the number of leading blocks that each pool has."""
        hits, pools = array("i", bytes(4 * len(handles))), array("q", handles)
        joined = self.pack_hashes(block_hashes)
        self.calls["match_all"](_address(pools), len(handles), joined, len(block_hashes), _address(hits))
        return hits

    def pack_hashes(self, block_hashes: list[BlockHash]) -> bytes:
        """Return the hashes as one string. It is kept, since a decision and its request follow each other."""
        if block_hashes is not self._last or len(self._joined) != HASH_BYTES * len(block_hashes):
            self._last, self._joined = block_hashes, b"".join(block_hashes)
            assert len(self._joined) == HASH_BYTES * len(block_hashes), "a block hash has 32 bytes"
        return self._joined


class CompiledModelledPool:
    """The blocks of one cache of `capacity` blocks, which may become `max_blocks`. A ModelledCache of the router."""

    def __init__(
        self,
        maker: CompiledPoolFactory,
        capacity: int,
        max_blocks: int,
        policy: str,
        former: "CompiledModelledPool | None",
    ) -> None:
        self._maker = maker
        self._calls = maker.calls
        self.capacity = capacity
        before = former.handle if former is not None else None
        self.handle: int = self._calls["new"](capacity, max_blocks, _POLICIES[policy], maker.seed, before)
        self._sizes = array("q", bytes(40))

    def __del__(self) -> None:
        self._calls["free"](self.handle)

    def _size(self, index: int) -> int:
        self._calls["sizes"](self.handle, _address(self._sizes))
        return self._sizes[index]

    def __len__(self) -> int:
        return self._size(1)

    @property
    def num_idle(self) -> int:
        return self._size(2)

    @property
    def num_held(self) -> int:
        return self._size(3)

    @property
    def last_use_serial(self) -> int:
        return self._size(4)

    @property
    def teardown_parts(self) -> "tuple[CompiledModelledPool]":
        return (self,)

    def dismantle_some(self, num: int) -> int:
        """Free some thousand entries; return their number, 0 when nothing is left. The pool is used no more."""
        return self._calls["dismantle"](self.handle)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return bool(self._calls["match"](self.handle, block_hash, 1, 0))

    def was_evicted(self, block_hash: BlockHash) -> bool:
        return bool(self._calls["was_evicted"](self.handle, block_hash))

    def is_idle_used_since(self, block_hash: BlockHash, serial: int) -> bool:
        return bool(self._calls["is_idle_since"](self.handle, block_hash, serial))

    def num_singly_referenced_among(self, blocks: Sequence[int]) -> int:
        return self._of_blocks("num_own", blocks)

    def num_cached_prefix_blocks(self, block_hashes: list[BlockHash], near: int = 0) -> int:
        return self._calls["match"](self.handle, self._maker.pack_hashes(block_hashes), len(block_hashes), near)

    def count_in_use_and_prefix(self, block_hashes: list[BlockHash]) -> tuple[int, int]:
        return self.num_held, self._calls["held"](self.handle, self._maker.pack_hashes(block_hashes), len(block_hashes))

    def expected_evicted_reusable_blocks(self, num_blocks: int) -> float:
        return self._calls["loss"](self.handle, num_blocks)

    def num_idle_unused_since(self, serial: int) -> int:
        return self._calls["num_unused_since"](self.handle, serial)

    def num_leading_computed_blocks(self, reservation: RequestHeldBlocks) -> int:
        if not reservation.blocks:
            return reservation.hit
        first = self._of_blocks("first_unsure", reservation.blocks)
        return reservation.hit if first == len(reservation.blocks) else first

    # ------------------------------------------------------------------------------------------------------- changes

    def acquire_cached(self, reservation: RequestHeldBlocks, end: int) -> None:
        start = len(reservation.blocks)
        num = end - start
        if not num:
            return
        found, serials = array("i", bytes(4 * num)), array("q", bytes(8 * num))
        hashes = self._hashes(reservation, start)
        is_there = num > 0 and self._calls["acquire"](self.handle, hashes, num, _address(found), _address(serials))
        assert is_there, "a block is there and one before it is not"
        reservation.blocks = found if not start else array("i", reservation.blocks) + found
        reservation.serials = serials if not start else array("q", reservation.serials) + serials

    def add_missing_blocks(self, reservation: RequestHeldBlocks, unsure: int) -> None:
        num = len(reservation.block_hashes)
        if len(reservation.blocks) == num:
            return
        self.acquire_cached(reservation, self.num_cached_prefix_blocks(reservation.block_hashes))
        start = len(reservation.blocks)
        found = array("i", bytes(4 * (num - start)))
        hashes = self._hashes(reservation, start)
        added = self._calls["extend"](self.handle, hashes, num - start, unsure, _address(found))
        del found[added:]
        reservation.blocks = array("i", reservation.blocks) + found if start else found

    def record_computed(self, blocks: Sequence[int]) -> None:
        self._of_blocks("computed", blocks)

    def mark_used(self, blocks: Sequence[int]) -> None:
        self._of_blocks("mark_used", blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self._of_blocks("release", blocks)

    def drop_uncomputed_blocks(self, blocks: Sequence[int], num_kept: int) -> None:
        self._of_blocks("keep", blocks[:num_kept])
        self._of_blocks("distrust", blocks[num_kept:])

    def evict(self, num: int) -> None:
        self._calls["drop"](self.handle, num)

    def resize(self, capacity: int) -> None:
        self._calls["resize"](self.handle, capacity)
        self.capacity = self._size(0)

    def check_invariants(self) -> None:
        failed = self._calls["check"](self.handle)
        assert not failed, f"check {failed} of modelled_pool.cpp failed"

    def _of_blocks(self, name: str, blocks: Sequence[int]) -> int:
        positions = blocks if isinstance(blocks, array) else array("i", blocks)
        return self._calls[name](self.handle, _address(positions), len(positions))

    def _hashes(self, reservation: RequestHeldBlocks, start: int) -> int:
        """Return the address of the hashes from `start` on; the joined string is kept until the next question."""
        joined = self._maker.pack_hashes(reservation.block_hashes)
        return (ctypes.cast(_B(joined), _P).value or 0) + HASH_BYTES * start


def _address(values: "array[int]") -> int:
    return values.buffer_info()[0]


@cache
def compiled_pool_factory() -> CompiledPoolFactory | None:
    """Return the maker of compiled pools, built on first use; None if there is no compiler here."""
    path = find_or_build_hash_library()
    if path is None:
        return None
    return CompiledPoolFactory(ctypes.PyDLL(path), int.from_bytes(os.urandom(8), "little"))
