"""Measure the sampler alone: CPU time of one step of 32 rows on one thread, with the compiled kernel and with torch.

    OMP_NUM_THREADS=1 python benchmarks/sampler/run.py > benchmarks/sampler/result.json

Logits are random: `flat` has a standard deviation of 1 (no token is likely, the hardest case for top_p), `peaked` of 6
(a few tokens have nearly all probability, as in a trained model). Kernel and torch run in turn. Progress is on stderr.
"""

import argparse
import json
import sys
import time
from array import array

import torch

from headstart.core.batch import Chunk
from headstart.core.request import SamplingParams
from headstart.measurement.machine import describe_machine
from headstart.measurement.progress_bar import progress_bar
from headstart.model.kernels.library import find_kernels
from headstart.model.sampling.sampler import Sampler

ROWS, PROMPT, OUTPUT = 32, 64, 36
SCALES = {"flat": 1.0, "peaked": 6.0}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_k 20, top_p 0.8": SamplingParams(top_k=20, top_p=0.8),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_p 0.95, penalties": SamplingParams(top_p=0.95, frequency_penalty=0.5, repetition_penalty=1.1),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vocab-sizes", default="32000,152064", help="comma-separated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = find_kernels()
    samplers = {"torch": None} if found.kernels is None else {"kernel": found.kernels, "torch": None}
    sizes = [int(size) for size in args.vocab_sizes.split(",")]
    figures: dict[str, dict[str, float]] = {}
    with progress_bar() as bar, torch.inference_mode():
        bar.start_stage("sampling", len(sizes) * len(SCALES) * len(KINDS))
        for size in sizes:
            made = {name: Sampler(size, kernels=kernels) for name, kernels in samplers.items()}
            for form, scale in SCALES.items():
                logits = (torch.randn((ROWS, size), generator=torch.Generator().manual_seed(0)) * scale).bfloat16()
                for kind, params in KINDS.items():
                    figures[f"{size}, {form}, {kind}"] = measure(made, logits, params, args.repetitions)
                    bar.advance()
    setup = {"rows": ROWS, "dtype": "bfloat16", "kernels": found.note, "repetitions": args.repetitions, "seed": 0}
    document = {"machine": describe_machine(), "torch": torch.__version__, "setup": setup, "cpu_ms_per_step": figures}
    table(figures)
    print(json.dumps(document))


def measure(
    samplers: dict[str, Sampler], logits: torch.Tensor, params: SamplingParams, repetitions: int
) -> dict[str, float]:
    """Return the milliseconds of CPU time per step, by sampler: the least of all repetitions."""
    history = array("i", range(PROMPT + OUTPUT))
    start = len(history) - 1
    chunks = [
        Chunk(f"r{row}", history[start:], start, (1,), start, 1, params, PROMPT, history) for row in range(len(logits))
    ]
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(repetitions + 1):
        for name, sampler in samplers.items():
            began = time.process_time()
            sampler.sample(logits, chunks)
            taken[name].append(time.process_time() - began)
    return {name: round(min(times[1:]) * 1e3, 3) for name, times in taken.items()}


def table(figures: dict[str, dict[str, float]]) -> None:
    """Print the table on stderr."""
    for name, figure in figures.items():
        print(f"{name:<40} " + "  ".join(f"{who} {ms:8.2f} ms" for who, ms in figure.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
