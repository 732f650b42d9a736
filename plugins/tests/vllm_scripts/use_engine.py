"""A scheduler in a whole engine: use_engine.py MODEL [SCHEDULER]; prints vLLM's own counters and tokens as JSON.

Prompts: 32 at once behind one new prefix of 2,048 tokens, chunks capped at 256. Without SCHEDULER: vLLM's own.
"""

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from steps import BLOCK, ideal
from vllm import LLM, SamplingParams

CAP, BUDGET = 256, 2_048


def counters(llm: LLM) -> dict[str, float]:
    """Return the counters of prefill and prefix cache, by vLLM's names."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", getattr(metric, "sum", None))
        if value is not None and any(
            part in metric.name for part in ("prefill_kv_computed", "prefix_cache", "prompt_tokens")
        ):
            found[metric.name] = found.get(metric.name, 0) + value
    return found


def main() -> None:
    model, scheduler = sys.argv[1], sys.argv[2:]
    rng = Random(7)
    vocabulary = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prefix = [rng.randrange(10, vocabulary) for _ in range(2_048)]
    prompts = [prefix + [rng.randrange(10, vocabulary) for _ in range(40)] for _ in range(32)]
    chosen: dict[str, Any] = {}
    if scheduler:
        chosen = {"scheduler_cls": scheduler[0], "additional_config": {"headstart": {"promised_blocks": True}}}
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=4096,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=64,
        long_prefill_token_threshold=CAP,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **chosen,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"ideal": ideal(prompts), "counters": counters(llm), "tokens": tokens}))


if __name__ == "__main__":
    main()
