"""The oracle: greedy tokens of plain Transformers, against the engine with reuse and without (law 10).

A difference is excused only where the reference's two best logits lie within `TIE`; what follows an excused token is
compared again behind the reference's token (teacher forcing), so nothing after a tie goes unchecked.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from headstart.core.batch import RequestStepOutput
from headstart.core.cache.block_store import BlockStore
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineStats
from headstart.core.request import CacheMode, Request, RetentionHint, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.speculation.speculation_config import SpeculationConfig
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import load_model

TIE = 1e-4  # logits
VOCAB = 128


@dataclass
class Tally:
    """The findings of a comparison. `wrong` must stay empty."""

    requests: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)
    preemptions: int = 0
    evictions: int = 0
    cached_tokens: int = 0
    full_pool_steps: int = 0
    promise_skips: int = 0
    adoptions: int = 0
    pinned_tokens: int = 0
    store_tokens: int = 0
    restarts: int = 0
    runs_with_loads: int = 0
    troubles: int = 0  # loads that the store or its double let fail
    corrupt: int = 0  # of what was on disk
    states_read: int = 0  # chunks that began from a state of the pool
    dropped: int = 0  # blocks and pages that were evicted at random
    aborts: int = 0
    accepted: int = 0  # tokens of drafts
    overwritten: int = 0  # blocks that were not written in time

    def add(self, other: "Tally") -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def count(self, stats: EngineStats) -> None:
        """Adds what one engine counted."""
        self.preemptions += stats.counters.num_preemptions
        self.evictions += stats.pool.total_evictions
        self.promise_skips += stats.counters.num_promise_skips
        self.adoptions += stats.counters.num_adoptions
        self.pinned_tokens += stats.counters.pinned_tokens
        self.store_tokens += stats.counters.store_tokens
        self.accepted += stats.counters.num_accepted_tokens


class Reference:
    """Greedy generation by Transformers, eager attention, fp32, one request at a time, with the gap of each choice."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def generate(self, prompt: list[int], num: int) -> tuple[list[int], list[float]]:
        """`num` tokens, and for each the distance of the two best logits."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        gaps = [float(best[0] - best[1]) for step in out.logits for best in [step[0].topk(2).values]]
        return out.sequences[0, len(prompt) :].tolist(), gaps


class EngineUnderTest:
    """Engines over one loaded checkpoint, each with its own pool. With `drafts` some of them guess tokens."""

    def __init__(self, folder: Path, drafts: SpeculationConfig | None = None) -> None:
        self.loaded, self.drafts = load_model(folder, dtype="float32", device="cpu"), drafts

    def state_pages(self, block_size: int) -> int:
        """The blocks that a recurrent state takes."""
        return -(-self.loaded.state_bytes // (block_size * self.loaded.kv_bytes_per_token))

    def build(
        self, num_blocks: int, block_size: int, *, caching: bool, budget: int, max_seqs: int = 8, careless: bool = False
    ) -> Engine:
        """An engine; a `careless` one admits more than its pool will hold."""
        limits = Limits(max_batched_tokens=max(budget, max_seqs), max_seqs=max_seqs, max_model_len=256)
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks,
                block_size,
                limits,
                model=self.loaded.fingerprint,
                enable_prefix_caching=caching,
                state_pages=self.state_pages(block_size),
            )
        )
        for _ in range(200 * careless):
            scheduler.admission.record_output_length(1)
        return Engine(scheduler, ModelRunner(self.loaded, num_blocks=num_blocks, block_size=block_size))

    def build_everything(
        self, num_blocks: int, block_size: int, rng: Random, store: Callable[[ModelRunner], BlockStore] | None = None
    ) -> Engine:
        """An engine with everything switched on that could get a token wrong."""
        max_seqs, align = rng.randint(2, 6), rng.choice([1, block_size, block_size])
        limits = Limits(
            max_batched_tokens=max_seqs + align + rng.choice([4, 24, 80]),
            max_seqs=max_seqs,
            max_model_len=256,
            long_prefill_threshold=rng.choice([0, max(align, 5), max(align, 17)]),
            align=align,
            charge_ceil=rng.random() < 0.5,
        )
        runner = ModelRunner(self.loaded, num_blocks=num_blocks, block_size=block_size)
        opened = store and store(runner)
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks,
                block_size,
                limits,
                model=self.loaded.fingerprint,
                policy=rng.choice(["lpm", "lpm", "priority", "fcfs"]),
                lpm_k=rng.randint(1, 4),
                eviction_policy=rng.choice(["2q", "2q", "lru"]),
                tenant_floor=rng.choice([0.0, 0.3]),
                state_pages=self.state_pages(block_size),
                speculation=self.drafts and rng.choice([self.drafts, None]),
            ),
            store=opened,
        )
        for _ in range(rng.choice([0, 200])):  # admits more than will fit
            scheduler.admission.record_output_length(1)
        return Engine(scheduler, runner, store=opened)


def greedy(request_id: str, prompt: list[int], num: int) -> Request:
    return Request(request_id, array("i", prompt), SamplingParams(temperature=0.0, max_tokens=num))


def prefix_tree(rng: Random, num: int, max_len: int = 60) -> list[list[int]]:
    """Prompts that grow out of each other: exact repeats, extensions, forks inside blocks, and strangers."""
    prompts: list[list[int]] = []
    for _ in range(num):
        kind = rng.random()
        if not prompts or kind < 0.15:
            prompt: list[int] = []
        else:
            stem = rng.choice(prompts)
            prompt = stem if kind < 0.3 else stem[: rng.randint(0, len(stem))]
        if kind >= 0.3 or not prompt:
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))]
        prompts.append(prompt[:max_len])
    return prompts


def thicket(rng: Random, num: int) -> list[list[int]]:
    """Prompts on three long stems, cut here and there: most of what they hold is shared."""
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(24, 50))] for _ in range(3)]
    tails = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))] for _ in range(num)]
    return [(stem := rng.choice(stems))[: rng.choice([9, 17, 24, len(stem), len(stem)])] + tail for tail in tails]


def any_request(request_id: str, prompt: list[int], num: int, rng: Random) -> Request:
    """A greedy request of a random tenant, urgency, cache mode and retention."""
    tenant = rng.choice(["", "", "", "a", "a", "b"])
    return Request(
        request_id,
        array("i", prompt),
        SamplingParams(temperature=0.0, max_tokens=num, prompt_logprobs=0 if rng.random() < 0.05 else None),
        domain=tenant.encode() + rng.choice([b"", b"", b"", b"salt"]),
        tenant=tenant,
        priority=rng.randint(0, 2),
        cache=rng.choice([CacheMode.READ_WRITE] * 6 + [CacheMode.READ_ONLY, CacheMode.BYPASS]),
        retention=rng.choice([RetentionHint(), RetentionHint(), RetentionHint(10), RetentionHint(90, 5.0)]),
    )


def run_staggered(
    engine: Engine, requests: list[Request], rng: Random, tally: Tally, eager: float = 0.5
) -> dict[str, list[int]]:
    """Adds requests at random moments between steps, another one with probability `eager`; the tokens of each."""
    todo, tokens = list(reversed(requests)), {request.request_id: [] for request in requests}
    pool, now = engine.scheduler.pool, 0.0
    while todo or engine.has_work:
        while todo and (not engine.has_work or rng.random() < eager):
            engine.add_request(todo.pop())
        now += rng.random()
        for output in engine.step(now):
            check_output(output)
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                tally.cached_tokens += output.num_cached_tokens
        tally.full_pool_steps += pool.num_free == 0
        pool.check_invariants()
    assert pool.num_free + pool.num_pinned_idle == pool.usable_capacity, "blocks leaked"
    tally.count(engine.stats())
    return tokens


def check_output(output: RequestStepOutput) -> None:
    assert output.error is None, output.error


def compare(folder: Path, seed: int, num_requests: int, num_tokens: int = 6) -> Tally:
    """Runs a random tree with reuse, without, and through Transformers; the tally of it."""
    rng, tally = Random(seed), Tally(requests=num_requests)
    reference, under_test = Reference(folder), EngineUnderTest(folder)
    prompts = prefix_tree(rng, num_requests)
    requests = [greedy(f"r{i}", prompt, num_tokens) for i, prompt in enumerate(prompts)]
    block_size = rng.choice([4, 16])
    tight = -(-(60 + num_tokens) // block_size) + rng.randint(2, 6)  # little more than one request
    engines = {
        "with reuse": under_test.build(
            tight, block_size, caching=True, budget=rng.choice([8, 16, 33, 256]), careless=True
        ),
        "with reuse and room": under_test.build(600, block_size, caching=True, budget=rng.choice([16, 64, 512])),
        "without": under_test.build(600, block_size, caching=False, budget=rng.choice([8, 64, 512])),
    }
    due = [reference.generate(prompt, num_tokens) for prompt in prompts]
    for name, engine in engines.items():
        got = run_staggered(engine, requests, rng, tally)
        for request, prompt, (tokens, gaps) in zip(requests, prompts, due, strict=True):
            label = f"{folder.name} seed {seed} {request.request_id} {name}"
            check_tokens(under_test, label, prompt, got[request.request_id], tokens, gaps, tally)
    return tally


def compare_everything(folder: Path, seed: int, num_requests: int, num_tokens: int = 6) -> Tally:
    """Runs a thicket with promises, k-LPM, 2Q, alignment, caps, pins, tenants, hints and modes all at once, on a
    pool of one to three requests and the pins, against Transformers; the tally of it."""
    rng, tally = Random(seed), Tally(requests=num_requests)
    reference, under_test = Reference(folder), EngineUnderTest(folder)
    prompts = thicket(rng, num_requests)
    block_size, num_blocks, pins = cramped(rng, prompts, num_tokens, under_test.state_pages)
    engine = under_test.build_everything(num_blocks, block_size, rng)
    pin(engine, pins)
    requests = [any_request(f"r{i}", prompt, num_tokens, rng) for i, prompt in enumerate(prompts)]
    got = run_staggered(engine, requests, rng, tally, eager=0.9)
    for request, prompt in zip(requests, prompts, strict=True):
        tokens, gaps = reference.generate(prompt, num_tokens)
        label = f"{folder.name} seed {seed} {request.request_id} everything on"
        check_tokens(under_test, label, prompt, got[request.request_id], tokens, gaps, tally)
    prompt = [rng.randrange(VOCAB) for _ in range(59)]
    tokens, gaps = reference.generate(prompt, num_tokens)
    for request_id, found in run_overtaken(engine, prompt, num_tokens, tally).items():
        label = f"{folder.name} seed {seed} {request_id} everything on"
        check_tokens(under_test, label, prompt, found, tokens, gaps, tally)
    return tally


def run_overtaken(engine: Engine, prompt: list[int], num: int, tally: Tally) -> dict[str, list[int]]:
    """Runs two requests of one prompt; if the first is in mid prefill after a step, the second overtakes it."""
    scheduler, before = engine.scheduler, engine.stats().counters.num_adoptions
    tokens: dict[str, list[int]] = {"slow": [], "racer": []}

    def step() -> None:
        for output in engine.step(scheduler.pool.now + 1.0):
            check_output(output)
            tokens[output.request_id] += output.token_ids

    engine.add_request(greedy("slow", prompt, num))
    step()
    slow = next(iter(scheduler.running), None)
    needed = 2 * -(-(len(prompt) + num) // scheduler.block_size)
    if slow is not None and 0 < slow.num_computed_tokens < len(prompt) and scheduler.pool.num_free >= needed:
        scheduler.running.remove(slow)  # it is not planned for some steps
    else:
        slow = None
    engine.add_request(greedy("racer", prompt, num))
    while slow is not None and not tokens["racer"]:
        step()
    if slow is not None:
        scheduler.running.add(slow)
    while engine.has_work:
        step()
    tally.requests += 2
    tally.adoptions += engine.stats().counters.num_adoptions - before
    return tokens


def cramped(
    rng: Random, prompts: list[list[int]], num_tokens: int, state_pages: Callable[[int], int] = lambda _: 0
) -> tuple[int, int, list[tuple[list[int], str]]]:
    """A block size, the blocks of a pool of one to three requests and the pins, and these: prompt and tenant."""
    block_size = rng.choice([4, 4, 16])
    pins = [(rng.choice(prompts), rng.choice(["", "a"])) for _ in range(2)]
    pins = [(prompt, tenant) for prompt, tenant in pins if len(prompt) >= block_size]
    pinned = sum(len(prompt) // block_size + state_pages(block_size) for prompt, _ in pins)
    needed = -(-(60 + num_tokens) // block_size)
    num_blocks = 1 + max(rng.choice([1, 2, 3]) * needed + pinned, 2 * pinned + 2) + rng.randint(0, 6)
    num_blocks += rng.choice([1, 2, 6]) * state_pages(block_size) if state_pages(block_size) else 0
    return block_size, num_blocks, pins


def pin(engine: Engine, pins: list[tuple[list[int], str]]) -> None:
    for number, (prompt, tenant) in enumerate(pins):
        engine.add_prefix(f"p{number}", prompt, tenant=tenant, domain=tenant.encode())


def check_tokens(
    under_test: EngineUnderTest, label: str, prompt: list[int], got: list[int], due: list[int], gaps: list[float],
    tally: Tally,
) -> None:  # fmt: skip
    for index, (token, expected) in enumerate(zip(got, due, strict=True)):
        if token == expected:
            continue
        if gaps[index] > TIE:
            tally.wrong.append(f"{label}: token {index} is {token}, {expected} is due, gap {gaps[index]:.2g}")
            return
        tally.excused += 1
        rest = len(due) - index - 1
        if rest:  # go on behind the reference's token
            forced = prompt + due[: index + 1]
            engine = under_test.build(64, 16, caching=False, budget=256)
            tokens = run_staggered(engine, [greedy("forced", forced, rest)], Random(0), Tally())["forced"]
            check_tokens(under_test, label, forced, tokens, due[index + 1 :], gaps[index + 1 :], tally)
        return


def corrupted_blocks_noticed(folder: Path, seed: int, cases: int, num_tokens: int = 16) -> float:
    """Share of cases in which one corrupted block of a hit changes the output: the proof that the oracle can see."""
    rng = Random(seed)
    under_test = EngineUnderTest(folder)
    noticed = 0
    for _ in range(cases):
        engine = under_test.build(40, 4, caching=True, budget=256)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(12, 40))]
        clean = run_staggered(engine, [greedy("cold", prompt, num_tokens)], rng, Tally())["cold"]
        engine.add_request(greedy("warm", prompt, num_tokens))
        hit = engine.scheduler.cache.match_prefix(next(iter(engine.scheduler.waiting)))
        victim = rng.choice(hit.block_ids[-3:])  # 12 tokens: inside the smallest window of the tiny models
        stranger = rng.choice([block for block in hit.block_ids if block != victim])
        runner = engine.executor
        assert isinstance(runner, ModelRunner)
        runner.write_block(victim, runner.read_block(stranger))
        noticed += finish(engine) != clean
    return noticed / cases


def finish(engine: Engine) -> list[int]:
    """All tokens that still come out."""
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return tokens
