import pytest

from headstart.model.weights.shapes import SHAPES

# Parameters as published (or, for the four that are ours, as the numbers give them).
BILLIONS = {
    "tiny": 0.000139,
    "llama-3m": 0.00341,
    "llama-100m": 0.1247,
    "llama-100m-152k": 0.1923,
    "tinyllama-1.1b": 1.100,
    "llama-2-7b": 6.738,
    "qwen2.5-0.5b": 0.494,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "llama-3.1-8b": 8.030,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_the_parameters_of_the_real_model(name: str) -> None:
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)


@pytest.mark.parametrize("name", SHAPES)
def test_no_tensor_is_named_twice_and_heads_divide(name: str) -> None:
    shape = SHAPES[name]
    names = [tensor for tensor, _ in shape.tensors()]
    assert len(names) == len(set(names))
    assert shape.num_attention_heads % shape.num_key_value_heads == 0
    assert ("lm_head.weight" in names) is not shape.tie_word_embeddings
