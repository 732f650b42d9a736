"""Linear equals F.linear in both dtypes, for any number of rows."""

import pytest
import torch
import torch.nn.functional as F

from headstart.model.linear import Linear, can_pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 200])
def test_linear_equals_plain(dtype: torch.dtype, with_bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 24).to(dtype), torch.randn(rows, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = Linear(weight.clone(), bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-5)


def test_fp32_rows_do_not_depend_on_their_neighbours() -> None:
    torch.manual_seed(1)
    layer, x = Linear(torch.randn(64, 128)), torch.randn(130, 128)
    together = layer(x)
    for rows in (slice(0, 1), slice(3, 20), slice(100, 130)):
        torch.testing.assert_close(layer(x[rows]), together[rows], rtol=1e-5, atol=1e-5)


def test_only_bfloat16_on_a_cpu_is_packed_and_its_bytes_count_once() -> None:
    assert not can_pack(torch.zeros(4, 4))
    layer = Linear(torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))
    assert layer.weight_bytes == 4 * 8 * 2 + 4 * 2
