"""PagedKV: writes land in their slots, and blocks leave and return in canonical form."""

import pytest
import torch
from model.paged import token_writes

from headstart.model.kv import KVShape, PagedKV

CPU = torch.device("cpu")


def make(head_dim: int = 8, dtype: torch.dtype = torch.float32) -> PagedKV:
    return PagedKV(KVShape(2, 3, head_dim), num_blocks=5, block_size=16, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 6])
@pytest.mark.parametrize("by_head", [True, False])
def test_a_block_leaves_as_tokens_by_heads_by_dims(by_head: bool, head_dim: int, dtype: torch.dtype) -> None:
    kv = make(head_dim, dtype)
    keys, values = torch.randn(2, 2, 16, 3, head_dim).to(dtype).unbind(0)  # [layer, token, head, dim]
    order = torch.randperm(16)
    writes = token_writes((order + 3 * 16).tolist())
    write = kv.write if by_head else kv.write_tokens
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


def test_a_block_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="6144 bytes, got 5"):
        make().write_block(1, b"12345")


def test_zeroing_clears_exactly_the_given_blocks() -> None:
    kv = make()
    for layer in kv.layers:
        layer.fill_(float("nan"))
    kv.zero_blocks([1, 4])
    kv.zero_blocks([])
    for layer in kv.layers:
        assert layer.isfinite().flatten(3).all(3).all(1).all(0).tolist() == [False, True, False, False, True]
