"""Hybrids: tiny random checkpoints through the paged path give the logits and tokens of Transformers' eager code."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model.paged import all_logits, chunk, load_tiny, tiny_runner
from model.tiny import COMMON, HYBRIDS, eager, make_checkpoint
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from headstart.core.batch import Batch, Chunk
from headstart.core.errors import ConfigError
from headstart.model.layers.hybrid_decoder import HybridDecoder
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import load_model

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in HYBRIDS),
    ("qwen3_5_text", {"attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 2}),
    ("qwen3_5_text", {"linear_num_key_heads": 4, "layer_types": ["full_attention", *["linear_attention"] * 4]}),
    ("qwen3_5_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "num_key_value_heads": 4}),
    ("lfm2", {"tie_word_embeddings": False, "block_ffn_dim_multiplier": 1.3}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("granitemoehybrid", {"attention_bias": True, "tie_word_embeddings": True, "mamba_n_heads": 4, "mamba_d_conv": 2}),
    ("bamba", {"mlp_bias": True, "attention_bias": True, "mamba_n_groups": 8, "attn_layer_indices": [0, 3]}),
]
NAMES = [f"{family}-{index}" for index, (family, _) in enumerate(VARIANTS)]


def prompts(rng: Random) -> list[list[int]]:
    return [[rng.randrange(3, 128) for _ in range(length)] for length in (75, 1, 21, 48)]


def in_chunks(runner: ModelRunner, texts: list[list[int]], rng: Random, longest: int = 40) -> list[Tensor]:
    """Logits of all positions of several texts, computed together in random chunks."""
    tables, block = [], 1
    for text in texts:
        tables.append(list(range(block, block + -(-len(text) // 16))))
        block += len(tables[-1])
    done, found = [0] * len(texts), [[] for _ in texts]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        chosen: list[tuple[int, Chunk]] = []
        for index, text in enumerate(texts):
            if done[index] < len(text) and rng.random() < 0.7:
                end = min(len(text), done[index] + rng.choice([1, 2, rng.randint(1, longest)]))
                chosen.append((index, chunk(text, done[index], end, tables[index], request_id=str(index))))
        if chosen:
            for (index, made), logits in zip(chosen, all_logits(runner, *(c for _, c in chosen)), strict=True):
                found[index].append(logits)
                done[index] += len(made.token_ids)
    return [torch.cat(parts) for parts in found]


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if not request.param:
        monkeypatch.setattr("headstart.model.weights.model_loader.kernel_library_in_use", lambda: None)
    yield request.param


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=NAMES)
def test_logits_of_chunks_equal_transformers_eager(
    family: str, overrides: dict[str, Any], with_kernels: bool, tmp_path: Path
) -> None:
    loaded = load_tiny(family, tmp_path, **overrides)
    assert isinstance(loaded.model, HybridDecoder)
    oracle, rng = eager(tmp_path), Random(1)
    texts = prompts(rng)
    for text, logits in zip(texts, in_chunks(tiny_runner(loaded), texts, rng), strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(logits, oracle(torch.tensor([text])).logits[0], atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_states_do_not_depend_on_the_chunks(family: str, dtype: str, tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint(family, tmp_path), dtype=dtype, device="cpu")
    texts = prompts(Random(2))
    whole, cut = tiny_runner(loaded), tiny_runner(loaded)
    expected = in_chunks(whole, texts, Random(3), longest=75)
    for logits, same in zip(in_chunks(cut, texts, Random(4), longest=5), expected, strict=True):
        assert torch.equal(logits, same)
    assert whole.states is not None and cut.states is not None
    for index in map(str, range(len(texts))):
        num_tokens = len(texts[int(index)])
        assert torch.equal(whole.states.state_of(index, num_tokens), cut.states.state_of(index, num_tokens))


@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_tokens_equal_transformers_generate(family: str, tmp_path: Path) -> None:
    loaded, rng = load_tiny(family, tmp_path), Random(2)
    oracle, texts, found = eager(tmp_path), prompts(rng), list[list[int]]()
    for index, text in enumerate(texts):
        found.append(greedy(tiny_runner(loaded), text, str(index), 12))
    for text, tokens in zip(texts, found, strict=True):
        expected = oracle.generate(torch.tensor([text]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert tokens == expected[0, len(text) :].tolist()


def greedy(runner: ModelRunner, text: list[int], name: str, num: int) -> list[int]:
    """Tokens sampled behind a text, one step for each."""
    tokens, start = list(text), 0
    blocks = list(range(1, 2 + (len(text) + num) // 16))
    for _ in range(num):
        made = chunk(tokens, start, len(tokens), blocks, request_id=name, num_logits=1)
        row = runner.execute(Batch((made,))).rows[0]
        assert row.error is None
        start = len(tokens)
        tokens += row.token_ids
    return tokens[len(text) :]


def test_the_text_part_of_a_model_that_takes_images_is_loaded(tmp_path: Path) -> None:
    settings = {**COMMON, **HYBRIDS["qwen3_5_text"][1], "model_type": "qwen3_5_text"}
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=settings, vision_config=vision)).float().eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    text = prompts(Random(1))[0]
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(in_chunks(tiny_runner(loaded), [text], Random(1))[0], expected, atol=3e-4, rtol=1e-4)


def test_a_chunk_that_does_not_continue_the_state_of_its_request_is_a_bug(tmp_path: Path) -> None:
    runner, text = tiny_runner(load_tiny("lfm2", tmp_path)), prompts(Random(1))[0]
    blocks = list(range(1, 6))
    runner.execute(Batch((chunk(text, 0, 20, blocks),)))
    for name, start in (("a", 19), ("a", 21), ("b", 20)):
        with pytest.raises(AssertionError, match="but states of"):
            runner.execute(Batch((chunk(text, start, 30, blocks, request_id=name),)))
    runner.execute(Batch((), ("a",)))
    with pytest.raises(AssertionError, match=r"but states of \[\]"):
        runner.execute(Batch((chunk(text, 20, 30, blocks),)))


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 5}, "no layer has attention"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "not a multiple of linear_num_key_heads"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache is 0"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "not a multiple of mamba_n_groups"),
        ("granitemoehybrid", {"num_local_experts": 2}, "num_local_experts is 2"),
        ("granitemoehybrid", {"residual_multiplier": 0.0}, "residual_multiplier is 0"),
        ("granitemoehybrid", {"layers_block_type": None}, "layer_types names 0 layers"),
        ("bamba", {"time_step_limit": [0.001, 0.1]}, "time_step_limit is"),
    ],
)
def test_settings_that_make_no_model_are_refused(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    loaded = make_checkpoint(family, tmp_path)
    edit(loaded, **overrides)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, dtype="float32", device="cpu")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
