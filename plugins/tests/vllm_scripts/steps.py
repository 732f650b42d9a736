"""vLLM's scheduler stepped without a model: each request's output is a fixed function of its prompt's last token."""

import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 32
MAX_STEPS = 5_000
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def model_config(folder: Path, weights: bytes = b"") -> ModelConfig:
    """Return the configuration of a small Llama in a folder; the scheduler does not read its weights."""
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(weights)
    return ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True, seed=0)


with tempfile.TemporaryDirectory() as _folder:
    MODEL = model_config(Path(_folder))


def make_scheduler(
    cls: type[Scheduler],
    *,
    options: Mapping[str, object] | None = None,
    num_blocks: int = 4_000,
    budget: int = 2_048,
    cap: int = 256,
    max_seqs: int = 64,
    policy: str = "fcfs",
    is_async: bool = False,
    is_hybrid: bool = False,
    transfer: KVTransferConfig | None = None,
    model: ModelConfig = MODEL,
    hash_algorithm: str = "sha256",
) -> Scheduler:
    """Return a scheduler of this class. Promised blocks are on unless `options` says otherwise.

    `cap`: --long-prefill-token-threshold; `transfer`: of its connector.
    """
    config = VllmConfig(
        model_config=model,
        kv_transfer_config=transfer,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            max_model_len=8192,
            is_encoder_decoder=False,
            long_prefill_token_threshold=cap,
            enable_chunked_prefill=True,
            policy=policy,
            async_scheduling=is_async,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, prefix_caching_hash_algo=hash_algorithm),
        additional_config={"headstart": {"promised_blocks": True, **(options or {})}},
    )
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], full)]
    if is_hybrid:
        window = SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=2 * BLOCK
        )
        groups.append(KVCacheGroupSpec(["other"], window))
    config.cache_config.num_gpu_blocks = num_blocks
    init_none_hash(sha256)
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


HASHER = get_request_block_hasher(BLOCK, sha256)


def make_request(name: str, prompt: Sequence[int], *, max_tokens: int = 4, priority: int = 0, age: int = 0) -> Request:
    """Return a request; `age`: its arrival time."""
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
        pooling_params=None,
        arrival_time=float(age),
        priority=priority,
        block_hasher=HASHER,
    )


@dataclass
class Run:
    """The steps of a run. `computed`: prompt tokens computed, with those of aborted and preempted requests."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    computed: int = 0
    prompt_kv_computed: int = 0  # vLLM's own count at admission, of finished requests
    finished: list[str] = field(default_factory=list)
    max_prefills: int = 0
    first_token_step: dict[str, int] = field(default_factory=dict)


def run(
    scheduler: Scheduler,
    arrivals: Mapping[int, Iterable[Request]],
    *,
    aborts: Callable[[int, Scheduler], Iterable[str]] = lambda step, scheduler: (),
) -> Run:
    """Step until all requests have ended. `aborts`: the ids to abort before a step. Asserts that the run ends."""
    waiting, found = {step: list(requests) for step, requests in arrivals.items()}, Run()
    for step in range(MAX_STEPS):
        for request in waiting.pop(step, ()):
            scheduler.add_request(request)
        for name in aborts(step, scheduler):
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if not waiting and not scheduler.has_unfinished_requests():
            return found
        output = scheduler.schedule()
        found.steps.append(summary(output))
        rows: list[list[int]] = []
        for name, num in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            end = request.num_computed_tokens
            found.computed += max(0, min(end, request.num_prompt_tokens) - (end - num))
            done = end >= request.num_tokens
            rows.append([(request.all_token_ids[-1] * 7 + 1) % 30_000] if done else [])
            if done and name not in found.first_token_step:
                found.first_token_step[name] = step
        names = list(output.num_scheduled_tokens)
        found.max_prefills = max(found.max_prefills, len(scheduler._inflight_prefills))
        results = scheduler.update_from_output(
            output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, rows)
        )
        for of_client in results.values():
            for each in of_client.outputs:
                if each.prefill_stats is not None:
                    found.prompt_kv_computed += (
                        each.prefill_stats.num_prompt_tokens - each.prefill_stats.num_cached_tokens
                    )
                if each.finish_reason is not None:
                    found.finished.append(each.request_id)
    raise AssertionError(f"not finished after {MAX_STEPS} steps: {scheduler.get_request_counts()}")


def summary(output: SchedulerOutput) -> dict[str, Any]:
    """Return all of a step that depends on scheduling."""
    cached = output.scheduled_cached_reqs
    return {
        "tokens": dict(output.num_scheduled_tokens),
        "order": list(output.num_scheduled_tokens),
        "new": [(data.req_id, data.num_computed_tokens, data.block_ids) for data in output.scheduled_new_reqs],
        "cached": list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)),
        "resumed": sorted(cached.resumed_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "finished": sorted(output.finished_req_ids),
    }


def ideal(prompts: Iterable[Sequence[int]]) -> int:
    """Return the prompt tokens that an infinite cache of full blocks computes, if it never computes one twice."""
    known: set[tuple[int, ...]] = set()
    total = 0
    for prompt in prompts:
        usable = (len(prompt) - 1) // BLOCK
        place = 0
        while place < usable and tuple(prompt[: (place + 1) * BLOCK]) in known:
            place += 1
        total += len(prompt) - place * BLOCK
        known.update(tuple(prompt[: (i + 1) * BLOCK]) for i in range(len(prompt) // BLOCK))
    return total


def run_checks(module: Mapping[str, Any], names: Sequence[str]) -> None:
    """Run the functions `check_*` of a script, or those named; print each, and null or its error, as JSON."""
    logging.disable(logging.WARNING)
    outcome: dict[str, str | None] = {}
    for name, check in [item for item in module.items() if item[0].startswith("check_")]:
        if name not in (names or [name]):
            continue
        try:
            check()
            outcome[name] = None
        except Exception:  # the test of this check shows it
            outcome[name] = traceback.format_exc()
        print(name, outcome[name] or "passed", file=sys.stderr)
    print(json.dumps(outcome))
