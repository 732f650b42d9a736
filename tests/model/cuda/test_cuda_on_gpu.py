"""Tests that need a CUDA device: `make test-gpu`. Speed is measured by benchmarks/cuda."""

from pathlib import Path
from random import Random

import pytest
import torch
from cuda_runs import drive, random_requests
from tiny import NATIVE, make_checkpoint

from headstart.core.request import Request, SamplingParams
from headstart.model.cuda.cuda_runner import CudaRunner
from headstart.model.cuda.step_graphs import GraphKey
from headstart.model.cuda.triton_layers import batch_invariant_matmul
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import LoadedModel, load_model, uses_cuda_executor
from headstart.workload.synthetic import random_tokens, token_rotations

pytestmark = pytest.mark.gpu
FEW_GRAPHS = [GraphKey(kind, size, 0) for kind in ("decodes", "groups") for size in (8, 1)] + [
    GraphKey("mixed", 64, 64)
]


def make_runner(loaded: LoadedModel, *, graphs: bool = True) -> CudaRunner:
    runner = CudaRunner(loaded, num_blocks=600, block_size=16, max_rows=16, max_graph_tokens=64)
    if graphs:
        runner.warm_up(FEW_GRAPHS)
    return runner


@pytest.mark.parametrize("family", NATIVE)
def test_tokens_in_float32_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    there, here = (load_model(folder, dtype="float32", device=device) for device in ("cpu", "cuda"))
    assert uses_cuda_executor(here.model, here.device, here.attention_backend)
    requests = random_requests(there.vocab_size, 60, Random(3), tokens=8)
    expected = drive(ModelRunner(there, num_blocks=600, block_size=16), requests)
    assert drive(make_runner(here), requests) == expected
    assert drive(make_runner(here, graphs=False), requests, budget=40) == expected


def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint("llama", tmp_path), dtype="bfloat16", device="cuda")
    requests = random_requests(loaded.vocab_size, 40, Random(4), tokens=8)
    plain = [r for r in requests if r.sampling.prompt_logprobs is None]  # these wait, and so does a wide top_p set
    drive(make_runner(loaded), plain)  # compiles
    runner = make_runner(loaded, graphs=False)  # what it copies once waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        drive(runner, plain)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batch_invariant_runs_have_equal_bits(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    loaded = load_model(folder, dtype="bfloat16", device="cuda", batch_invariant=True)
    assert loaded.exceptions == ()
    sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3)
    prompts = token_rotations(random_tokens(300, loaded.vocab_size, Random(1)), 12)
    requests = [Request(f"{at}", prompt, sampling) for at, prompt in enumerate(prompts)]
    expected = drive(make_runner(loaded), requests)
    assert drive(make_runner(loaded, graphs=False), requests, budget=40) == expected
    for at, request in enumerate(requests[:4]):
        assert drive(make_runner(loaded, graphs=False), [request]) == expected[at : at + 1]


def test_rows_of_an_exact_product_do_not_depend_on_their_number() -> None:
    rows = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(333, 1000, device="cuda", dtype=torch.bfloat16)
    whole = batch_invariant_matmul(rows, weight)
    for count in (1, 2, 17, 64, 65, 128, 299):
        assert torch.equal(batch_invariant_matmul(rows[:count], weight), whole[:count])


def test_blocks_survive_the_way_to_the_host_and_back(tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint("llama", tmp_path), dtype="bfloat16", device="cuda")
    runner = make_runner(loaded, graphs=False)
    runner.kv.pool[1:40].normal_()
    held = [bytes(runner.read_block(block)) for block in range(1, 40)]
    for block, data in enumerate(held, 101):
        runner.write_block(block, data)
    assert [bytes(runner.read_block(block)) for block in range(101, 140)] == held
    assert torch.equal(runner.kv.pool[1:40], runner.kv.pool[101:140])
