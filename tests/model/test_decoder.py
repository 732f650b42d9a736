"""Parity: tiny random checkpoints through the paged path give the logits and tokens of Transformers' eager code."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model.paged import Shared, all_logits, chunk, load_tiny, tiny_runner
from model.tiny import FAMILIES, NATIVE, eager, make_checkpoint

from headstart.core.batch import Batch
from headstart.model.weights.model_loader import load_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0] * 8,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 20, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 0.8}, "attention_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": 9, "partial_rotary_factor": 1.0}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "partial_rotary_factor": 1.0}),
]


def prompts(rng: Random) -> list[list[int]]:
    """A long one, one that continues its first two blocks, those two blocks alone, and strangers of 1 and 21 tokens."""
    long = [rng.randrange(3, 128) for _ in range(75)]
    return [
        long,
        long[:32] + [rng.randrange(3, 128) for _ in range(13)],
        long[:32],
        [7],
        [rng.randrange(3, 128) for _ in range(21)],
    ]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=[f"{f}-{i}" for i, (f, _) in enumerate(VARIANTS)])
def test_logits_of_chunked_shared_prompts_equal_transformers_eager(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    loaded = load_tiny(family, tmp_path, **overrides)
    oracle, rng = eager(tmp_path), Random(1)
    for _ in range(2):
        session = Shared(tiny_runner(loaded), prompts(rng), rng)
        found = session.run(longest=40)
        for prompt, start, logits in zip(session.prompts, session.starts, found, strict=True):
            with torch.inference_mode():
                expected = oracle(torch.tensor([prompt])).logits[0, start:]
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [*NATIVE, "gemma2", "granite"])
def test_greedy_tokens_equal_transformers_generate(family: str, tmp_path: Path) -> None:
    loaded, rng = load_tiny(family, tmp_path), Random(2)
    session = Shared(tiny_runner(loaded), prompts(rng), rng)
    session.run(longest=40)
    oracle = eager(tmp_path)
    texts = [list(prompt) for prompt in session.prompts]
    for _ in range(12):
        last = [
            chunk(text, len(text) - 1, len(text), table, request_id=str(i), write_from=write_from, num_logits=1)
            for i, (text, table, write_from) in enumerate(zip(texts, session.tables, session.write_from, strict=True))
        ]
        for text, row in zip(texts, session.runner.execute(Batch(tuple(last))).rows, strict=True):
            assert row.error is None
            text.append(row.token_ids[0])
    for prompt, text in zip(session.prompts, texts, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert text == expected[0].tolist()


def test_llama_in_bfloat16_stays_close_to_fp32(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, std=0.08)
    tokens = [Random(3).randrange(3, 128) for _ in range(60)]
    logits = []
    for dtype in ("float32", "bfloat16"):
        runner = tiny_runner(load_model(tmp_path, dtype=dtype, device="cpu"))
        parts = [all_logits(runner, chunk(tokens, at, min(at + 25, 60), [5, 3, 9, 1]))[0] for at in (0, 25, 50)]
        logits.append(torch.cat(parts))
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()


@pytest.mark.parametrize("family", NATIVE)
def test_a_row_does_not_depend_on_its_neighbours(family: str, tmp_path: Path) -> None:
    loaded, rng = load_tiny(family, tmp_path), Random(4)
    tokens = [[rng.randrange(3, 128) for _ in range(length)] for length in (1, 30, 17, 2)]
    tables = [[1], [2, 3], [4, 5], [6]]
    made = [chunk(t, 0, len(t), b, request_id=str(i)) for i, (t, b) in enumerate(zip(tokens, tables, strict=True))]
    together = all_logits(tiny_runner(loaded), *made)
    for each, logits in zip(made, together, strict=True):
        torch.testing.assert_close(all_logits(tiny_runner(loaded), each)[0], logits, atol=1e-5, rtol=1e-5)
