"""Names depend on everything before them, and on nothing else."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cache.hashing import BlockHash, extend_block_hashes, pack_tokens_as_int32, root_hash

ROOT = root_hash(b"model")


def names(tokens: list[int], root: BlockHash = ROOT, block_size: int = 4) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, array("i", tokens), block_size, root)
    return hashes


def test_only_full_blocks_have_names() -> None:
    assert [len(names([1] * n)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_same_tokens_behind_another_parent_have_another_name() -> None:
    block = [5, 6, 7, 8]
    assert names(block * 2)[0] != names(block * 2)[1]
    assert names([1, 2, 3, 4, *block])[1] != names([1, 2, 3, 5, *block])[1]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 40))
def test_extending_step_by_step_equals_hashing_from_scratch(tokens: list[int], cut: int) -> None:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, array("i", tokens[:cut]), 4, ROOT)
    extend_block_hashes(hashes, array("i", tokens), 4, ROOT)
    assert hashes == names(tokens)


def test_until_limits_what_is_named() -> None:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, array("i", range(16)), 4, ROOT, until=9)
    assert hashes == names(list(range(16)))[:2]


@pytest.mark.parametrize(
    "other",
    [
        root_hash(b"mode"),
        root_hash(b"model", adapter=""),
        root_hash(b"model", adapter="x"),
        root_hash(b"model", domain=b"x"),
        root_hash(b"modelx"),
    ],
)
def test_one_changed_ingredient_changes_the_root(other: BlockHash) -> None:
    assert other != ROOT


def test_fields_of_the_root_cannot_run_into_each_other() -> None:
    assert root_hash(b"m", domain=b"xs") != root_hash(b"mx", domain=b"s")
    assert root_hash(b"m", adapter="x") != root_hash(b"m", domain=b"=x")


def test_names_are_stable_across_processes_and_versions() -> None:
    """Stores and routers of other processes rely on these very bytes."""
    assert names([0, 1, 2, 3])[0].hex() == ("845f1314fa9da7b76737eb40ccdd4d97f761a2dad74f31b7166546042d75e4ee")


def test_pack_keeps_what_is_packed_and_refuses_what_is_no_int32() -> None:
    packed = array("i", [1, 2])
    assert pack_tokens_as_int32(packed) is packed and pack_tokens_as_int32([1, 2]) == packed
    with pytest.raises(OverflowError):
        pack_tokens_as_int32([2**31])
    with pytest.raises(TypeError):
        pack_tokens_as_int32(["1"])  # type: ignore[list-item]
