"""Driver of vLLM on a CPU: its LLMEngine in this process, stepped by the same loop as Headstart.

Its best settings on two cores: no engine process and no HTTP, libgomp and tcmalloc preloaded, torch.compile on.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from ctypes.util import find_library
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serve import Job, News, Sampling, claim_stdout, drive, serve

BLOCK = 32  # it refuses 16 on a CPU; its default of 128 shares less
SETTINGS = {
    "block_size": BLOCK,
    "enable_prefix_caching": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 256,
    "enforce_eager": False,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare(threads: int, kv_gib: int) -> None:
    """Restart this program with the variables that the dynamic loader and the libraries read before Python does.

    Preloaded are torch's own libgomp, so that there is one OpenMP in the process, as vLLM does for its workers, and
    tcmalloc, which it recommends. LD_PRELOAD of the caller takes precedence.
    """
    if os.environ.get("PEER_PREPARED"):
        return
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    package = Path(spec.origin).parent
    found = [*package.parent.glob("torch.libs/libgomp*.so*"), *package.glob("lib/libgomp*.so*")][:1]
    preload = ":".join([name for name in (find_library("tcmalloc_minimal"),) if name] + [str(path) for path in found])
    own = {"PEER_PREPARED": "1", "OMP_NUM_THREADS": str(threads)}
    pool = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}
    environment = {**ENVIRONMENT, **pool, "LD_PRELOAD": preload, **os.environ, **own}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


class VllmStepper:
    """LLMEngine as a stepper; outputs come as deltas, no tokenizer is loaded."""

    def __init__(self, model: str, dtype: str) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self._sampling = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(model=model, dtype=dtype, skip_tokenizer_init=True, **SETTINGS)
        )

    def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
        params = self._sampling(
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
            **sampling._asdict(),  # without a seed, which ends vLLM 0.32 on a CPU
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> Sequence[News]:
        return [
            News(output.request_id, len(output.outputs[0].token_ids), output.num_cached_tokens, output.finished)
            for output in self.engine.step()
        ]

    def abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)

    def reset(self) -> bool:
        return bool(self.engine.reset_prefix_cache())


def _preloaded() -> list[str]:
    """Return the names of the preloaded libraries, without the folders of this machine."""
    return [Path(name).name for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=40, help="requests at once, in the warm-up")
    parser.add_argument("--kv-gib", type=int, default=3, help="GiB of KV cache")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    prepare(args.threads, args.kv_gib)
    answers = claim_stdout()
    engine = VllmStepper(args.model, args.dtype)
    for length, streams in ((300, 1), (300, args.streams)):  # runs every code path once
        drive(engine, [Job([7 + i, *range(length)], 4, 0.0) for i in range(streams)])
    engine.reset()
    about: dict[str, Any] = {
        "label": "vllm",
        "vocab_size": engine.engine.model_config.get_vocab_size(),
        "about": {
            "versions": {"vllm-cpu": version("vllm-cpu"), "torch": version("torch")},
            "settings": {
                "dtype": args.dtype,
                **SETTINGS,
                "kv_gib": os.environ["VLLM_CPU_KVCACHE_SPACE"],
                "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
                "preload": _preloaded(),
            },
        },
    }
    serve(answers, about, engine.reset, lambda jobs, concurrency, limit: drive(engine, jobs, concurrency, limit))


if __name__ == "__main__":
    main()
