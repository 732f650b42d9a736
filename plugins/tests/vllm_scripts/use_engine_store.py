"""The store connector in a whole engine: use_engine_store.py MODEL FOLDER kill|end|flip [PASSES].

Serves prompts with greedy tokens, waits until their blocks are written, prints counters and tokens as JSON, and ends,
or kills itself with SIGKILL. `flip`: serves them again in PASSES, each with an empty pool and after its part of 3,000
flips of bytes in the folder, and reports how many answers differ.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from steps import BLOCK
from use_engine import counters
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group

SECONDS = 300.0
FLIPS = 3_000


def settle(store: Any) -> None:
    """Wait until no block waits to be written."""
    until = time.monotonic() + SECONDS
    while store.stats().num_pending and time.monotonic() < until:
        time.sleep(0.1)


def flip(folder: Path, num: int, rng: Random) -> None:
    """Flip a bit in each of some bytes in use."""
    paths, done = sorted(folder.glob("*.kv")), 0
    while done < num:
        with rng.choice(paths).open("r+b") as file:
            place = rng.randrange(os.fstat(file.fileno()).st_size)
            file.seek(place)
            [byte] = file.read(1)
            if byte:
                file.seek(place)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
                done += 1


def main() -> None:
    model, folder, end = sys.argv[1:4]
    rng = Random(3)
    vocabulary = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = [[rng.randrange(10, vocabulary) for _ in range(600 + 7 * i)] for i in range(8)]
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="HeadstartConnector",
            kv_connector_module_path="headstart_plugins.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"folder": folder, "size": "1GiB"},
        ),
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)

    def serve() -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    report: dict[str, Any] = {
        "tokens": serve(), "counters": counters(llm), "prompt_tokens": sum(map(len, prompts)),
    }  # fmt: skip
    store = get_kv_transfer_group()._worker._store
    settle(store)
    if end == "flip":
        report["wrong"], passes = 0, int(sys.argv[4])
        for _ in range(passes):
            flip(Path(folder), FLIPS // passes, rng)
            assert llm.reset_prefix_cache()
            report["wrong"] += sum(a != b for a, b in zip(serve(), report["tokens"], strict=True))
            settle(store)
        report["misses"] = store.stats().misses
    report["store"] = {"written": store.stats().written_blocks, "loaded": store.stats().loaded_blocks}
    print(json.dumps(report), flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
