"""Block hashes in compiled code: the same as `hash_block_chain` of core/cache/hashing.py, about four times as fast.

A library of its own, built like the kernels. It imports no torch, so that routers can use it. Without a compiler, on a
processor without SHA instructions, or with HEADSTART_KERNELS=none, there is none, and Python does the work.
"""

import ctypes
import os
from functools import cache

from headstart.core.cache.hashing import HashChain, hash_block_chain
from headstart.model.kernels.build import HASHES, BuildError, cache_folder, compile_kernels, packaged_library

HASH_BYTES = 32
LEAST_BLOCKS = 3  # with fewer, the call costs more than it saves


class CompiledHashChain:
    """A HashChain: `parent`, the bytes of blocks, and the bytes per block -> the hashes of the blocks."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._chain = library.headstart_hash_chain
        self._chain.restype, self._chain.argtypes = (
            ctypes.py_object,
            [ctypes.py_object, ctypes.py_object, ctypes.c_long],
        )

    def __call__(self, parent: bytes, raw: bytes, stride: int) -> list[bytes]:
        return (self._chain if len(raw) >= LEAST_BLOCKS * stride else hash_block_chain)(parent, raw, stride)


@cache
def load_compiled_hash_chain() -> HashChain | None:
    """Return the compiled chain, built on first use; None if there is none here."""
    path = find_or_build_hash_library()
    if path is None:
        return None
    library = ctypes.PyDLL(path)
    return CompiledHashChain(library) if library.headstart_has_sha() else None


@cache
def find_or_build_hash_library() -> str | None:
    """Return the library of hashes/ that can be loaded, built on first use; None if there is none here."""
    if os.environ.get("HEADSTART_KERNELS") == "none":
        return None
    try:
        path = str(packaged_library(HASHES) or compile_kernels(HASHES, cache_folder(os.environ), environ=os.environ))
        ctypes.CDLL(path)
    except (BuildError, OSError):
        return None
    return path
