"""Time Headstart's engine on a model; the last line is one JSON document. See worker_llamacpp.py for the same work.

Whole steps of the engine: scheduling, all layers, sampling. The prompt of each run begins with another token, so that
nothing of it is cached.
"""

import argparse
import json
import time

import numpy as np

from headstart import LLM

SAMPLING = {"temperature": 0, "ignore_eos": True}


def main() -> None:
    """Print the times of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--activation-bits", default="16")
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    arguments = parser.parse_args()
    length = arguments.prompt + arguments.tokens + 16
    llm = LLM(
        arguments.file,
        quantization=arguments.quantization,
        activation_bits=arguments.activation_bits,
        threads=arguments.threads,
        max_model_len=length,
        num_blocks=2 * (length // 16 + 2),
    )
    vocab_size = 30000
    rng = np.random.default_rng(0)
    prompt = rng.integers(300, vocab_size, arguments.prompt).tolist()
    prefill: list[float] = []
    token: list[float] = []
    for run in range(arguments.runs + 1):  # the first warms up
        ids = [300 + run, *prompt[1:]]
        began = time.perf_counter()
        llm.generate([ids], SAMPLING | {"max_tokens": 1}, progress=False)
        middle = time.perf_counter()
        llm.generate([ids], SAMPLING | {"max_tokens": 1}, progress=False)  # the same from the cache: subtracted
        cached = time.perf_counter()
        llm.generate([ids], SAMPLING | {"max_tokens": 1 + arguments.tokens}, progress=False)
        finished = time.perf_counter()
        if run:
            prefill.append(middle - began)
            token.append((finished - cached - (cached - middle)) / arguments.tokens)
    print(json.dumps({"prefill": prefill, "token": token}))


if __name__ == "__main__":
    main()
