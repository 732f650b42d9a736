"""Time a small model of Qwen3.5's shape by its kernels, by their twins in torch and by Transformers, in turns.

Weights are random. One thread; CPU time of the process per token, so that other load on the machine counts less. The
twins are those of the recurrent layers alone: products and attention are kernels in both.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig
from transformers.cache_utils import DynamicCache

from headstart.core.batch import Batch, Chunk
from headstart.core.request import GREEDY
from headstart.model.kernels.library import cpu_model, find_kernels
from headstart.model.layers.hybrid_decoder import AttentionWeights, HybridDecoder
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import load_model

SHAPE = dict(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=8192,
    eos_token_id=None,
)
Times = dict[str, float]  # CPU milliseconds per token


def saved_model(folder: Path, dtype: str) -> PreTrainedModel:
    """Return a random model of SHAPE, saved in `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SHAPE), dtype=getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decodes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        theirs = saved_model(folder, options.dtype)
        tokens = torch.randint(3, SHAPE["vocab_size"], (options.prompt + options.decodes,)).tolist()

        def transformers() -> Times:
            return by_transformers(theirs, tokens, options.prompt)

        runs: dict[str, Callable[[], Times]] = {"transformers": transformers}
        for kind in ("kernels", "twins"):
            loaded = load_model(folder, dtype=options.dtype, device="cpu")
            assert isinstance(loaded.model, HybridDecoder)
            if kind == "twins":
                without_kernels(loaded.model)
            runner = ModelRunner(loaded, num_blocks=len(tokens) // 16 + 3, block_size=16)
            runs[kind] = lambda runner=runner: by_runner(runner, tokens, options.prompt)
        found: dict[str, list[Times]] = {kind: [] for kind in runs}
        for _ in range(options.rounds):
            for kind, run in runs.items():
                found[kind].append(run())
                print(kind, found[kind][-1], file=sys.stderr)
    medians = {kind: {part: median(t[part] for t in times) for part in times[0]} for kind, times in found.items()}
    about = {"kernels": find_kernels().note, "cpu": cpu_model(), "torch": torch.__version__, "load": os.getloadavg()}
    print(json.dumps({**vars(options), **about, "ms_per_token": medians, "runs": found}))


def without_kernels(model: HybridDecoder) -> None:
    """Let the recurrent layers of `model` run on torch."""
    for index, layer in enumerate(model.layers):
        if not isinstance(layer.mixer, AttentionWeights):
            model.layers[index] = replace(layer, mixer=replace(layer.mixer, kernels=None))


def by_runner(runner: ModelRunner, tokens: list[int], prompt: int) -> Times:
    blocks = list(range(1, len(tokens) // 16 + 2))

    def step(start: int, end: int) -> None:
        ids = array("i", tokens[start:end])
        made = Chunk("a", ids, start, blocks, 0, 1, GREEDY, len(tokens), array("i", tokens))
        assert runner.execute(Batch((made,))).rows[0].error is None

    found = measured(step, len(tokens), prompt)
    runner.execute(Batch((), ("a",)))
    return found


def by_transformers(model: torch.nn.Module, tokens: list[int], prompt: int) -> Times:
    cache = DynamicCache(config=model.config)

    def step(start: int, end: int) -> None:
        ids = torch.tensor([tokens[start:end]])
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    return measured(step, len(tokens), prompt)


def measured(step: Callable[[int, int], None], end: int, prompt: int) -> Times:
    began = time.process_time()
    step(0, prompt)
    middle = time.process_time()
    for at in range(prompt, end):
        step(at, at + 1)
    done = time.process_time()
    return {"prompt": (middle - began) * 1e3 / prompt, "decode": (done - middle) * 1e3 / (end - prompt)}


if __name__ == "__main__":
    main()
