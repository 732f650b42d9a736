"""The oracle for models with states: everything of oracle_store.py, drafts, aborts, and evictions at random."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from fickle_store import FickleStore
from oracle import EngineUnderTest, Reference, Tally, any_request
from oracle_store import Fleet, judged

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import is_checkpoint_page_hash
from headstart.core.engine import Engine
from headstart.core.request import Request
from headstart.core.speculation.speculation_config import SpeculationConfig
from headstart.model.model_runner import ModelRunner

DRAFTS = SpeculationConfig(num_speculative_tokens=7, prompt_lookup_max=4, prompt_lookup_min=1)
NUM_TOKENS = 12


@dataclass
class HybridFleet(Fleet):
    """A fleet that also loses idle blocks and pages at any time, and whose clients give up and ask again."""

    def build(self) -> Engine:
        engine = super().build()
        runner = engine.executor
        assert isinstance(runner, ModelRunner) and runner.states is not None
        read, tally = runner.states.begin_step, self.tally

        def begin(chunks: Sequence, qo_indptr: object) -> tuple:
            tally.states_read += sum(bool(chunk.state) for chunk in chunks)
            return read(chunks, qo_indptr)

        runner.states.begin_step = begin  # type: ignore[method-assign, assignment]
        return engine

    def send(self, request: Request) -> None:
        self.requests = getattr(self, "requests", {}) | {request.request_id: request}
        super().send(request)

    def step(self, engine: Engine) -> None:
        super().step(engine)
        if self.rng.random() < 0.15:
            self.lose(engine)
        if self.rng.random() < 0.04:
            names = [name for name, owner in self.owners.items() if owner is engine]
            if names:
                name = self.rng.choice(names)
                assert engine.abort(name)
                self.tally.aborts += 1
                self.send(self.requests[name])

    def close(self) -> None:
        """Wait for loads of aborted requests first: an idle engine does not."""
        for engine in self.engines:
            while engine.stats().pool.num_loading:
                self.now += 0.1
                engine.scheduler.transfers.wait_for_any_load(0.01)
                engine.scheduler.transfers.publish_loaded(engine.executor, self.now)
        super().close()

    def lose(self, engine: Engine) -> None:
        """Evict some idle blocks, or the pages of some states only, or one page."""
        pool = engine.scheduler.pool
        published = pool.published_hashes
        assert isinstance(published, dict)
        pages = self.rng.choice([True, True, False])
        blocks = [block for name, (block, _, _) in published.items() if is_checkpoint_page_hash(name) == pages]
        chosen = self.rng.sample(blocks, min(len(blocks), self.rng.choice([1, 3, 12])))
        self.tally.dropped += len(chosen)
        pool.discard_replaced(chosen)
        pool.check_invariants()


def repeating(prompts: list[list[int]], rng: Random) -> list[list[int]]:
    """The prompts, some of which end with a piece of themselves again, so that drafts are found."""
    return [prompt + prompt[-rng.randint(2, 9) :] * rng.choice([0, 0, 1, 2]) for prompt in prompts]


def tree_of(rng: Random, num: int) -> list[list[int]]:
    """Prompts of a random tree: each continues, repeats or leaves an earlier one, with turns that come back."""
    stems = [[rng.randrange(128) for _ in range(rng.randint(16, 44))] for _ in range(3)]
    made: list[list[int]] = []
    for _ in range(num):
        base = rng.choice(made) if made and rng.random() < 0.6 else rng.choice(stems)
        base = base if rng.random() < 0.4 else base[: rng.randint(1, len(base))]
        made.append((base + [rng.randrange(128) for _ in range(rng.choice([0, 0, 1, 4, 9]))])[:40])
    return [prompt[:44] for prompt in repeating(made, rng)]


def with_turns(prompts: list[list[int]], reference: Reference, rng: Random) -> list[list[int]]:
    """Make each third prompt but the first the next turn of the one before it, with its answer; return all."""
    for index in range(0, len(prompts) - 1, 3):
        due = reference.generate(prompts[index], NUM_TOKENS)[0]
        prompts[index + 1] = [*prompts[index], *due, *(rng.randrange(128) for _ in range(rng.randint(1, 4)))]
    return prompts


def compare_hybrid(
    folder: Path, room: Path, seed: int, num_requests: int, store_class: type[FickleStore] = FickleStore
) -> Tally:
    """Run a random tree on engines over one store in `room`, against Transformers; the tally of it."""
    rng = Random(seed)
    reference, under_test = Reference(folder), EngineUnderTest(folder, DRAFTS)
    prompts = tree_of(rng, num_requests)
    fleet = HybridFleet(under_test, room, rng, prompts, NUM_TOKENS, rng.choice([9 << 20, 1 << 30]), store_class)
    requests = [any_request(f"r{index}", prompt, NUM_TOKENS, rng) for index, prompt in enumerate(prompts)]
    with_turns(prompts, reference, rng)
    requests = [replace(each, prompt=array("i", text)) for each, text in zip(requests, prompts, strict=True)]
    return judged(fleet, reference, requests, rng, f"{folder.name} seed {seed}")


class ConfusedStore(FickleStore):
    """The planted bug: the state of another position, or prompt, in place of one."""

    def offer_block(self, block: int, version: int, key: BlockKey) -> None:
        if is_checkpoint_page_hash(key.block_hash):
            self.pages.setdefault(key.block_hash[-9:], []).append(key)
        super().offer_block(block, version, key)

    def begin_load(self, keys: Sequence[BlockKey]) -> int:
        return super().begin_load([self._other(key) for key in keys])

    @property
    def pages(self) -> dict[bytes, list[BlockKey]]:
        """The pages that any store of this run has been offered, by their number."""
        if not hasattr(self.troubles, "pages"):
            self.troubles.pages = {}  # type: ignore[attr-defined]
        return self.troubles.pages  # type: ignore[attr-defined]

    def _other(self, key: BlockKey) -> BlockKey:
        others = [other for other in self.pages.get(key.block_hash[-9:], ()) if self.inner.contains(other.block_hash)]
        return self.rng.choice(others) if others and is_checkpoint_page_hash(key.block_hash) else key
