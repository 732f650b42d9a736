"""Two engines on the same weights, one with drafts, that decode given texts by turns."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import BLOCK, CONTEXT, Pair, Total, packed, timed
from texts import Case
from torch import Tensor

from headstart.core.batch import Chunk, RowResult
from headstart.core.cache.hashing import root_hash
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sequence import Sequence as EngineSequence
from headstart.core.speculation.speculation_config import SpeculationConfig, parse_speculative_config
from headstart.core.warm_up import measure_draft_cost, measure_step_times
from headstart.model.model_runner import ModelRunner
from headstart.model.setup.sizing import apply_threads
from headstart.model.weights.model_loader import load_model

POOL_TOKENS = 80_000
NO_BLOCK = root_hash(b"", adapter=None, domain=b"")


class TeacherSampler:
    """A sampler that samples, and then takes the given token instead."""

    def __init__(self, sampler: Any, outputs: dict[str, list[int]]) -> None:
        self._sampler = sampler
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        """Return the given tokens of each chunk: the accepted drafts and one more."""
        rows = self._sampler.sample(logits, chunks)
        return [self._given(chunk, row) for chunk, row in zip(chunks, rows, strict=True)]

    def _given(self, chunk: Chunk, row: RowResult) -> RowResult:
        output = self._outputs.get(chunk.request_id)
        if output is None:  # warm-up
            return row
        at = len(chunk.history) - chunk.num_prompt_tokens
        drafts = chunk.token_ids[len(chunk.token_ids) + 1 - chunk.num_logits :].tolist()
        num = 0
        while num < len(drafts) and drafts[num] == output[at + num]:
            num += 1
        return RowResult(tuple(output[at : at + num + 1]))


class Engines:
    """Both engines. `begin` starts with empty caches."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        apply_threads(args.threads)
        self._loaded = load_model(folder, dtype=args.dtype, device="cpu", quantization=args.quantization)
        self.vocab_size = self._loaded.vocab_size
        self.dtype = str(self._loaded.dtype).removeprefix("torch.")
        self._config = parse_speculative_config(args.config)
        self._outputs: dict[str, list[int]] = {}
        self._runners = [self._runner() for _ in range(2)]

    def begin(self, earlier: Sequence[Case] = ()) -> None:
        """Start anew: caches and counters are empty, and the earlier outputs are those of `earlier`."""
        self._plain, self._drafted = (
            self._engine(runner, config) for runner, config in zip(self._runners, (None, self._config), strict=True)
        )

        speculation = self._drafted.scheduler.speculation
        assert speculation is not None, "the engine has no drafts"
        for number, case in enumerate(earlier):
            request = Request(f"earlier-{number}", packed(case.prompt), SamplingParams())
            speculation.on_finished(EngineSequence(request, packed(case.prompt + case.output), NO_BLOCK, NO_BLOCK))

    def decode(self, index: int, group: Sequence[Case]) -> Pair:
        """Let both engines decode a group of requests; which one begins alternates with `index`."""
        pair = Pair()
        turns = [(self._plain, pair.plain), (self._drafted, pair.drafted)]
        for engine, total in turns if index % 2 else reversed(turns):
            self._decode(engine, total, index, group)
        assert pair.plain.tokens == pair.drafted.tokens
        return pair

    def acceptance(self) -> dict[str, Any]:
        """Return what the engine with drafts has counted since `begin`."""
        counters = self._drafted.stats().counters
        drafts = {"draft_tokens": counters.num_draft_tokens, "accepted_tokens": counters.num_accepted_tokens}
        return {**drafts, "acceptance": round(counters.num_accepted_tokens / max(counters.num_draft_tokens, 1), 3)}

    def _decode(self, engine: Engine, total: Total, index: int, group: Sequence[Case]) -> None:
        """Compute all prompts first: each request waits after its first token, until the last one has its own."""
        requests = [
            Request(
                f"{index}-{number}",
                packed(case.prompt),
                SamplingParams(max_tokens=len(case.output), temperature=0.0),
            )
            for number, case in enumerate(group)
        ]
        for request, case in zip(requests, group, strict=True):
            self._outputs[request.request_id] = case.output
            self._compute_prompt(engine, request)
        for request in requests:
            engine.add_request(request)
        left = {request.request_id for request in requests}
        while left:
            outputs = engine.step()
            left -= {output.request_id for output in outputs}
        while engine.has_work:
            before = engine.stats().counters
            outputs, elapsed, cpu = timed(engine.step)
            assert engine.stats().counters.prefill_tokens == before.prefill_tokens, (
                "a prompt is computed in a timed step"
            )
            total.elapsed += elapsed
            total.cpu += cpu
            total.steps += 1
            total.tokens += sum(len(output.token_ids) for output in outputs)

    def _compute_prompt(self, engine: Engine, request: Request) -> None:
        """Compute the prompt of a request into the prefix cache, without an effect on drafts."""
        name = f"prompt-{request.request_id}"
        engine.add_request(Request(name, request.prompt, SamplingParams(max_tokens=1, temperature=0.0)))
        while engine.has_work:
            engine.step()

    def _runner(self) -> ModelRunner:
        runner = ModelRunner(self._loaded, num_blocks=POOL_TOKENS // BLOCK, block_size=BLOCK)
        runner.sampler = TeacherSampler(runner.sampler, self._outputs)  # type: ignore[assignment]
        return runner

    def _engine(self, runner: ModelRunner, config: SpeculationConfig | None) -> Engine:
        limits = Limits(max_model_len=CONTEXT)
        scheduler = Scheduler(
            SchedulerConfig(
                runner.num_blocks, BLOCK, limits, self._loaded.fingerprint, policy="fcfs", speculation=config
            )
        )
        measure_step_times(runner, scheduler.step_times, max_tokens=CONTEXT)
        if scheduler.speculation is not None:
            measure_draft_cost(runner, scheduler.speculation.cost, max_tokens=CONTEXT)
        return Engine(scheduler, runner)
