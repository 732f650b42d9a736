"""The oracle with a store: engines on one folder, slow and failing disks, deaths and restarts, against Transformers.

As `oracle.compare_everything`, and on top of it what was evicted, or computed by a dead or a sibling engine, comes back
from disk, or does not. Requests of an engine that dies are sent again, as clients would.
"""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fickle_store import FickleStore, Troubles
from oracle import (
    EngineUnderTest,
    Reference,
    Tally,
    any_request,
    check_output,
    check_tokens,
    cramped,
    pin,
    thicket,
)

from headstart.core.engine import Engine
from headstart.core.request import Request
from headstart.model.model_runner import ModelRunner
from headstart.store.disk import DiskStore
from headstart.store.format import StoredBlockFormat

MAX_STEPS = 20_000


@dataclass
class Fleet:
    """One or two engines on one folder, run by turns; any may die between two steps, and another takes its place."""

    under_test: EngineUnderTest
    folder: Path
    rng: Random
    prompts: list[list[int]]
    num_tokens: int
    max_bytes: int
    store_class: type[FickleStore] = FickleStore
    tally: Tally = field(default_factory=Tally)
    troubles: Troubles = field(default_factory=Troubles)
    now: float = 0.0

    def __post_init__(self) -> None:
        pages = self.under_test.state_pages
        self.block_size, self.num_blocks, self.pins = cramped(self.rng, self.prompts, self.num_tokens, pages)
        self.stores: list[FickleStore] = []
        self.engines = [self.build() for _ in range(self.rng.choice([1, 2]))]
        self.owners: dict[str, Engine] = {}  # of requests under way
        self.tokens: dict[str, list[int]] = {}

    def build(self) -> Engine:
        def opened(runner: ModelRunner) -> FickleStore:
            shape = StoredBlockFormat(self.under_test.loaded.fingerprint, self.block_size, runner.block_bytes)
            inner = DiskStore(self.folder, shape, self.max_bytes)
            is_direct = self.rng.random() < 0.3
            self.stores.append(self.store_class(inner, self.folder, self.rng, self.troubles, is_direct))
            return self.stores[-1]

        engine = self.under_test.build_everything(self.num_blocks, self.block_size, self.rng, opened)
        pin(engine, self.pins)
        return engine

    def run(self, requests: list[Request], restarts: int) -> None:
        """Everything to its end; the engines die `restarts` times in all, if there is the time for it."""
        todo, rng = list(reversed(requests)), self.rng
        for _ in range(MAX_STEPS):
            while todo and (len(self.owners) < 2 or rng.random() < 0.9):
                self.send(todo.pop())
            busy = [engine for engine in self.engines if engine.has_work]
            if busy:
                self.step(rng.choice(busy))
            if restarts and rng.random() < 0.03:
                todo += [request for request in requests if self.owners.get(request.request_id) is self.engines[0]]
                self.die()
                restarts -= 1
            if not todo and not self.owners and not any(engine.has_work for engine in self.engines):
                return
        raise AssertionError(f"still busy after {MAX_STEPS} steps: {list(self.owners)}")

    def send(self, request: Request) -> None:
        engine = self.rng.choice(self.engines)
        engine.add_request(request)
        self.owners[request.request_id], self.tokens[request.request_id] = engine, []

    def step(self, engine: Engine) -> None:
        self.now += self.rng.random() * self.rng.choice([0.01, 1.0])
        for output in engine.step(self.now):
            check_output(output)
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                del self.owners[output.request_id]
                self.tally.cached_tokens += output.num_cached_tokens
        self.tally.full_pool_steps += engine.scheduler.pool.num_free == 0
        engine.scheduler.pool.check_invariants()

    def die(self) -> None:
        """The first engine is gone from one step to the next, and a new one comes, before or after its store closes."""
        engine = self.engines.pop(0)
        self.owners = {rid: owner for rid, owner in self.owners.items() if owner is not engine}
        overlap = self.rng.random() < 0.3
        if overlap:
            self.engines.append(self.build())
        self.end(engine)
        if not overlap:
            self.engines.append(self.build())
        self.tally.restarts += 1

    def end(self, engine: Engine) -> None:
        stats = engine.stats()
        self.tally.count(stats)
        if stats.store is not None:
            self.tally.corrupt += stats.store.misses.get("corrupt", 0)
            self.tally.overwritten += stats.store.lost_writes.get("overwritten", 0)
        engine.close()

    def close(self) -> None:
        for engine in self.engines:
            pool = engine.scheduler.pool
            assert pool.num_free + pool.num_pinned_idle == pool.usable_capacity, "blocks leaked"
            assert engine.stats().pool.num_loading == 0, "a load without an end"
            self.end(engine)
        self.tally.runs_with_loads += self.tally.store_tokens > 0
        self.tally.troubles += self.troubles.misses + self.troubles.cancelled


def compare_with_store(
    folder: Path, room: Path, seed: int, num_requests: int, store_class: type[FickleStore] = FickleStore
) -> Tally:
    """Runs a thicket on engines over one store in `room`, against Transformers; the tally of it."""
    rng, num_tokens = Random(seed), 6
    reference, under_test = Reference(folder), EngineUnderTest(folder)
    prompts = thicket(rng, num_requests)
    max_bytes = rng.choice([9 << 20, 1 << 30])
    fleet = Fleet(under_test, room, rng, prompts, num_tokens, max_bytes, store_class)
    requests = [any_request(f"r{i}", prompt, num_tokens, rng) for i, prompt in enumerate(prompts)]
    return judged(fleet, reference, requests, rng, f"{folder.name} seed {seed} with a store")


def judged(fleet: Fleet, reference: Reference, requests: list[Request], rng: Random, label: str) -> Tally:
    """Runs the requests of the fleet's prompts to their end, and compares all tokens; the tally of it."""
    fleet.tally.requests = len(requests)
    fleet.run(requests, restarts=rng.randint(1, 3))
    fleet.close()
    for request, prompt in zip(requests, fleet.prompts, strict=True):
        tokens, gaps = reference.generate(prompt, fleet.num_tokens)
        found = fleet.tokens[request.request_id]
        check_tokens(fleet.under_test, f"{label} {request.request_id}", prompt, found, tokens, gaps, fleet.tally)
    return fleet.tally
