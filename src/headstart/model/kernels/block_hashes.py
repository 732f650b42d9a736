"""Block hashes in compiled code: the same as `hash_chain` of core/cache/hashing.py, about four times as fast.

A library of its own, built like the kernels. It imports no torch, so that routers can use it. Without a compiler, on a
processor without SHA instructions, or with HEADSTART_KERNELS=none, there is none, and Python does the work.
"""

import ctypes
import os
from functools import cache, lru_cache
from struct import Struct

from headstart.core.cache.hashing import HashChain, hash_chain
from headstart.model.kernels.build import HASHES, BuildError, build, cache_folder, packaged

HASH_BYTES = 32
LEAST_BLOCKS = 3  # with fewer, the call costs more than it saves


class CompiledChain:
    """A HashChain: `parent`, the bytes of blocks, and the bytes per block -> the hashes of the blocks."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._hashes = library.headstart_block_hashes
        self._hashes.restype = ctypes.c_int
        self._hashes.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_char_p]

    def __call__(self, parent: bytes, raw: bytes, stride: int) -> list[bytes]:
        num = len(raw) // stride
        if num < LEAST_BLOCKS:
            return hash_chain(parent, raw, stride)
        hashes = ctypes.create_string_buffer(num * HASH_BYTES)
        if not self._hashes(parent, raw, stride, num, hashes):
            return hash_chain(parent, raw, stride)
        return list(_parts(num).unpack(hashes))


@cache
def compiled_chain() -> HashChain | None:
    """Return the compiled chain, built on first use; None if there is none here."""
    path = library_path()
    if path is None:
        return None
    library = ctypes.CDLL(path)
    return CompiledChain(library) if library.headstart_has_sha() else None


@cache
def library_path() -> str | None:
    """Return the library of hashes/ that can be loaded, built on first use; None if there is none here."""
    if os.environ.get("HEADSTART_KERNELS") == "none":
        return None
    try:
        path = str(packaged(HASHES) or build(HASHES, cache_folder(os.environ), environ=os.environ))
        ctypes.CDLL(path)
    except (BuildError, OSError):
        return None
    return path


@lru_cache(maxsize=256)
def _parts(num: int) -> Struct:
    return Struct(f"{HASH_BYTES}s" * num)
