"""Time OpenVINO GenAI on a GGUF file, in its own environment; the last line is one JSON document.

One sequence through `LLMPipeline`, greedy, with prefix caching; the times are those that it reports itself. See
worker_llamacpp.py for the same work. The prompt of each run begins with another token, so that nothing is cached.
"""

import argparse
import json

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    """Print the times of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    arguments = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens = 2048
    pipeline = genai.LLMPipeline(
        arguments.file, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=arguments.threads
    )
    prompt = np.random.default_rng(0).integers(300, 30000, arguments.prompt).tolist()
    prefill: list[float] = []
    token: list[float] = []
    for run in range(arguments.runs + 1):  # the first warms up
        ids = np.array([[300 + run, *prompt[1:]]], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        tokens = arguments.tokens + 1
        done = pipeline.generate(inputs, max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, do_sample=False)
        if run:
            prefill.append(done.perf_metrics.get_ttft().mean / 1e3)
            token.append(done.perf_metrics.get_tpot().mean / 1e3)
    print(json.dumps({"prefill": prefill, "token": token}))


if __name__ == "__main__":
    main()
