"""The lab of matrix products: every form there is here is timed at every number of rows, and they multiply alike."""

import pytest
import torch
import torch.nn.functional as F

from headstart.core.errors import ConfigError
from headstart.model.kernels.library import kernel_library_in_use
from headstart.model.layers.linear import can_pack_weight
from headstart.model.weights.shapes import SHAPES
from headstart_lab.engine.linears import Layers, LinearsConfig, ours, run_linears


def forms() -> set[str]:
    own = {"ours", "ours_int8"} if kernel_library_in_use() is not None else set[str]()
    return own | ({"onednn"} if can_pack_weight(torch.zeros(1, 1).bfloat16()) else set()) | {"plain"}


def test_every_form_is_timed_at_every_number_of_rows() -> None:
    report = run_linears(LinearsConfig("tiny", rows=(1, 3), layers=2, seconds=0.0))
    assert report.problems == []
    assert report.values["weights"] == 2 * (64 * 64 + 256 * 64 + 64 * 128 + 128 * 64)
    for name in forms():
        for rows in (1, 3):
            low, high = report.spread[f"{name}.{rows}"]
            assert 0 < low <= report.values[f"{name}.{rows}"] <= high
    assert len(report.sheets[0].rows) == 2 * len(forms())
    assert (report.values["bytes_per_s"] is None) == (kernel_library_in_use() is None)


def test_our_pass_is_the_layers_as_the_decoder_has_them() -> None:
    if kernel_library_in_use() is None:
        pytest.skip("no compiled kernels")
    torch.manual_seed(0)
    model = Layers(SHAPES["tiny"], 1)
    out, gate_up, down, qkv = model.plain[0]
    found = model.buffers(5)
    ours(model.chains["ours"], found)()

    def normed(rows: torch.Tensor) -> torch.Tensor:
        return rows * rows.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()

    stream = F.linear(found[0].float(), out.float())
    gate, up = F.linear(normed(stream), gate_up.float()).chunk(2, dim=-1)
    stream = stream + F.linear(F.silu(gate) * up, down.float())
    torch.testing.assert_close(found[1].float(), stream, rtol=3e-2, atol=3e-2 * float(stream.abs().max()))
    heads = F.linear(normed(stream), qkv.float())
    torch.testing.assert_close(found[3].float(), heads, rtol=3e-2, atol=3e-2 * float(heads.abs().max()))


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="shape 'huge' is not known; choose tiny"):
        run_linears(LinearsConfig("huge"))
