"""Exactness: the log-probabilities of the same prompts, bit by bit, from engines that compute them in other ways.

The reference is each prompt alone, whole, in an engine of its own without reuse. The other ways split, join, reuse,
draft and restore; by invariant 15 none of them changes a bit.
"""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from memory_store import MemoryStore, Shelf
from model.tiny import make_checkpoint
from model.tiny_gguf import write_gguf

from headstart.core.batch import Batch, StepResult, TokenLogprob
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.speculation.speculation_config import SpeculationConfig
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import LoadedModel, load_model

LLAMA_3M = dict(
    hidden_size=256, intermediate_size=768, num_hidden_layers=4, vocab_size=512, max_position_embeddings=4096
)
STD = 0.2  # small weights hide differences
FORMS = ("bfloat16", "int8", "int4", "gguf", "float32")
DRAFTS = SpeculationConfig(num_speculative_tokens=7, prompt_lookup_max=4, prompt_lookup_min=1)
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 3000, 2048
NUM_TOP = 20

Answers = list[list[TokenLogprob]]  # of each prompt


class SteadyRunner(ModelRunner):
    """Every step takes as long, so the lengths of drafts do not depend on the machine."""

    def execute(self, batch: Batch) -> StepResult:
        return super().execute(batch)._replace(elapsed=0.001)


def load_form(form: str, folder: Path, family: str = "llama", **overrides: object) -> LoadedModel:
    """A model of llama-3m's shape, changed by `overrides`, with random weights in one of FORMS."""
    sizes = LLAMA_3M | overrides
    if form == "gguf":
        path = folder / "model.gguf"
        write_gguf(path, kind="Q4_1", std=STD, mixed={"attn_v": "Q6_K", "ffn_down": "Q5_K"}, **sizes)
        return load_model(path, device="cpu", dtype="bfloat16")
    make_checkpoint(family, folder, std=STD, **sizes)
    dtype = "float32" if form == "float32" else "bfloat16"
    return load_model(folder, device="cpu", dtype=dtype, quantization=form if form.startswith("int") else "none")


def prompts_of(rng: Random, num: int, *, longest: int, vocab: int) -> list[list[int]]:
    """Prompts that share prefixes of any length with each other, with repetitions that drafts can guess."""
    made: list[list[int]] = []
    for _ in range(num):
        base = rng.choice(made) if made and rng.random() < 0.75 else []
        prompt = base[: rng.randint(0, len(base))]
        while len(prompt) < rng.randint(20, longest):
            piece = [rng.randrange(3, vocab) for _ in range(rng.randint(1, 60))]
            prompt = prompt + piece * rng.randint(1, 3)
        made.append(prompt[:longest])
    return made


class Ways:
    """The ways to compute the answers to `prompts`, all with the same model."""

    def __init__(self, loaded: LoadedModel, prompts: Sequence[list[int]], *, num_tokens: int) -> None:
        self.loaded, self.prompts = loaded, prompts
        self.sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=NUM_TOP)

    def cold(self) -> Answers:
        """Each prompt alone, in one step, without reuse."""
        engine = self._engine(caching=False)
        return [self._run(engine, [prompt])[0] for prompt in self.prompts]

    def cached(self) -> Answers:
        """One after the other, each with the prefix of earlier ones."""
        engine = self._engine()
        return [self._run(engine, [prompt])[0] for prompt in self.prompts]

    def repeated(self) -> Answers:
        """All together, when all of them are cached."""
        engine = self._engine()
        self._run(engine, self.prompts)
        found = self._run(engine, self.prompts)
        assert engine.stats().counters.shared_tokens > sum(map(len, self.prompts)) / 2
        return found

    def batched(self) -> Answers:
        """All together, whose common prefixes are read once."""
        return self._run(self._engine(), self.prompts)

    def batched_apart(self) -> Answers:
        """All together, without reuse."""
        return self._run(self._engine(caching=False), self.prompts)

    def chunked(self) -> Answers:
        """All together, in steps of few tokens."""
        return self._run(self._engine(budget=53), self.prompts)

    def drafted(self) -> Answers:
        """All together, with drafts of what was answered before."""
        engine = self._engine(drafts=DRAFTS)
        self._run(engine, self.prompts)
        found = self._run(engine, self.prompts)
        assert engine.stats().counters.num_accepted_tokens > 0
        return found

    def restored(self) -> Answers:
        """All together, with the blocks that another engine has stored."""
        shelf: Shelf = {}
        first = MemoryStore(shelf)
        self._run(self._engine(store=first, budget=71), self.prompts)
        first.flush()
        engine = self._engine(store=MemoryStore(shelf))
        found = self._run(engine, self.prompts)
        assert engine.stats().counters.store_tokens > 0
        return found

    def threaded(self) -> Answers:
        """All together, by another number of threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            return self.batched()
        finally:
            torch.set_num_threads(before)

    @property
    def others(self) -> dict[str, Callable[[], Answers]]:
        """All ways but `cold`, by name."""
        ways = [self.cached, self.repeated, self.batched, self.batched_apart, self.chunked, self.threaded]
        ways += [self.drafted, self.restored]
        return {way.__name__: way for way in ways}

    def differing(self) -> dict[str, int]:
        """Return how many prompts have another bit than the cold ones, by way."""
        due = self.cold()
        return {
            name: sum(one != other for one, other in zip(due, way(), strict=True)) for name, way in self.others.items()
        }

    def _engine(
        self,
        *,
        caching: bool = True,
        budget: int = 4096,
        drafts: SpeculationConfig | None = None,
        store: MemoryStore | None = None,
    ) -> Engine:
        limits = Limits(max_batched_tokens=budget, max_seqs=32, max_model_len=MAX_LEN)
        config = SchedulerConfig(
            NUM_BLOCKS,
            BLOCK_SIZE,
            limits,
            model=self.loaded.fingerprint,
            enable_prefix_caching=caching,
            speculation=drafts,
            state_pages=-(-self.loaded.state_bytes // (BLOCK_SIZE * self.loaded.kv_bytes_per_token)),
        )
        runner = SteadyRunner(self.loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        return Engine(Scheduler(config, store=store), runner, store=store)

    def _run(self, engine: Engine, prompts: Sequence[list[int]]) -> Answers:
        answers: dict[str, list[TokenLogprob]] = {}
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(f"r{index}", array("i", prompt), self.sampling))
            answers[f"r{index}"] = []
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                answers[output.request_id] += output.logprobs
        assert all(len(entries) == self.sampling.max_tokens for entries in answers.values())
        return list(answers.values())
