"""Driver of Transformers' continuous batching: its scheduler, paged cache and SDPA in this process.

Its own thread is not used: the same batch processor is stepped by the same loop as the others, so that no request waits
for a lock or a queue. Prefix sharing is on. It has no paged attention on a CPU: every request's keys and values are
gathered and one SDPA with a mask runs over those of the whole batch.

A defect of 5.23 shows in the row `rotations_warm` and is not worked around: a request is marked finished before its
blocks are registered, so a prompt with one output token leaves no blocks to share, except those registered with its
earlier chunks.
"""

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from processor import multiplies_bf16
from serve import GREEDY, Job, News, Sampling, claim_stdout, drive, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

CACHE_TOKENS = 131_072  # shared by all requests; more than any row holds


class TransformersStepper:
    """The batch processor of ContinuousBatchingManager as a stepper (see serve.py)."""

    def __init__(self, model: str, config: ContinuousBatchingConfig, attention: str, dtype: str) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation=attention)
        self.vocab_size: int = loaded.config.vocab_size
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # -1: no token ends a request
        self._manager = loaded.init_continuous_batching(greedy, config)
        self._processor = self._manager._create_batch_processor()
        self._manager.batch_processor = self._processor
        self._outputs = self._manager.output_router.output_queue
        self._cached: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._watch_cache()

    def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
        assert sampling == GREEDY, "this driver does not sample"
        self._seen[request_id] = self._cached[request_id] = 0
        self._manager.add_request(prompt, request_id, max_new_tokens=output, streaming=True, eos_token_id=-1)

    def step(self) -> Sequence[News]:
        if self._processor.prepare_next_batch():
            self._manager._generation_step()
            self._processor.update_batch()
        news: list[News] = []
        while not self._outputs.empty():
            output = self._outputs.get_nowait()
            if output.request_id not in self._seen:
                continue
            new = len(output.generated_tokens) - self._seen[output.request_id]
            self._seen[output.request_id] += new
            is_over = output.is_finished() or output.status == RequestStatus.FAILED
            news.append(News(output.request_id, new, self._cached[output.request_id], is_over, output.error))
            if is_over:
                del self._seen[output.request_id], self._cached[output.request_id]
        return news

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._manager.cancel_request(request_id)
            self._seen.pop(request_id, None)
        self._processor.prepare_next_batch()  # processes the cancellations

    def reset(self) -> bool:
        """Clear every registered block."""
        if self._processor.has_pending_requests():
            return False
        self._processor.cache.evict_cached_blocks()
        self._processor.cache.pool.try_to_free_sectors()
        return True

    def _watch_cache(self) -> None:
        """Record the result of each prefix search: the outputs do not contain it."""
        cache = self._processor.cache
        search = cache.search_prefix_match

        def search_and_note(request_id: str, prompt_ids: list[int]) -> int:
            found = search(request_id, prompt_ids)
            self._cached[request_id] = self._cached.get(request_id, 0) + found
            return found

        cache.search_prefix_match = search_and_note


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=4, help="requests at once, in the warm-up: at most 4")
    parser.add_argument("--page", type=int, default=32, help="tokens in a block")
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "paged|eager"))
    dtype = "bfloat16" if multiplies_bf16() else "float32"  # of emulated bfloat16 it makes a hundredth of the speed
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--compile", type=int, default=0, help="level of torch.compile, 0 to 3")
    args = parser.parse_args()
    answers = claim_stdout()
    torch.set_num_threads(args.threads)
    settings = {
        "page_size": args.page,
        "num_blocks": CACHE_TOKENS // args.page,
        "max_batch_tokens": args.batch,
        "allow_block_sharing": True,
        "default_compile_level": args.compile,
    }
    engine = TransformersStepper(args.model, ContinuousBatchingConfig(**settings), args.attention, args.dtype)
    for length, streams in ((300, 1), (300, min(args.streams, 4))):  # runs every code path once
        drive(engine, [Job([7 + i, *range(length)], 4, 0.0) for i in range(streams)])
    engine.reset()
    spinning = {"gomp_spincount": os.environ.get("GOMP_SPINCOUNT")}
    about: dict[str, Any] = {
        "label": "transformers",
        "vocab_size": engine.vocab_size,
        "about": {
            "versions": {"transformers": version("transformers"), "torch": version("torch")},
            "settings": {"dtype": args.dtype, "attention": args.attention, **settings, **spinning},
        },
    }
    serve(answers, about, engine.reset, lambda jobs, concurrency, limit: drive(engine, jobs, concurrency, limit))


if __name__ == "__main__":
    main()
