"""Driver of Headstart: its Engine in this process, stepped by the same loop as vLLM."""

import os
from argparse import ArgumentParser
from array import array
from collections.abc import Sequence
from typing import Any

from serve import Job, News, Sampling, claim_stdout, drive, serve

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.measurement.machine import describe_versions
from headstart.model.setup.threads import configure_num_threads

TOKEN_BUDGET = 4096  # per step, as vLLM has
CONTEXT = 4096  # as vLLM has


class HeadstartStepper:
    """Engine as a stepper."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
        params = SamplingParams(max_tokens=output, **sampling._asdict())
        self.engine.add_request(Request(request_id, array("i", prompt), params))

    def step(self) -> Sequence[News]:
        return [
            News(out.request_id, len(out.token_ids), out.num_cached_tokens, out.finish_reason is not None, out.error)
            for out in self.engine.step()
        ]

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def clear_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=40, help="requests at once, in the warm-up")
    parser.add_argument("--kv-gib", type=int, default=3, help="GiB of KV cache")
    parser.add_argument("--quantization", default="none", choices=("none", "int8"))
    args = parser.parse_args()
    answers = claim_stdout()
    threads = configure_num_threads(args.threads)
    from headstart.engine.assembly import build_engine  # imports torch, which reads the threads' variables

    options = EngineOptions(
        model=args.model,
        threads=threads,
        quantization=args.quantization,
        kv_cache_memory=f"{args.kv_gib}GiB",
        max_model_len=CONTEXT,
        max_num_batched_tokens=TOKEN_BUDGET,
    )
    built, info = build_engine(options)
    engine = HeadstartStepper(built)
    warm_up(engine, args.streams)
    settings: dict[str, Any] = {
        "dtype": info.dtype,
        "quantization": info.quantization,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "attention_backend": info.attention_backend,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.max_num_seqs,
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
    }
    about = {"versions": describe_versions(), "settings": settings}
    label = "ours" if args.quantization == "none" else f"ours_{args.quantization}"
    ready = {"label": label, "vocab_size": info.vocab_size, "about": about}
    serve(
        answers,
        ready,
        engine.clear_prefix_cache,
        lambda jobs, concurrency, limit: drive(engine, jobs, concurrency, limit),
    )


def warm_up(engine: HeadstartStepper, most: int) -> None:
    """Run one prompt, then many at once: every code path, every buffer."""
    for streams in (1, most):
        drive(engine, [Job([7 + index, *range(300)], 4, 0.0) for index in range(streams)])
    engine.clear_prefix_cache()


if __name__ == "__main__":
    main()
