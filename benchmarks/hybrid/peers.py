"""Time a hybrid beside Transformers and llama.cpp, by turns: Headstart, peer, Headstart, peer, ...

Random weights in a published shape with fewer layers and tokens of a vocabulary. Headstart and llama.cpp read the same
GGUF file; Transformers reads the model in bfloat16, and Headstart too where there is no such file (Mamba-2). Each is a
process of its own that waits while another one runs.
Wall-clock seconds: needs an idle machine. The last line of stdout is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.model.kernels.library import cpu_model, find_kernels
from headstart.model.model_runner import ModelRunner
from headstart.model.setup.threads import SPIN_COUNT
from headstart.model.weights.model_loader import load_model

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
VOCAB, BLOCK_SIZE = 8192, 16
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {  # of Qwen3.5-0.8B: a third of its layers
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "full_attention_interval": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "lfm2": {  # of LFM2-350M: half of its layers
        "hidden_size": 1024, "intermediate_size": 4608, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "full_attention"],
    },
    "granitemoehybrid": {  # of Granite-4.0-H-350M, which has no experts: a quarter of its layers
        "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
        "layer_types": [*["linear_attention"] * 5, "full_attention", *["linear_attention"] * 2],
        "shared_intermediate_size": 2048, "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128,
        "mamba_n_groups": 1,
    },
    "bamba": {  # of Bamba-9B: heads as large, a quarter of the width and of the layers
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "attn_layer_indices": [4], "mamba_n_heads": 32, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1,
    },
}  # fmt: skip


class Worker(Protocol):
    """An engine under test; times in seconds. Those that reuse a prefix have `cached` as well, like `first_token`."""

    def first_token(self, tokens: list[int]) -> float: ...
    def decode(self, tokens: list[int], num: int) -> float: ...


class Ours:
    """The engine of Headstart, with its prefix cache."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        torch.set_num_threads(threads)
        loaded = load_model(Path(path), dtype="bfloat16", device="cpu")
        pages = -(-loaded.state_bytes // (BLOCK_SIZE * loaded.kv_bytes_per_token))
        num_blocks = 3 * context // BLOCK_SIZE + 24 * pages
        limits = Limits(max_batched_tokens=1024, max_seqs=4, max_model_len=context)
        scheduler = Scheduler(SchedulerConfig(num_blocks, BLOCK_SIZE, limits, state_pages=pages))
        self.engine = Engine(scheduler, ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE))

    def first_token(self, tokens: list[int]) -> float:
        return self._times(tokens, 1)[0]

    def cached(self, tokens: list[int]) -> float:
        """Return the seconds of a prompt that was served before."""
        return self._times(tokens, 1)[0]

    def decode(self, tokens: list[int], num: int) -> float:
        times = self._times(tokens, num + 1)
        return (times[-1] - times[0]) / num

    def _times(self, tokens: list[int], num: int) -> list[float]:
        began, found = time.perf_counter(), list[float]()
        self.engine.add_request(Request("a", array("i", tokens), SamplingParams(temperature=0.0, max_tokens=num)))
        while self.engine.has_work:
            for output in self.engine.step(time.monotonic()):
                assert output.error is None
                found += [time.perf_counter() - began] * len(output.token_ids)
        return found


class Transformers:
    """Transformers' own code, eager of its kind, with its cache of a sequence. Its states cannot be taken over."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def first_token(self, tokens: list[int]) -> float:
        began = time.perf_counter()
        self._step(tokens, DynamicCache(config=self.model.config))
        return time.perf_counter() - began

    def decode(self, tokens: list[int], num: int) -> float:
        cache = DynamicCache(config=self.model.config)
        token, began = self._step(tokens, cache), time.perf_counter()
        for _ in range(num):
            token = self._step([token], cache)
        return (time.perf_counter() - began) / num

    def _step(self, tokens: list[int], cache: DynamicCache) -> int:
        with torch.inference_mode():
            made = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(made.logits[0, -1].argmax())


class Process:
    """A worker in a process of its own."""

    def __init__(self, command: list[str], threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(SPIN_COUNT)}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._answer() == "ready"

    def __call__(self, *call: Any) -> float:
        assert self.child.stdin is not None
        print(json.dumps(call), file=self.child.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()

    def _answer(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"{self.child.args} ended early"
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=SHAPES)
    parser.add_argument("--weights", choices=["BF16", "Q8_0"], default="BF16", help="of Headstart and llama.cpp")
    parser.add_argument("--llamacpp", type=Path, help="folder made by benchmarks/peers/build_llamacpp.sh")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4000], help="tokens of the prompts of a round")
    parser.add_argument(
        "--long", type=int, default=32000, help="tokens of the longest prompt, once by Headstart; 0: no"
    )
    options = parser.parse_args()
    context = max(options.long, 512, *options.prompts) + 256
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own_file = saved(folder, options.family, options.weights, context)
        own = [sys.executable, __file__, "--worker"]
        commands = {
            "headstart": [*own, "Ours", str(own_file)],
            "transformers": [*own, "Transformers", str(folder / "model")],
        }
        if options.llamacpp:
            script = [str(options.llamacpp / "bin" / "python"), str(HERE / "llamacpp_worker.py")]
            commands["llamacpp"] = [*script, str(folder / "model.gguf")]
        workers = {
            kind: Process([*command, str(context), str(options.threads)], options.threads)
            for kind, command in commands.items()
        }
        times = measured(workers, options)
        for worker in workers.values():
            worker.close()
    medians = {kind: {row: median(runs) for row, runs in rows.items()} for kind, rows in times.items()}
    about = {"kernels": find_kernels().note, "cpu": cpu_model(), "load": os.getloadavg()}
    versions = {package: version(package) for package in ("torch", "transformers")}
    given = {key: str(value) for key, value in vars(options).items() if key != "llamacpp"}
    print(json.dumps({**given, **about, "versions": versions, "seconds": medians, "runs": times}))


def measured(workers: dict[str, Process], options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return seconds by worker and row: of prompts, of a token behind one, of a prompt that was served before."""
    rng = Random(0)
    found: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in workers}

    def note(kind: str, row: str, *call: Any) -> None:
        found[kind][row].append(workers[kind](*call))
        print(kind, row, f"{found[kind][row][-1]:.4f}", file=sys.stderr)

    def text(num: int) -> list[int]:
        return [rng.randrange(3, 400) for _ in range(num)]

    for kind in workers:
        workers[kind]("decode", text(64), 4)
    for at in range(options.rounds):
        for kind in workers if at % 2 == 0 else reversed(workers):
            prompts = {num: text(num) for num in options.prompts}
            for num, prompt in prompts.items():
                note(kind, f"prompt {num}", "first_token", prompt)
                if kind != "transformers":
                    note(kind, f"cached {num}", "cached", prompt)
            note(kind, "token", "decode", text(128), options.decodes)
    if options.long:
        prompt = text(options.long)
        note("headstart", f"prompt {options.long}", "first_token", prompt)
        for _ in range(options.rounds):
            note("headstart", f"cached {options.long}", "cached", prompt)
    return found


def saved(folder: Path, family: str, weights: str, context: int) -> Path:
    """Write a random model of SHAPES to `model` and, with matrices of `weights`, to `model.gguf`; return ours."""
    sys.path.insert(0, str(TESTS))
    from model.hybrid_gguf import ARCHITECTURES, random_hybrid
    from model.tiny import make_checkpoint

    sizes = SHAPES[family] | {"vocab_size": VOCAB, "max_position_embeddings": 2 * context, "std": 0.02}
    if family not in ARCHITECTURES:
        make_checkpoint(family, folder / "float32", **sizes)
        AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=torch.bfloat16).save_pretrained(folder / "model")
        return folder / "model"
    tokens = {"tokenizer.ggml.tokens": [f"<{index}>" for index in range(VOCAB)]}
    tokens |= {"tokenizer.ggml.token_type": [1] * VOCAB, "tokenizer.ggml.merges": ["< 0"]}
    oracle: PreTrainedModel = random_hybrid(folder / "model.gguf", family, weights, metadata=tokens, **sizes)
    oracle.to(torch.bfloat16).save_pretrained(folder / "model")
    return folder / "model.gguf"


def serve(kind: str, path: str, context: int, threads: int) -> None:
    """Answer the calls of the parent."""
    worker: Worker = {"Ours": Ours, "Transformers": Transformers}[kind](path, context, threads)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(json.dumps(getattr(worker, name)(*values)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
