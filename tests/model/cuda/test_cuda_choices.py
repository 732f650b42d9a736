"""Choices around the executor on CUDA that need no device: which models it takes, exact mode, graphs."""

from pathlib import Path

import pytest
import torch
from tiny import make_checkpoint

from headstart.core.errors import ConfigError
from headstart.model.cuda.cuda_kv import CudaKV
from headstart.model.cuda.step_graphs import GraphKey, StepGraphs, longest_graph_tokens
from headstart.model.kernels.library import find_kernels
from headstart.model.paged_kv import TokenKVShape
from headstart.model.weights.model_loader import load_model, uses_cuda_executor

CUDA = torch.device("cuda")


def test_plain_weights_of_our_decoder_run_on_the_executor_of_a_gpu(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    plain = load_model(folder, dtype="float32", device="cpu", linear_dispatch="torch").model
    assert uses_cuda_executor(plain, CUDA, "triton")
    assert not uses_cuda_executor(plain, CUDA, "reference") and not uses_cuda_executor(
        plain, torch.device("cpu"), "triton"
    )
    quantised = load_model(folder, dtype="float32", device="cpu", linear_dispatch="torch", quantization="int8").model
    assert not uses_cuda_executor(quantised, CUDA, "triton")


def test_batch_invariance_is_promised_only_where_it_is_kept(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"--batch-invariant: LlamaForCausalLM on cpu is not \(torch-products"):
        load_model(folder, device="cpu", linear_dispatch="torch", batch_invariant=True)
    if find_kernels().kernels is not None:
        assert load_model(folder, device="cpu", batch_invariant=True).exceptions == ()


@pytest.mark.parametrize(("layers", "weights", "expected"), [(32, 6.5e9, 1280), (28, 0.44e9, 4096), (80, 68e9, 320)])
def test_steps_get_graphs_while_launching_takes_longer_than_computing(
    layers: int, weights: float, expected: int
) -> None:
    assert longest_graph_tokens(layers, int(weights)) == expected


def test_a_step_takes_the_smallest_graph_with_room() -> None:
    kv = CudaKV(TokenKVShape(1, 1, 16), num_blocks=2, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    graphs = StepGraphs(kv, max_rows=20, max_tokens=64)
    keys = graphs.keys_to_capture()
    assert keys[0] == GraphKey("mixed", 64, 64) and GraphKey("decodes", 20, 0) in keys
    assert graphs.find_padded_key("decodes", 5, 0) is None  # nothing is captured yet
    for key in keys:
        graphs.capture_graph(key, lambda: None)  # type: ignore[arg-type, return-value]
    assert graphs.find_padded_key("decodes", 5, 0) == GraphKey("decodes", 8, 0)
    assert graphs.find_padded_key("groups", 17, 0) == GraphKey("groups", 20, 0)
    assert graphs.find_padded_key("mixed", 33, 20) == GraphKey("mixed", 64, 64)
    assert graphs.find_padded_key("decodes", 21, 0) is None and graphs.find_padded_key("mixed", 65, 1) is None
    assert graphs.find_padded_key("mixed", 10, 17) is None  # more outputs than the graph selects
