"""Compiled loops over the blocks of a chain, one by one; tests/core/test_blocks_at_random.py compares whole pools."""

from array import array
from collections.abc import Callable

import pytest

from headstart.core.cache.eviction import HOT, PYTHON, Entries, EvictionOrder, KVBlockLoops
from headstart.core.cache.hashing import extend_block_hashes, root_hash
from headstart.model.kernels.compiled_blocks import compiled_block_loops

COMPILED = compiled_block_loops()
ROOT, SIZE, STRIDE = root_hash(b"m"), 4, 16


@pytest.fixture(params=["python", "compiled"])
def ops(request: pytest.FixtureRequest) -> KVBlockLoops:
    if request.param == "python":
        return PYTHON
    if COMPILED is None:
        pytest.skip("no compiler")
    return COMPILED


def chain_of(num_blocks: int) -> "tuple[Entries, list, array[int]]":
    tokens, hashes, entries = array("i", range(num_blocks * SIZE)), [], {}
    extend_block_hashes(hashes, tokens, SIZE, ROOT)
    for index, block_hash in enumerate(hashes):
        raw = tokens[index * SIZE : (index + 1) * SIZE].tobytes()
        entries[block_hash] = (7 + index, hashes[index - 1] if index else ROOT, raw)
    return entries, hashes, tokens


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_blocks_are_found_up_to_the_first_that_is_missing_or_another(ops: KVBlockLoops, num_blocks: int) -> None:
    entries, hashes, tokens = chain_of(num_blocks)
    raw = tokens.tobytes()
    assert ops.find_prefix(entries, hashes, ROOT, raw, STRIDE) == list(range(7, 7 + num_blocks))
    assert ops.find_prefix(entries, hashes, root_hash(b"other"), raw, STRIDE) == []
    assert ops.find_prefix(entries, [], ROOT, b"", STRIDE) == []
    for index, block_hash in enumerate(hashes):
        block, parent, content = entries[block_hash]
        for other in (None, (block, b"p" * 32, content), (block, parent, b"x" * STRIDE), (block, parent, content[1:])):
            changed = {**entries, block_hash: other} if other else {h: e for h, e in entries.items() if h != block_hash}
            assert ops.find_prefix(changed, hashes, ROOT, raw, STRIDE) == list(range(7, 7 + index))


@pytest.mark.parametrize("blocks", [[1], [3, 2], array("i", [3, 2, 1])])
def test_blocks_without_hash_are_not_shared_and_none_is_released_twice(ops: KVBlockLoops, blocks: list[int]) -> None:
    with pytest.raises(AssertionError, match="not published"):
        ops.add_refs([0] * 4, [None, b"a", None, None] if len(blocks) > 1 else [None] * 4, blocks)
    with pytest.raises(AssertionError, match="released twice"):
        ops.drop_refs([0] * 4, [b"a"] * 4, [], blocks)


@pytest.mark.parametrize("refs", [[0, 0, 0, 0], [0, 1, 0, 2], [0, 1, 1, 1], [0, 9, 300, 1]])
def test_references_are_counted(ops: KVBlockLoops, refs: list[int]) -> None:
    published, scratch = [None, b"a", b"b", b"c"], [0]
    unused = ops.add_refs(refs, published, [3, 1])
    assert list(unused) == [block for block in (3, 1) if refs[block] == 1]
    before, published[1] = refs[:], None
    idle, held = ops.drop_refs(refs, published, scratch, [3, 1])
    assert refs == [before[0], before[1] - 1, before[2], before[3] - 1]
    assert (list(idle), list(held)) == (([], [3]) if refs[3] else ([3], []))
    assert scratch == ([0] if refs[1] else [0, 1])


def two_queues() -> list[Callable[[int], EvictionOrder]]:
    return [ops.two_queue_factory(bytearray(32), 32) for ops in (PYTHON, COMPILED) if ops is not None]


def test_orders_of_one_pool_share_links_and_nothing_else() -> None:
    for make in two_queues():
        one, other = make(4), make(4)
        one.add_chain([3, 2])
        other.add_chain([5, 4])
        assert (list(one), list(other), 4 in one, 4 in other) == ([3, 2], [5, 4], False, True)
        with pytest.raises(KeyError):
            one.remove(5)
        with pytest.raises(KeyError):
            other.remove_for_reuse([2])
        with pytest.raises(KeyError):
            make(4).pop_victim()
        one.remove(3)
        other.add_chain([3], HOT)
        assert (list(one), list(other), len(one), len(other), other.pop_victim(), other.pop_victim()) == (
            [2],
            [5, 4, 3],
            1,
            3,
            5,
            4,
        )
