"""Block hashes in compiled code equal those in Python, and an install without it is complete."""

import os
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cache.hashing import extend_block_hashes, hash_block_chain, root_hash
from headstart.model.kernels import block_hashes
from headstart.model.kernels import build as building
from headstart.model.kernels.block_hashes import LEAST_BLOCKS, load_compiled_hash_chain
from headstart.model.kernels.build import (
    HASHES,
    BuildError,
    build_wheel_kernels,
    compile_kernels,
    find_cxx_compiler,
    packaged_library,
)
from headstart.model.kernels.library import cpu_flags

CHAIN = load_compiled_hash_chain()
needs_chain = pytest.mark.skipif(CHAIN is None, reason="no compiler, or a processor without SHA instructions")


def has_compiler() -> bool:
    try:
        return bool(find_cxx_compiler(os.environ))
    except BuildError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no compiler")


@needs_compiler
@pytest.mark.skipif(os.environ.get("HEADSTART_KERNELS") == "none", reason="there are to be no kernels")
def test_there_is_a_library_wherever_it_can_be_built_and_run() -> None:
    """Or else the tests below would be left out without a word."""
    assert (CHAIN is not None) == ("sha_ni" in cpu_flags())


@needs_chain
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=900), st.integers(1, 70))
def test_a_compiled_chain_equals_the_one_in_python(parent: bytes, raw: bytes, num_tokens: int) -> None:
    assert CHAIN is not None
    assert CHAIN(parent, raw, 4 * num_tokens) == hash_block_chain(parent, raw, 4 * num_tokens)


@needs_chain
@pytest.mark.parametrize("stride", [4, 20, 24, 28, 64, 84, 88, 92, 96, 512, 4096])
def test_every_length_of_the_padding_is_right(stride: int) -> None:
    """SHA-256 pads to 64 bytes, with one more chunk if the length does not fit."""
    assert CHAIN is not None
    raw = os.urandom(stride * 9 + 3)
    hashes = CHAIN(b"p" * 32, raw, stride)
    assert hashes == hash_block_chain(b"p" * 32, raw, stride)
    assert len(hashes) == 9 > LEAST_BLOCKS and all(type(block_hash) is bytes for block_hash in hashes)


@needs_chain
def test_block_hashes_do_not_depend_on_what_computes_them() -> None:
    tokens, root = array("i", range(1_000)), root_hash(b"m")
    here, there = [], []
    for until in (16, 40, 500, 1_000):
        extend_block_hashes(here, tokens, 16, root, until=until, chain=CHAIN)
        extend_block_hashes(there, tokens, 16, root, until=until)
        assert here == there and len(here) == until // 16


def test_without_a_compiler_or_with_none_asked_for_python_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_hashes, "find_or_build_hash_library", block_hashes.find_or_build_hash_library.__wrapped__)
    monkeypatch.setenv("HEADSTART_KERNELS", "none")
    assert load_compiled_hash_chain.__wrapped__() is None
    monkeypatch.delenv("HEADSTART_KERNELS")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "PACKAGED", tmp_path / "compiled")
    assert load_compiled_hash_chain.__wrapped__() is None


@needs_compiler
def test_a_wheel_brings_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "PACKAGED", tmp_path)
    made = build_wheel_kernels(HASHES, tmp_path, environ=os.environ)
    assert packaged_library(HASHES) == made
    assert compile_kernels(HASHES, tmp_path / "cache", environ=os.environ) != made


def test_it_needs_no_torch() -> None:
    """A router has none."""
    build = "import sys, headstart.model.kernels.block_hashes as b; b.load_compiled_hash_chain()"
    code = f"{build}; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
