"""The arena of packed weights: aligned, apart from each other, and given back."""

import gc
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.kernels.memory import ALIGNED, CHUNK, HUGE, Arena, num_staggered_items, reserve_memory


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3 * CHUNK // 2), min_size=1, max_size=12))
def test_what_is_taken_is_aligned_zero_and_overlaps_nothing(sizes: list[int]) -> None:
    arena = Arena()
    taken = [arena.take_zeros((size,), torch.uint8) for size in sizes]
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + size) for tensor, size in zip(taken, sizes, strict=True) if size
    )
    assert all(begin % ALIGNED == 0 for begin, _ in ranges)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    assert all(not tensor[:1].any() and not tensor[-1:].any() for tensor in taken)


def test_small_weights_share_a_chunk_that_begins_at_a_huge_page() -> None:
    arena = Arena()
    first, second = arena.take_zeros((3, 5, 32, 2), torch.bfloat16), arena.take_zeros((7,), torch.int8)
    assert first.shape == (3, 5, 32, 2) and first.dtype == torch.bfloat16 and first.is_contiguous()
    assert first.data_ptr() % HUGE == 0
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_several_threads_never_get_the_same_memory() -> None:
    arena, taken = Arena(), list[Tensor]()
    work = [
        threading.Thread(target=lambda: taken.extend(arena.take_zeros((999,), torch.int8) for _ in range(300)))
        for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len({tensor.data_ptr() for tensor in taken}) == 1200


def test_memory_is_given_back_with_the_last_that_shares_it() -> None:
    arena, process = Arena(), psutil.Process()
    taken = [arena.take_zeros((4 * CHUNK,), torch.uint8).fill_(1) for _ in range(2)]
    before = process.memory_info().rss
    taken.clear()
    gc.collect()
    assert before - process.memory_info().rss > 3 * CHUNK  # the arena keeps what is left of the last chunk


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")
def test_a_system_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    assert Arena().take_zeros((10,), torch.uint8).sum() == 0
    assert reserve_memory((3, 10), torch.int32, num_parts=3).sum() == 0


def test_more_address_space_than_there_is_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"16777216\.0 GiB of the KV pool .*lower --kv-cache-memory"):
        reserve_memory((1 << 54,), torch.uint8, num_parts=1)


@pytest.mark.parametrize("num_parts", [3, 96, 512, 2048])
@pytest.mark.parametrize(("num", "item"), [(4096, 2048), (5461, 2048), (8192, 4096), (3000, 1536), (1025, 2048)])
def test_few_parts_come_to_a_huge_page_at_one_item(num: int, item: int, num_parts: int) -> None:
    reserved = num_staggered_items(num, item, num_parts=num_parts)
    assert num <= reserved <= num + HUGE // item
    begins = Counter(-(-(part * reserved * item) // HUGE) * HUGE // item - part * reserved for part in range(num_parts))
    assert max(begins.values()) <= 2 + 2 * num_parts * item // HUGE


@pytest.mark.parametrize(("num", "item"), [(1024, 2048), (100, 2048), (7, 3 << 20)])
def test_parts_without_huge_pages_lie_side_by_side(num: int, item: int) -> None:
    assert num_staggered_items(num, item, num_parts=96) == num
