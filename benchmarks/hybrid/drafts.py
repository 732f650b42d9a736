"""Time decode steps with drafts of a small model of Qwen3.5's shape, with the states that they keep and without.

Weights are random. One thread; CPU time of the process per step, so that other load on the machine counts less. A step
without kept states could not go on behind a draft that is rejected: it is the control.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from array import array
from pathlib import Path
from random import Random
from statistics import median

import torch
from speed import saved_model

from headstart.core.batch import Batch, Chunk
from headstart.core.request import GREEDY
from headstart.model.kernels.library import cpu_model, find_kernels
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import load_model

DRAFTS = (0, 1, 4, 7, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        saved_model(folder, options.dtype)
        loaded = load_model(folder, dtype=options.dtype, device="cpu")
        found = measured(ModelRunner(loaded, num_blocks=200, block_size=16), options.prompt, options.rounds)
    medians = {kind: {num: median(times) for num, times in runs.items()} for kind, runs in found.items()}
    about = {"kernels": find_kernels().note, "cpu": cpu_model(), "torch": torch.__version__, "load": os.getloadavg()}
    sizes = {"state_bytes": loaded.state_bytes, "weight_bytes": loaded.weight_bytes}
    print(json.dumps({**vars(options), **about, **sizes, "ms_per_step": medians, "runs": found}))


def measured(runner: ModelRunner, prompt: int, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Return CPU milliseconds of steps by the number of drafts, all of which are rejected."""
    rng = Random(0)
    tokens = array("i", (rng.randrange(3, 4000) for _ in range(2048)))
    blocks, start, states = list(range(1, 129)), prompt, runner.states
    assert states is not None
    begin = states.begin_step

    def bare(chunks, qo_indptr):
        return tuple(row._replace(saves=()) for row in begin(chunks, qo_indptr))

    def step(first: int, num_known: int, num_drafts: int) -> float:
        end = first + num_known
        made = Chunk(
            "a", tokens[first : end + num_drafts], first, blocks, 0, 1 + num_drafts, GREEDY, prompt, tokens[:end]
        )
        began = time.process_time()
        assert runner.execute(Batch((made,))).rows[0].error is None
        return (time.process_time() - began) * 1e3

    step(0, prompt, 1)
    found: dict[str, dict[int, list[float]]] = {kind: {num: [] for num in DRAFTS} for kind in ("kept", "bare")}
    for at in range(rounds + 1):
        for num in DRAFTS:
            for kind in found:
                states.begin_step = begin if kind == "kept" else bare  # type: ignore[method-assign]
                elapsed = step(start, 1, num)
                start += 1
                if at:
                    found[kind][num].append(elapsed)
        print(at, file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
