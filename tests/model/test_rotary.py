"""Frequencies equal Transformers' for every kind of scaling; length-dependent ones stay where they are constant."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.model.layers.rotary import RotaryEmbedding, inverse_frequencies_and_scale, read_rope

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "partial_rotary_factor": 0.5},
    {"rope_type": "longrope", "short_factor": [1.5] * 16, "long_factor": [9.0] * 16},
]


@pytest.mark.parametrize("scaling", KINDS, ids=[f"{i}-{k['rope_type']}" for i, k in enumerate(KINDS)])
def test_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    scaling = {**scaling, "rope_theta": 5000.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters=dict(scaling)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rope = read_rope({"max_position_embeddings": 512, "rope_parameters": scaling}, head_dim=32)
    found, found_factor = inverse_frequencies_and_scale(rope)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("kind", "positions"), [("dynamic", 512), ("longrope", 64), ("linear", 2048), ("yarn", 512), ("default", 512)]
)
def test_positions_end_where_the_embedding_would_change(kind: str, positions: int) -> None:
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if kind == "longrope":
        scaling |= {"short_factor": [1.0], "long_factor": [2.0]}
    assert read_rope({"max_position_embeddings": 512, "rope_scaling": scaling}, head_dim=2).max_positions == positions


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotation_pairs_each_dimension_with_the_one_half_a_head_away(partial: float) -> None:
    rope = read_rope({"partial_rotary_factor": partial}, head_dim=8)
    rotary = RotaryEmbedding(rope, torch.float32, torch.device("cpu"))
    heads = torch.randn(3, 2, 8)
    rotated = rotary.apply(heads, rotary.cos_sin(torch.tensor([0, 1, 9])))
    half = rope.rotary_dim // 2
    for row, position in enumerate((0, 1, 9)):
        for pair in range(half):
            angle = position * 10000.0 ** (-2 * pair / rope.rotary_dim)
            rotation = torch.polar(torch.tensor(1.0), torch.tensor(angle))
            expected = torch.complex(heads[row, :, pair], heads[row, :, pair + half]) * rotation
            torch.testing.assert_close(rotated[row, :, pair], expected.real)
            torch.testing.assert_close(rotated[row, :, pair + half], expected.imag)
    assert torch.equal(rotated[..., rope.rotary_dim :], heads[..., rope.rotary_dim :])
