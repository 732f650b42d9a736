"""Unpacked blocks are bit-equal to the dequantisation of the `gguf` package, for any bytes."""

import gguf
import numpy as np
import pytest
import torch

from headstart.core.errors import ConfigError
from headstart.model.weights.gguf.block_formats import FORMATS, PackedTensor, dequantise, row_bytes

ROWS, WIDTH = 37, 1024


def _reference(kind: str, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # random bytes hold scales that are infinite or no number
        return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])


def _same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two arrays are equal bit by bit, except that any NaN equals any other."""
    both = np.isnan(ours) & np.isnan(theirs)
    return bool((both | (ours.view(np.uint32) == theirs.view(np.uint32))).all())


def _random(kind: str, seed: int) -> PackedTensor:
    data = np.random.default_rng(seed).integers(0, 256, (ROWS, row_bytes(kind, WIDTH)), dtype=np.uint8)
    return PackedTensor("w", kind, (ROWS, WIDTH), data)


@pytest.mark.parametrize("kind", FORMATS)
def test_sizes_are_those_of_the_package(kind: str) -> None:
    form, member = FORMATS[kind], gguf.GGMLQuantizationType[kind]
    assert (form.type_id, form.block_size, form.block_bytes) == (member.value, *gguf.GGML_QUANT_SIZES[member])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", FORMATS)
def test_random_bytes_unpack_to_the_same_bits(kind: str, seed: int) -> None:
    tensor = _random(kind, seed)
    ours = dequantise(tensor).numpy()
    assert ours.shape == (ROWS, WIDTH)
    assert _same_bits(ours, _reference(kind, tensor.data).reshape(ROWS, WIDTH))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_unpack_to_the_same_bits_near_the_weights(kind: str) -> None:
    weights = np.random.default_rng(1).standard_normal((ROWS, WIDTH), dtype=np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(ROWS, -1)
    ours = dequantise(PackedTensor("w", kind, (ROWS, WIDTH), packed)).numpy()
    assert _same_bits(ours, _reference(kind, packed).reshape(ROWS, WIDTH))
    assert np.abs(ours - weights).max() < 0.5  # a step of 4 bits over about 8 standard deviations


def test_rows_are_taken_in_the_order_asked_for() -> None:
    tensor, order = _random("Q4_K", 4), np.array([5, 0, 36, 5])
    assert torch.equal(dequantise(tensor, rows=order).nan_to_num(), dequantise(tensor)[order].nan_to_num())


def test_tensors_larger_than_a_chunk_and_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = _random("Q6_K", 5)
    whole = dequantise(tensor)
    monkeypatch.setattr("headstart.model.weights.gguf.block_formats.CHUNK_BYTES", 5000)
    assert torch.equal(dequantise(tensor).nan_to_num(), whole.nan_to_num())
    assert torch.equal(dequantise(tensor, torch.bfloat16).nan_to_num(), whole.bfloat16().nan_to_num())


def test_a_vector_has_one_row() -> None:
    data = np.arange(4, dtype=np.float32).view(np.uint8).reshape(1, 16)
    assert dequantise(PackedTensor("norm", "F32", (4,), data)).tolist() == [0, 1, 2, 3]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="33 weights is no whole number of Q8_0 blocks"):
        row_bytes("Q8_0", 33)
    with pytest.raises(ConfigError, match="tensor w"):
        PackedTensor("w", "Q8_0", (2, 32), np.zeros((2, 33), np.uint8))
