"""PagedKV: writes land in their slots, and blocks leave and return in canonical form."""

from collections.abc import Callable
from threading import Event, Thread

import psutil
import pytest
import torch
from model.paged import token_writes

from headstart.core.cache.block_store import Data
from headstart.model import paged_kv as kv_module
from headstart.model.paged_kv import PagedKV, TokenKVShape

CPU = torch.device("cpu")


def make(head_dim: int = 8, dtype: torch.dtype = torch.float32, num_kv_heads: int = 3) -> PagedKV:
    return PagedKV(TokenKVShape(2, num_kv_heads, head_dim), num_blocks=5, block_size=16, dtype=dtype, device=CPU)


def filled(kv: PagedKV) -> PagedKV:
    """`kv` with every byte at random, NaNs and all."""
    for layer in kv.layers:
        layer.view(torch.uint8).random_(0, 256)
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 6])
@pytest.mark.parametrize("by_head", [True, False])
def test_a_block_leaves_as_tokens_by_heads_by_dims(by_head: bool, head_dim: int, dtype: torch.dtype) -> None:
    kv = make(head_dim, dtype)
    keys, values = torch.randn(2, 2, 16, 3, head_dim).to(dtype).unbind(0)  # [layer, token, head, dim]
    order = torch.randperm(16)
    writes = token_writes((order + 3 * 16).tolist())
    write = kv.write_layer if by_head else kv.write_layer_by_token
    for layer in range(2):
        write(layer, keys[layer][order], values[layer][order], writes)
    data = kv.read_block(3)
    assert len(data) == 16 * kv.shape.token_bytes(dtype)
    read = torch.frombuffer(bytearray(data), dtype=dtype).view(2, 2, 16, 3, head_dim)
    assert torch.equal(read, torch.stack((keys, values), dim=1))


def test_a_written_block_reads_back_and_touches_no_other() -> None:
    kv = make()
    data = torch.randn(2 * 2 * 16 * 3 * 8).numpy().tobytes()
    kv.write_block(2, data)
    assert kv.read_block(2) == data
    assert all(not any(kv.read_block(block)) for block in (0, 1, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (1, 80), (2, 96), (3, 112), (4, 5), (8, 128)])
def test_blocks_travel_as_their_slow_twins_say(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    source, target, twin = (make(head_dim, dtype, num_kv_heads) for _ in range(3))
    filled(source)
    for block in range(5):
        data = source.read_block(block)
        assert len(data) == source.block_bytes and data == source.read_block_in_torch(block)
        target.write_block(4 - block, data)
        twin.write_block_in_torch(4 - block, data)
    for found, due in zip(target.layers, twin.layers, strict=True):
        assert torch.equal(found.view(torch.uint8), due.view(torch.uint8))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_a_block_is_taken_from_anything_that_holds_bytes(wrap: Callable[[bytes], Data]) -> None:
    source, target = filled(make()), make()
    data = bytes(source.read_block(3))
    target.write_block(1, wrap(data))
    assert target.read_block(1) == data


def test_a_block_that_was_read_does_not_follow_later_writes() -> None:
    kv = filled(make())
    data = kv.read_block(3)
    before = bytes(data)
    kv.zero_blocks([3])
    assert data == before and any(before) and not any(kv.read_block(3))


def test_blocks_are_read_while_another_thread_writes_others() -> None:
    kv = filled(make())
    due, stop, wrong = bytes(kv.read_block(2)), Event(), list[int]()

    def read() -> None:
        while not stop.is_set():
            if kv.read_block(2) != due:
                wrong.append(1)

    reader = Thread(target=read)
    reader.start()
    keys, values = torch.randn(2, 32, 3, 8).unbind(0)
    for _ in range(200):
        for layer in range(2):
            kv.write_layer(layer, keys, values, token_writes([*range(16, 32), *range(48, 64)]))
    stop.set()
    reader.join(timeout=120)
    assert not reader.is_alive() and not wrong


def test_blocks_are_read_on_the_host_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = filled(make())
    due = kv.read_block_in_torch(3)
    monkeypatch.setattr(kv, "layers", None)
    monkeypatch.setattr(kv_module, "torch", None)
    assert kv.read_block(3) == due


@pytest.mark.parametrize("data", [b"12345", memoryview(bytes(6148)), bytearray()])
def test_a_block_of_the_wrong_length_is_refused(data: Data) -> None:
    with pytest.raises(ValueError, match=f"6144 bytes, got {len(data)}"):
        make().write_block(1, data)


@pytest.mark.gpu
def test_blocks_travel_between_a_gpu_and_the_host() -> None:
    on_host = filled(make(80, torch.bfloat16))
    size = dict(num_blocks=5, block_size=16, dtype=torch.bfloat16)
    on_gpu = PagedKV(on_host.shape, **size, device=torch.device("cuda"))
    for block in range(5):
        on_gpu.write_block(block, on_host.read_block(block))
        assert on_gpu.read_block(block) == on_host.read_block(block)


def test_zeroing_clears_exactly_the_given_blocks() -> None:
    kv = make()
    for layer in kv.layers:
        layer.fill_(float("nan"))
    kv.zero_blocks([1, 4])
    kv.zero_blocks([])
    for layer in kv.layers:
        assert layer.isfinite().flatten(3).all(3).all(1).all(0).tolist() == [False, True, False, False, True]


def test_the_pool_takes_memory_as_its_blocks_are_written() -> None:
    shape, process = TokenKVShape(16, 3, 64), psutil.Process()
    before = process.memory_info().rss
    kv = PagedKV(shape, num_blocks=8192, block_size=16, dtype=torch.bfloat16, device=CPU)
    assert kv.block_bytes * kv.num_blocks == 1536 << 20
    assert process.memory_info().rss - before < 16 << 20
    for block in range(1, 257):
        kv.write_block(block, bytes(kv.block_bytes))
    assert 40 << 20 < process.memory_info().rss - before < 80 << 20
