"""PackedKV: what is written lies where PagedKV would have it, in every variant, layout and shape."""

import ctypes
import mmap
from random import Random
from threading import Thread

import numpy as np
import psutil
import pytest
import torch
from model.paged import token_writes
from numpy.typing import NDArray

from headstart.model.kernels import library as load
from headstart.model.kernels import memory
from headstart.model.kernels.memory import AHEAD, HUGE
from headstart.model.kv_writes import KVWrites, SlotSpan
from headstart.model.packed_kv import PackedKV, PageWrites
from headstart.model.paged_kv import PagedKV, TokenKVShape

CPU = torch.device("cpu")
RUNNABLE = load.runnable_variants()
pytestmark = pytest.mark.skipif(load.kernel_library_in_use() is None, reason="no compiled kernels here")


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> load.KernelLibrary:
    found = load.load_kernels(request.param).kernels
    assert found is not None
    return found


def pair(
    kernels: load.KernelLibrary, dim: int, dtype: torch.dtype, block_size: int, kv_heads: int = 3
) -> tuple[PackedKV, PagedKV]:
    shape = TokenKVShape(2, kv_heads, dim)
    packed = PackedKV(kernels, shape, num_blocks=8, block_size=block_size, dtype=dtype)
    return packed, PagedKV(shape, num_blocks=8, block_size=block_size, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 48, 8, 20])
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 80, 112, 200])
def test_tokens_and_spans_land_where_paged_kv_puts_them(
    kernels: load.KernelLibrary, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    packed, paged = pair(kernels, dim, dtype, block_size)
    rng = Random(dim)
    size = block_size
    spans = (SlotSpan(3, 3 + 2 * size, 4 * size), SlotSpan(3 + 2 * size, 3 + 3 * size, 2 * size))
    loose = np.array([0, 1, 2, 3 + 3 * size])
    slots = np.array(rng.sample([*range(size, 2 * size), *range(6 * size, 8 * size)], 4))
    writes = KVWrites(torch.empty(0), None, spans, loose, slots)
    wide = torch.randn(2, 4 + 3 * size, 7, dim).to(dtype)
    keys, values = wide[0][:, 1:4], wide[1][:, 4:]  # heads of wider rows
    for kv in (packed, paged):
        kv.write_layer(1, keys, values, writes)
    assert [bytes(packed.read_block(block)) for block in range(8)] == [
        bytes(paged.read_block(block)) for block in range(8)
    ]
    for block in range(8):  # and back, through canonical form
        packed.write_block(7 - block, bytes(paged.read_block(block)))
    assert [bytes(packed.read_block(7 - block)) for block in range(8)] == [
        bytes(paged.read_block(block)) for block in range(8)
    ]


def test_the_pool_begins_where_a_huge_page_can_and_is_zero(kernels: load.KernelLibrary) -> None:
    packed, _ = pair(kernels, 64, torch.bfloat16, 16)
    assert packed.pool.ctypes.data % HUGE == 0 and not packed.pool.any()


def test_the_pool_takes_memory_as_its_blocks_are_written(kernels: load.KernelLibrary) -> None:
    """A pool of 1.5 GiB: nothing at first, then what is written, not a huge page of each layer and head."""
    shape, process = TokenKVShape(16, 3, 64), psutil.Process()
    before = process.memory_info().rss
    packed = PackedKV(kernels, shape, num_blocks=8192, block_size=16, dtype=torch.bfloat16)
    assert packed.pool.nbytes == 1536 << 20
    assert process.memory_info().rss - before < 16 << 20
    for block in range(1, 257):
        packed.write_block(block, bytes(packed.block_bytes))
    assert 40 << 20 < process.memory_info().rss - before < 80 << 20


def resident(packed: PackedKV) -> int:
    """Return the bytes of the pool that have pages."""
    size = 4 * packed._head_words * 96
    found = np.zeros(size // mmap.PAGESIZE, np.uint8)
    address, answer = ctypes.c_void_p(packed.pool.ctypes.data), ctypes.c_void_p(found.ctypes.data)
    assert not ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), answer)
    return int((found & 1).sum()) * mmap.PAGESIZE


def pages_taken(packed: PackedKV) -> None:
    """Wait until the pages due so far are taken."""
    if (thread := packed._ahead._thread) is not None:
        thread.join()


def test_a_step_takes_the_pages_of_the_next_blocks_and_a_load_none(kernels: load.KernelLibrary) -> None:
    """Only so many, from the last block that a step writes on, whatever is in them; those are there at a load."""
    packed = PackedKV(kernels, TokenKVShape(16, 3, 64), num_blocks=8192, block_size=16, dtype=torch.bfloat16)
    blocks = {block: bytes([block]) * packed.block_bytes for block in range(2, 102)}
    packed.write_block(1, bytes(packed.block_bytes))
    assert resident(packed) < 8 << 20
    rows = torch.zeros(1, 3, 64, dtype=torch.bfloat16)
    packed.write_layer(0, rows, rows, token_writes([16]))  # token 0 into the first slot of block 1
    for block, content in blocks.items():
        packed.write_block(block, content)
    pages_taken(packed)
    taken = resident(packed)
    assert AHEAD - (1 << 20) < taken < AHEAD + (8 << 20)
    packed.write_layer(0, rows, rows, token_writes([17]))
    pages_taken(packed)
    assert resident(packed) < taken + (1 << 20)
    assert all(bytes(packed.read_block(block)) == content for block, content in blocks.items())
    packed.write_layer(0, rows, rows, token_writes([16 * 8191]))  # the last block: there is no further one
    pages_taken(packed)


def test_a_system_that_takes_no_pages_ahead_takes_them_when_they_are_written(
    kernels: load.KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "POPULATE_WRITE", 255)  # as before Linux 5.14
    packed = PackedKV(kernels, TokenKVShape(16, 3, 64), num_blocks=8192, block_size=16, dtype=torch.bfloat16)
    rows = torch.ones(1, 3, 64, dtype=torch.bfloat16)
    packed.write_layer(0, rows, rows, token_writes([16]))
    pages_taken(packed)
    assert resident(packed) < 8 << 20 and bytes(packed.read_block(1)).strip(b"\0")


def test_a_token_leaves_its_neighbours_in_the_same_words_alone(kernels: load.KernelLibrary) -> None:
    packed, paged = pair(kernels, 5, torch.bfloat16, 16)
    for slot in (35, 34, 33, 36, 34):  # odd and even, again over what is there
        keys, values = torch.randn(2, 1, 3, 5).to(torch.bfloat16)
        for kv in (packed, paged):
            kv.write_layer(0, keys, values, token_writes([slot]))
        assert bytes(packed.read_block(2)) == bytes(paged.read_block(2))


def test_a_block_of_the_wrong_length_or_outside_is_refused(kernels: load.KernelLibrary) -> None:
    packed, _ = pair(kernels, 8, torch.float32, 16)
    with pytest.raises(ValueError, match="6144 bytes, got 5"):
        packed.write_block(1, b"12345")
    for call in (lambda: packed.read_block(8), lambda: packed.write_block(-1, bytes(6144))):
        with pytest.raises(ValueError, match="is not one of 8"):
            call()


def test_blocks_are_taken_from_any_buffer(kernels: load.KernelLibrary) -> None:
    packed, _ = pair(kernels, 8, torch.bfloat16, 16)
    data = bytes(range(256)) * 12
    for block, buffer in enumerate((data, bytearray(data), memoryview(data), memoryview(b"x" + data)[1:])):
        packed.write_block(block + 1, buffer)
        assert bytes(packed.read_block(block + 1)) == data


def test_zeroing_clears_exactly_the_given_blocks(kernels: load.KernelLibrary) -> None:
    packed, _ = pair(kernels, 8, torch.float32, 16)
    for block in range(8):
        packed.write_block(block, b"\x07" * packed.block_bytes)
    packed.zero_blocks([1, 4])
    packed.zero_blocks([])
    assert [any(packed.read_block(block)) for block in range(8)] == [block not in (1, 4) for block in range(8)]


def test_writes_outside_the_pool_or_of_tokens_that_are_not_there_are_refused(kernels: load.KernelLibrary) -> None:
    packed, _ = pair(kernels, 8, torch.float32, 16)
    keys = torch.zeros(16, 3, 8)
    none = np.zeros(0, np.int64)
    for writes in (
        token_writes([8 * 16]),
        token_writes([-1]),
        KVWrites(torch.empty(0), None, (SlotSpan(0, 16, 8 * 16),), none, none),
        KVWrites(torch.empty(0), None, (SlotSpan(1, 17, 16),), none, none),
        KVWrites(torch.empty(0), None, (), np.array([16]), np.array([1])),
    ):
        with pytest.raises(ValueError, match="lie outside"):
            packed.write_layer(0, keys, keys, writes)
    assert not packed.pool.any()


def test_blocks_are_read_from_another_thread_while_others_are_written(kernels: load.KernelLibrary) -> None:
    packed, _ = pair(kernels, 64, torch.bfloat16, 16)
    packed.write_block(1, b"\x05" * packed.block_bytes)
    found: list[bool] = []
    reader = Thread(target=lambda: found.extend(set(bytes(packed.read_block(1))) == {5} for _ in range(200)))
    reader.start()
    keys = torch.randn(32, 3, 64).to(torch.bfloat16)
    while reader.is_alive():
        packed.write_layer(0, keys, keys, token_writes(list(range(32, 64))))
    reader.join()
    assert found == [True] * 200


def test_tokens_that_share_words_are_written_by_two_threads_at_once(kernels: load.KernelLibrary) -> None:
    """A word holds the values of two tokens, which two threads of a step may write."""
    packed = PackedKV(kernels, TokenKVShape(1, 4, 64), num_blocks=2, block_size=16, dtype=torch.bfloat16)
    elements, pages = packed.pool.reshape(-1).view(np.uint16), np.zeros((0, 2), np.int32)
    keys, values = torch.zeros(2, 4, 64).bfloat16(), torch.tensor([1.0, 2.0]).bfloat16()[:, None, None].expand(2, 4, 64)
    values, last = values.contiguous(), int(values.view(torch.int16)[1, 0, 0])
    places: dict[int, NDArray[np.int64]] = {}
    lost: list[int] = []

    def write_again(slot: int) -> None:
        turns = np.array([(0, slot), (1, slot)] * 2_500, np.int32)
        for turn in range(100):
            packed.write_layer_planned(0, keys, values, PageWrites(pages, turns, 2))
            if (elements[places[slot]] != last).any():
                lost.append(turn)

    for slot in (20, 21):
        before = elements.copy()
        packed.write_layer_planned(0, keys, values, PageWrites(pages, np.array([(1, slot)], np.int32), 2))
        places[slot] = np.flatnonzero(elements != before)
        assert len(places[slot]) == 4 * 64
    threads = [Thread(target=write_again, args=(slot,)) for slot in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost, f"{len(lost)} of 200 calls were undone by the other thread"
