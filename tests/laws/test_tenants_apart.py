"""Law 11 as tenants meet it, and their shares of the pool: what one asks is not another's, nor its loss.

On the checking executor, so a block that crossed the border would also be read with the wrong content. What a tenant
may learn of another is tested as non-interference: B's schedule, step by step, is the same whether A has sent B's very
prompts or others of the same shape. That leaves load, which is not hidden: the second world is as busy as the first.
"""

import random
from typing import NamedTuple

import pytest
from checking import executor_of, expected_tokens, make_engine, make_request, run

from headstart.core.engine import Engine
from headstart.core.request import DEFAULT_RETENTION, CacheMode, Request, RetentionHint, SamplingParams

KEEP_MOST = RetentionHint(100, 86400.0)
EVICTION = pytest.mark.parametrize("eviction_policy", ["lru", "2q"])


class Tenant(NamedTuple):
    """A tenant as the server makes it: a label, and a secret domain."""

    name: str
    domain: bytes

    def ask(self, request_id: str, prompt: "list[int] | range", max_tokens: int = 1, **fields: object) -> Request:
        values: dict[str, object] = {"tenant": self.name, "domain": self.domain, **fields}
        return make_request(request_id, prompt, max_tokens, **values)

    def salted(self, salt: bytes) -> "Tenant":
        """The same tenant in a narrower domain."""
        return Tenant(self.name, self.domain + b"/" + salt)


A, B = Tenant("a", b"domain of a"), Tenant("b", b"domain of b")


def cached(engine: Engine, *requests: Request) -> list[int]:
    """Runs the requests together; how much of each prompt was taken over."""
    for request in requests:
        engine.add_request(request)
    outputs = run(engine)
    for request in requests:
        tokens = [token for output in outputs[request.request_id] for token in output.token_ids]
        assert tokens == expected_tokens(request.prompt, request.sampling.max_tokens), "the answer depends on the cache"
    return [outputs[request.request_id][0].num_cached_tokens for request in requests]


# ---------------------------------------------------------------------------------------------------------- visibility


def test_a_tenant_hits_its_own_earlier_prompts_only() -> None:
    engine = make_engine(64)
    prompt = list(range(33))
    assert cached(engine, A.ask("a1", prompt)) == [0]
    assert cached(engine, A.ask("a2", prompt)) == [32]  # the control: there is something to find
    assert cached(engine, B.ask("b1", prompt)) == [0]
    assert cached(engine, B.ask("b2", prompt)) == [32]
    assert cached(engine, make_request("anyone", prompt)) == [0]


def test_a_salt_only_narrows() -> None:
    engine = make_engine(64)
    prompt = list(range(33))
    assert cached(engine, A.salted(b"s").ask("a1", prompt)) == [0]
    assert cached(engine, A.salted(b"s").ask("a2", prompt)) == [32]
    assert cached(engine, A.ask("a3", prompt)) == [0]
    assert cached(engine, A.salted(b"t").ask("a4", prompt)) == [0]
    assert cached(engine, B.salted(b"s").ask("b1", prompt)) == [0]


def test_twins_of_two_tenants_do_not_wait_for_each_other() -> None:
    prompt = list(range(17))
    alone = make_engine(64)
    assert cached(alone, A.ask("a1", prompt), A.ask("a2", prompt)) == [0, 16]  # the control: one follows the other
    assert len(executor_of(alone).batches[0].chunks) == 1
    engine = make_engine(64)
    assert cached(engine, A.ask("a", prompt), B.ask("b", prompt)) == [0, 0]
    assert len(executor_of(engine).batches[0].chunks) == 2


def test_all_share_a_public_prefix_salted_or_not_and_nothing_behind_it() -> None:
    engine = make_engine(64)
    engine.add_prefix("public", range(16))
    run(engine)
    prompt = [*range(16), *range(50, 67)]
    assert cached(engine, A.ask("a1", prompt)) == [16]
    assert cached(engine, B.ask("b1", prompt)) == [16]
    assert cached(engine, A.ask("a2", prompt)) == [32]
    assert cached(engine, A.salted(b"s").ask("a3", prompt)) == [16]
    assert cached(engine, B.salted(b"s").ask("b2", prompt)) == [16]
    assert cached(engine, A.salted(b"s").ask("a4", prompt)) == [32]


def test_what_is_pinned_for_one_tenant_is_warm_for_it_alone() -> None:
    engine = make_engine(64)
    engine.add_prefix("own", range(16), tenant=B.name, domain=B.domain)
    run(engine)
    prompt = [*range(16), *range(50, 67)]
    assert cached(engine, A.ask("a1", prompt)) == [0]
    assert cached(engine, B.salted(b"s").ask("b1", prompt)) == [0]
    assert cached(engine, B.ask("b2", prompt)) == [16]


def test_a_request_for_prompt_logprobs_reuses_nothing_and_publishes_its_blocks() -> None:
    engine = make_engine(64)
    prompt = A.ask("a", range(33)).prompt
    wanting = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for request_id in ("p1", "p2"):
        engine.add_request(Request(request_id, prompt, wanting, domain=A.domain, tenant=A.name))
        outputs = run(engine)[request_id]
        assert sum(len(output.prompt_logprobs) for output in outputs) == 32
        assert outputs[-1].num_cached_tokens == 0
    assert cached(engine, A.ask("a2", range(33))) == [32]


# ----------------------------------------------------------------------------------------------------- non-interference


def schedule_of_b(seed: int, shift: int, policy: str, eviction_policy: str) -> tuple[list[object], int]:
    """Return all that B observes where A's tokens are B's plus `shift`: chunks of every step, outputs; and evictions.

    Two tenants draw from the same few prefixes, on a pool that is too small for both.
    """
    rng = random.Random(seed)
    limits = {"max_batched_tokens": 40, "max_seqs": 4}
    engine = make_engine(33, policy=policy, eviction_policy=eviction_policy, tenant_floor=0.5, **limits)
    shared = [rng.choices(range(90), k=rng.choice((8, 15, 16, 24))) for _ in range(3)]
    seen: list[object] = []
    for step in range(120):
        if rng.random() < 0.5:
            prompt = [*rng.choice(shared), *rng.choices(range(90), k=rng.randrange(1, 9))]
            tenant, offset = (B, 0) if rng.random() < 0.5 else (A, shift)
            tokens = [token + offset for token in prompt]
            engine.add_request(tenant.ask(f"{tenant.name}{step}", tokens, rng.randrange(1, 6)))
        num_batches = len(executor_of(engine).batches)
        for output in engine.step(float(step)):
            if output.request_id.startswith("b"):
                seen.append((step, output.request_id, output.token_ids, output.num_cached_tokens, output.finish_reason))
        for batch in executor_of(engine).batches[num_batches:]:
            for chunk in batch.chunks:
                if chunk.request_id.startswith("b"):
                    seen.append((step, chunk.request_id, chunk.start, len(chunk.token_ids), chunk.write_from))
        engine.scheduler.pool.check_invariants()
    return seen, engine.scheduler.pool.num_capacity_evictions


@EVICTION
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_what_b_observes_does_not_depend_on_what_a_has_asked(policy: str, eviction_policy: str) -> None:
    evictions = 0
    for seed in range(20):
        (same, evicted), (other, _) = (schedule_of_b(seed, shift, policy, eviction_policy) for shift in (0, 1000))
        assert len(same) > 20
        assert same == other, f"seed {seed}"
        evictions += evicted
    assert evictions > 100  # the pool is contended


# ------------------------------------------------------------------------------------------------------------- shares


def hot_hit_rate(
    *,
    flood: bool,
    floor: float,
    eviction_policy: str,
    hint: RetentionHint = DEFAULT_RETENTION,
    salted: bool = False,
) -> float:
    """Share of B's hot prompt of 8 blocks that is cached, from the third use on, while A fills the pool of 32 between.

    A sends 12 one-off prompts of 8 blocks at once, of which four fill the whole pool.
    """
    engine = make_engine(33, eviction_policy=eviction_policy, tenant_floor=floor, max_batched_tokens=256)
    rng = random.Random(0)
    rates: list[float] = []
    for turn in range(10):
        hot = [*range(32), *rng.choices(range(90), k=3)]
        rates.append(cached(engine, B.ask(f"b{turn}", hot))[0] / 32)
        if flood:
            prompts = [rng.choices(range(1000), k=31) for _ in range(12)]
            tenants = [A.salted(b"%d" % number) if salted else A for number in range(12)]
            asked = enumerate(zip(tenants, prompts, strict=True))
            cached(engine, *(tenant.ask(f"a{turn}-{i}", prompt, retention=hint) for i, (tenant, prompt) in asked))
    return sum(rates[2:]) / len(rates[2:])


@EVICTION
@pytest.mark.parametrize("hint", [DEFAULT_RETENTION, KEEP_MOST], ids=["plain", "hinted"])
@pytest.mark.parametrize("salted", [False, True], ids=["one-domain", "many-salts"])
def test_a_flood_leaves_another_tenants_hot_prefix(eviction_policy: str, hint: RetentionHint, salted: bool) -> None:
    solo = hot_hit_rate(flood=False, floor=0.5, eviction_policy=eviction_policy)
    assert solo == 1.0
    flooded = hot_hit_rate(flood=True, floor=0.5, eviction_policy=eviction_policy, hint=hint, salted=salted)
    assert flooded >= 0.9 * solo


@EVICTION
def test_without_a_floor_the_same_flood_evicts_it(eviction_policy: str) -> None:
    assert hot_hit_rate(flood=True, floor=0.0, eviction_policy=eviction_policy) < 0.5  # the control


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_hints_do_not_evict_another_tenant(floor: float) -> None:
    engine = make_engine(33, tenant_floor=floor)
    hot = list(range(29))
    cached(engine, B.ask("b1", hot, retention=RetentionHint(0, 0.0)))  # 7 blocks of no priority
    for turn in range(3):  # 15 blocks each that A wants to keep most
        cached(engine, A.ask(f"a{turn}", range(200 * turn, 200 * turn + 61), retention=KEEP_MOST))
    assert cached(engine, B.ask("b2", hot)) == [28]


@pytest.mark.parametrize(("hint", "found"), [(DEFAULT_RETENTION, 0), (KEEP_MOST, 28), (RetentionHint(51, 0.0), 28)])
def test_a_hint_keeps_a_prompt_among_those_of_its_own_tenant(hint: RetentionHint, found: int) -> None:
    engine = make_engine(33)
    cached(engine, A.ask("hot", range(29), retention=hint))
    for turn in range(1, 4):  # 24 blocks a turn, of the 25 that the hot prompt leaves
        cached(engine, A.ask(f"cold{turn}", range(200 * turn, 200 * turn + 64 - 1)))
        cached(engine, A.ask(f"cool{turn}", range(2000 * turn, 2000 * turn + 37)))
    assert cached(engine, A.ask("again", range(29))) == [found]


def test_a_read_only_request_takes_over_and_leaves_nothing() -> None:
    engine = make_engine(33)
    assert cached(engine, A.ask("once", range(29), cache=CacheMode.READ_ONLY)) == [0]
    assert engine.scheduler.pool.num_published == 0
    cached(engine, A.ask("kept", range(29)))
    assert cached(engine, A.ask("reads", range(33), cache=CacheMode.READ_ONLY)) == [28]
    assert engine.scheduler.pool.num_published == 7


def test_a_newcomer_gets_its_share_of_a_pool_that_another_has_filled() -> None:
    engine = make_engine(33, tenant_floor=0.5, max_batched_tokens=256)
    for turn in range(4):
        cached(engine, *(A.ask(f"a{turn}-{i}", range(1000 * i, 1000 * i + 31)) for i in range(4)))
    assert cached(engine, B.ask("b1", range(29))) == [0]
    assert cached(engine, *(A.ask(f"again{i}", range(9000 * i, 9000 * i + 31)) for i in range(1, 9))) == [0] * 8
    assert cached(engine, B.ask("b2", range(29))) == [28]
