"""Compiled KVBlockLoops: the same as core/cache/eviction.py, on the same tables, a third of the time.

They are in the library of the block hashes (block_hashes.py) and call Python's own functions, so they hold the
interpreter's lock.
"""

import ctypes
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count

from headstart.core.cache.eviction import Entries, EvictionOrder, KVBlockLoops
from headstart.core.cache.hashing import BlockHash
from headstart.model.kernels.block_hashes import find_or_build_hash_library

_O, _P, _L = ctypes.py_object, ctypes.c_void_p, ctypes.c_long
_CALLS: dict[str, tuple[object, ...]] = {
    "find": (_O, _O, _O, _O, _O, _L),
    "hold": (_L, _O, _O, _P, _L, _P),
    "drop": (_L, _O, _O, _O, _P, _L, _P),
    "order_add": (_L, _O, _P, _P, _P, _L, _L, _L),
    "order_remove": (_L, _P, _P, _P, _L, _O),
}
"""Result and arguments of each function."""


class CompiledKVBlockLoops:
    """The loops in compiled code."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        calls = {name: getattr(library, f"headstart_{name}") for name in _CALLS}
        for name, (result, *arguments) in _CALLS.items():
            calls[name].restype, calls[name].argtypes = result, arguments
        self._find, self._hold, self._drop, self.order_add, self.order_remove = (calls[name] for name in _CALLS)

    def find_prefix(
        self, entries: Entries, block_hashes: list[BlockHash], root: BlockHash, tokens: bytes, stride: int
    ) -> list[int]:
        return self._find(entries, block_hashes, root, tokens, stride)

    def add_refs(self, refs: list[int], published: list[BlockHash | None], blocks: Sequence[int]) -> Sequence[int]:
        packed = _packed(blocks)
        address, num = packed.buffer_info()
        unused = array("i", bytes(4 * num))
        num_unused = self._hold(refs, published, address, num, unused.buffer_info()[0])
        return unused if num_unused == num else unused[:num_unused]

    def drop_refs(
        self, refs: list[int], published: list[BlockHash | None], scratch: list[int], blocks: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        packed = _packed(blocks)
        address, num = packed.buffer_info()
        freed = array("i", bytes(4 * (2 * num + 1)))
        num_idle = self._drop(refs, published, scratch, address, num, freed.buffer_info()[0])
        return freed[:num_idle], freed[num : num + freed[-1]]

    def two_queue_factory(self, marks: bytearray, num_blocks: int) -> Callable[[int], EvictionOrder]:
        links, numbers = array("i", bytes(12 * num_blocks)), count(1)
        return lambda max_protected: CompiledTwoQueue(self, marks, links, next(numbers), max_protected)


class CompiledTwoQueue:
    """A TwoQueueOrder (core/cache/eviction.py) as two linked lists. All orders of a pool share the `links` of its
    blocks."""

    def __init__(
        self, ops: CompiledKVBlockLoops, marks: bytearray, links: "array[int]", number: int, max_protected: int
    ) -> None:
        self._add, self._remove = ops.order_add, ops.order_remove
        self._marks, self._links, self._max_protected = marks, links, max_protected
        self._lists = array("i", (2 * number, 0, 0, 0, 2 * number + 1, 0, 0, 0))
        self._addresses = links.buffer_info()[0], self._lists.buffer_info()[0]

    def add_chain(self, blocks: Sequence[int], hot: int = 0) -> int:
        packed = _packed(blocks)
        return self._add(self._marks, *self._addresses, *packed.buffer_info(), hot, self._max_protected)

    def remove(self, block: int) -> None:
        one = array("i", (block,))
        self._remove(*self._addresses, *one.buffer_info(), None)

    def remove_for_reuse(self, blocks: Sequence[int]) -> None:
        packed = _packed(blocks)
        self._remove(*self._addresses, *packed.buffer_info(), self._marks)

    def pop_victim(self) -> int:
        block = self._lists[1] or self._lists[5]
        self.remove(block)
        return block

    @property
    def teardown_tables(self) -> tuple[OrderedDict[int, None], ...]:
        return ()

    def __len__(self) -> int:
        return self._lists[3] + self._lists[7]

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and self._links[3 * block + 2] in self._lists[::4]

    def __iter__(self) -> Iterator[int]:
        for block in (self._lists[1], self._lists[5]):
            while block:
                yield block
                block = self._links[3 * block]


@cache
def compiled_block_loops() -> KVBlockLoops | None:
    """Return the compiled loops, built on first use; None if there are none here."""
    path = find_or_build_hash_library()
    return None if path is None else CompiledKVBlockLoops(ctypes.PyDLL(path))


def _packed(blocks: Sequence[int]) -> "array[int]":
    """Return blocks as an array whose address is valid while it is held."""
    return blocks if isinstance(blocks, array) else array("i", blocks)
