"""Driver of OpenVINO GenAI on a CPU: its ContinuousBatchingPipeline in this process, stepped by the same loop as vLLM.

Weights, keys and values have 16 bits, set here although the converter also asks for float16 keys and values: the CPU
plugin's own default, 8 bits, is not comparable with the others. In float16 a batch decodes faster, in bfloat16 (`--kv
bf16`) many prompts at once are computed faster. The IR is written once per model, in its environment.

The pipeline neither reports cached tokens nor clears its prefix cache. It searches the cache when a request is added,
not when it is scheduled, so requests that arrive together share nothing that is not yet computed; this is not worked
around.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, GenerationStatus, SchedulerConfig
from openvino_ir import ensure_ir
from processor import multiplies_bf16
from serve import GREEDY, Job, News, Sampling, claim_stdout, drive, serve

SCHEDULER = {
    "enable_prefix_caching": True,
    "dynamic_split_fuse": True,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 256,
}


class OpenvinoStepper:
    """ContinuousBatchingPipeline as a stepper (see serve.py)."""

    def __init__(self, model: Path, scheduler: dict[str, Any], properties: dict[str, Any]) -> None:
        config = SchedulerConfig()
        for name, value in scheduler.items():
            setattr(config, name, value)
        self._pipeline = ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._handles: dict[str, Any] = {}

    def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
        config = GenerationConfig()
        config.max_new_tokens = output
        config.ignore_eos = True
        if sampling != GREEDY:
            config.do_sample = True
            config.temperature, config.top_p = sampling.temperature, sampling.top_p
            if sampling.top_k:
                config.top_k = sampling.top_k
        ids = ov.Tensor(np.array([prompt], np.int64))
        self._handles[request_id] = self._pipeline.add_request(int(request_id), ids, config)

    def step(self) -> Sequence[News]:
        self._pipeline.step()
        news = [_news(request_id, handle) for request_id, handle in self._handles.items()]
        for one in news:
            if one.is_finished:
                del self._handles[one.request_id]
        return news

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._handles.pop(request_id).cancel()
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()  # frees the blocks of the cancelled requests


def _news(request_id: str, handle: Any) -> News:
    """Return the output since the last call."""
    new_tokens = 0
    while handle.can_read():
        new_tokens += sum(len(output.generated_ids) for output in handle.read().values())
    status = handle.get_status()
    is_finished = status != GenerationStatus.RUNNING
    error = str(status) if is_finished and status != GenerationStatus.FINISHED else None
    return News(request_id, new_tokens, None, is_finished, error)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=40, help="requests at once, in the warm-up")
    parser.add_argument("--kv-gib", type=int, default=3, help="GiB of KV cache")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16" if multiplies_bf16() else "f32")
    parser.add_argument("--kv", choices=("f16", "bf16"), default="f16", help="type of keys, values")
    args = parser.parse_args()
    answers = claim_stdout()
    model = Path(args.model)
    path = ensure_ir(model, Path(sys.prefix) / "models" / model.name)
    types = {"INFERENCE_PRECISION_HINT": args.dtype, "KV_CACHE_PRECISION": args.kv}
    scheduler = {**SCHEDULER, "cache_size": args.kv_gib}
    threads = {"INFERENCE_NUM_THREADS": args.threads}
    engine = OpenvinoStepper(path, scheduler, {**threads, **types})
    for length, streams in ((300, 1), (300, args.streams)):  # runs every code path once
        drive(engine, [Job([7 + i, *range(length)], 4, 0.0) for i in range(streams)])
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    about: dict[str, Any] = {
        "label": "openvino" if args.kv == "f16" else f"openvino_{args.kv}",
        "vocab_size": config["vocab_size"],
        "reports_cached": False,
        "about": {
            "versions": {name: version(name) for name in ("openvino-genai", "openvino", "optimum-intel")},
            "settings": {**threads, **types, **scheduler},
        },
    }
    serve(answers, about, lambda: False, lambda jobs, concurrency, limit: drive(engine, jobs, concurrency, limit))


if __name__ == "__main__":
    main()
