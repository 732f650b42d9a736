"""The secondary tier in a whole engine, on a GPU: use_engine_tier.py MODEL FOLDER kill|end; MODEL is a folder.

Serves prompts with greedy tokens through a host pool with HeadstartTier under it, prints vLLM's counters and tokens as
JSON, and ends, or kills itself with SIGKILL. A second start is to find what the first has stored.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from random import Random

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from steps import BLOCK
from use_engine import counters
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

WRITING_SECONDS = 10.0  # for what is written behind


def main() -> None:
    model, folder, end = sys.argv[1:]
    rng = Random(3)
    vocabulary = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = [[rng.randrange(10, vocabulary) for _ in range(600 + 7 * i)] for i in range(8)]
    tier = {"type": "HeadstartTier", "module_path": "headstart_plugins.vllm.tier", "folder": folder, "size": "4GiB"}
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 4 << 30,
                "secondary_tiers": [tier],
            },
        ),
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    tokens, found = [list(output.outputs[0].token_ids) for output in outputs], counters(llm)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)  # steps in which the last copies end
    time.sleep(WRITING_SECONDS)
    print(json.dumps({"tokens": tokens, "counters": found, "prompt_tokens": sum(map(len, prompts))}), flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
