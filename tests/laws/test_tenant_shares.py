"""Invariant 12 between tenants: shares of places, blocks and steps, and the order within a tenant as if alone."""

import hashlib
from array import array
from collections import Counter
from random import Random

import pytest
from checking import executor_of, expected_tokens, generate, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import HOT, admissions

from headstart.core.cache.hashing import BlockHash
from headstart.core.engine import Engine
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sched.step_time import LEAST_TOKENS, MaxStepTime, StepTimes
from headstart.core.sched.tenant_shares import TenantShares, TenantStepDemand
from headstart.core.sequence import Sequence
from headstart.core.warm_up import measure_step_times
from headstart.workload.request_record import percentile
from headstart_lab.runners.virtual_time import StepCost, VirtualClock, VirtualExecutor

SCHEDULES = {  # of the code before there were shares
    "fcfs": "bc808877e78c9350",
    "lpm": "0dcfdb286ad788a9",
    "priority": "5c3bd0e22a94139c",
}


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize("tenant", ["", "acme"])
def test_traffic_of_a_single_tenant_is_scheduled_as_before_there_were_shares(policy: str, tenant: str) -> None:
    rng, digest = Random(policy), hashlib.sha256()
    for seed in range(20):
        engine = make_engine(rng.randint(12, 40), policy=policy, max_seqs=3, max_batched_tokens=16, max_model_len=40)
        for number in range(40):
            prompt = [*HOT[: rng.randint(0, 8)], *(rng.randint(0, 3) for _ in range(rng.randint(1, 12)))]
            name = f"{seed}-{number}"
            request = make_request(name, prompt, rng.randint(1, 12), priority=rng.randint(0, 2), tenant=tenant)
            engine.add_request(request)
            for _ in range(rng.randint(0, 3)):
                engine.step()
            if rng.random() < 0.1:
                engine.abort(name)
        run(engine)
        for batch in executor_of(engine).batches:
            chunks = [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in batch.chunks]
            digest.update(repr(chunks).encode())
    assert digest.hexdigest()[:16] == SCHEDULES[policy]


def outputs_of(engine: Engine) -> dict[str, list[int]]:
    return {name: [t for output in found for t in output.token_ids] for name, found in run(engine).items()}


@pytest.mark.parametrize("num", [12, 300])
def test_a_tenant_below_its_share_is_in_the_next_step_whatever_another_sends(num: int) -> None:
    engine = make_engine(400, max_seqs=4, max_batched_tokens=16)
    for number in range(num):
        engine.add_request(make_request(f"h{number}", [number % 90] * 5, 20, tenant="hog"))
    for _ in range(3):
        engine.step()
    assert Counter(seq.request.tenant for seq in engine.scheduler.running) == {"hog": 4}  # the others' part is lent
    engine.add_request(make_request("one", [91] * 5, 3, tenant="one"))
    engine.add_request(make_request("two", [92] * 5, 3, tenant="one"))
    for name in ("one", "two"):
        engine.step()
        assert name in {chunk.request_id for chunk in executor_of(engine).batches[-1].chunks}
    assert Counter(seq.request.tenant for seq in engine.scheduler.running) == {"hog": 2, "one": 2}
    found = outputs_of(engine)
    assert found["h3"][-5:] == expected_tokens([3] * 5, 20)[-5:]  # preempted for it, and as if it had not been
    assert len(found) == num + (2 if "one" in found else 0)


def test_a_tenant_below_its_share_gets_blocks_from_one_above() -> None:
    engine = make_engine(17, max_seqs=8, max_model_len=40, expects_short_outputs=True)
    for number in range(4):
        engine.add_request(make_request(f"h{number}", [number] * 12, 20, tenant="hog"))
    while len(engine.scheduler.running) < 4 or engine.scheduler.pool.num_free > 1:
        engine.step()
    engine.add_request(make_request("one", [91] * 12, 4, tenant="one"))
    engine.step()
    assert "one" in {chunk.request_id for chunk in executor_of(engine).batches[-1].chunks}
    found = outputs_of(engine)
    assert len(found["one"]) + 1 == 5 or found["one"] == expected_tokens([91] * 12, 4)[-len(found["one"]) :]
    assert all(found[f"h{number}"] for number in range(4))


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 3)), min_size=1, max_size=40),
    k=st.integers(1, 5),
    max_seqs=st.integers(3, 7),
)
def test_order_and_bound_of_k_lpm_hold_within_a_tenant_and_none_below_its_share_waits(
    arrivals: list[tuple[str, bool, int]], k: int, max_seqs: int
) -> None:
    engine = make_engine(120, policy="lpm", lpm_k=k, max_seqs=max_seqs, max_batched_tokens=64)
    known: set[str] = set()
    bound: dict[str, int] = {}
    num_admitted = Counter[str]()
    for tenant in "abc":  # a promised block is waited for beyond the bound (law 13)
        generate(engine, make_request(f"{tenant}-seed", [*HOT, 99], tenant=tenant, domain=tenant.encode()))
        known.add(f"{tenant}-seed")
    todo = list(enumerate(arrivals))
    while todo or engine.has_work:
        while todo:
            number, (tenant, is_hot, pause) = todo[0]
            if pause and engine.has_work:
                todo[0] = (number, (tenant, is_hot, pause - 1))
                break
            todo.pop(0)
            name = f"{tenant}{number}"
            prompt = [*HOT, 100 + number] if is_hot else [1_000 + number] * 5
            waiting = Counter(seq.request.tenant for seq in engine.scheduler.waiting)
            bound[name] = num_admitted[tenant] + k * (waiting[tenant] + 1)
            request = make_request(name, prompt, 1 + number % 3, tenant=tenant, domain=tenant.encode())
            engine.add_request(request)
        scheduler = engine.scheduler
        waiting = Counter(seq.request.tenant for seq in scheduler.waiting if seq.num_preemptions == 0)
        running = Counter(seq.request.tenant for seq in scheduler.running)
        num_tenants = len(waiting | running)
        in_debt = scheduler.tenants._owed.keys() & set(waiting)
        engine.step()
        planned = Counter(chunk.request_id[0] for chunk in executor_of(engine).batches[-1].chunks)
        for tenant in waiting:
            if running[tenant] < max_seqs // num_tenants and tenant not in in_debt:
                assert planned[tenant], f"{tenant} is below its share and waits"
        for request_id in admissions(engine, known):
            num_admitted[request_id[0]] += 1
            assert num_admitted[request_id[0]] <= bound[request_id], f"{request_id} was overtaken too often"
    assert num_admitted.total() == len(arrivals)


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 12), st.integers(1, 16), st.integers(0, 2)),
        min_size=2,
        max_size=24,
    ),
    num_blocks=st.integers(8, 24),
    policy=st.sampled_from(["fcfs", "priority", "lpm"]),
    max_seqs=st.integers(1, 6),
)
def test_requests_of_all_tenants_finish_in_any_pool(
    shapes: list[tuple[str, int, int, int]], num_blocks: int, policy: str, max_seqs: int
) -> None:
    limits = {"max_model_len": 28, "max_seqs": max_seqs, "max_batched_tokens": 16}
    engine = make_engine(num_blocks, policy=policy, expects_short_outputs=True, **limits)
    requests = [
        make_request(f"{tenant}{number}", [number] * length, max_tokens, tenant=tenant, priority=number % 2)
        for number, (tenant, length, max_tokens, _) in enumerate(shapes)
    ]
    for request, (_, _, _, pause) in zip(requests, shapes, strict=True):
        engine.add_request(request)
        for _ in range(pause):
            engine.step()
    run(engine, 3_000)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


LLAMA_100M = StepCost(step=0.012, token=0.00038)  # as of headstart_lab/engine/fairness.py
SMOLLM2 = StepCost(step=0.004, token=0.0011)  # the least chunk of a prompt takes as long as four decode steps


def p50_beside(
    num_connections: int,
    cost: StepCost,
    *,
    prompt: int = 100,
    output: int = 32,
    hog_output: int = 64,
    answers: int = 15,
) -> float:
    """Return the median duration of a tenant's requests beside another with that many connections in a loop."""
    clock, max_len = VirtualClock(), 1024
    limits = Limits(2048, 64, max_len, max_step_time=MaxStepTime())
    scheduler = Scheduler(SchedulerConfig(6000, 16, limits, policy="lpm"))
    executor = VirtualExecutor(6000, 16, 1000, cost, clock)
    engine = Engine(scheduler, executor)
    measure_step_times(executor, scheduler.step_times, max_tokens=max_len)
    rng, sent = Random(7), Counter[str]()

    def send(tenant: str) -> str:
        sent[tenant] += 1
        name = f"{tenant}{sent[tenant]}"
        tokens = [rng.randint(0, 999) for _ in range(prompt if tenant == "one" else rng.randint(50, 400))]
        engine.add_request(make_request(name, tokens, output if tenant == "one" else hog_output, tenant=tenant))
        return name

    for _ in range(num_connections):
        send("hog")
    while num_connections and clock.now() < 5.0:
        for output_ in engine.step(clock.now()):
            if output_.finish_reason is not None:
                send("hog")
    times: list[float] = []
    mine, began = send("one"), clock.now()
    while len(times) < answers:
        for output_ in engine.step(clock.now()):
            if output_.finish_reason is None:
                continue
            if output_.request_id == mine:
                times.append(clock.now() - began)
                mine, began = send("one"), clock.now()
            else:
                send("hog")
    return percentile(times, 50)


@pytest.mark.parametrize("cost", [LLAMA_100M, SMOLLM2], ids=["llama-100m", "smollm2-135m"])
@pytest.mark.parametrize("num", [12, 300])
@pytest.mark.parametrize("hog_output", [1, 64])
def test_a_tenant_beside_many_connections_waits_at_most_three_times_as_long_as_alone(
    num: int, hog_output: int, cost: StepCost
) -> None:
    assert p50_beside(num, cost, hog_output=hog_output) <= 3 * p50_beside(0, cost)


def shares_of(decode: float, token: float, *tenants: str, two_decodes: float = 0.0) -> TenantShares:
    """Shares of tenants with a request each; seconds of one decode, and of one more prompt token, are known."""
    times = StepTimes(MaxStepTime())
    times.learn(0, 1, decode)
    times.learn(0, 2, two_decodes)  # 0: not known
    times.learn(LEAST_TOKENS, 0, LEAST_TOKENS * token)
    shares = TenantShares(Limits(2048, 64, 1024), 100, times)
    for tenant in tenants:
        request = make_request(tenant, [1], tenant=tenant)
        shares.on_arrived(Sequence(request, array("i", [1]), BlockHash(b""), BlockHash(b"")))
    return shares


@settings(max_examples=100, deadline=None)
@given(
    token=st.floats(1e-5, 0.1),
    decode=st.floats(1e-3, 0.2),
    steps=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(0, 20), st.integers(0, 300)), max_size=30
    ),
)
def test_a_tenant_beside_decodes_is_never_ahead_of_its_time_by_more_than_the_least_chunk(
    token: float, decode: float, steps: list[tuple[int, int, int, int]]
) -> None:
    shares, alone, taken = shares_of(decode, token, "one", "hog"), 0.0, 0.0
    for num_decodes, num_prompt_tokens, *hog in steps:
        demands = {"one": TenantStepDemand(num_decodes, num_prompt_tokens), "hog": TenantStepDemand(*hog)}
        found = shares.step_shares(demands, 2)
        assert found["one"].num_prompt_tokens or not num_prompt_tokens or "one" in shares._owed
        alone += decode + token * num_prompt_tokens
        taken += token * found["hog"].num_prompt_tokens
        assert taken <= (alone + LEAST_TOKENS * token) * (1 + 1e-9)


def test_a_prompt_beside_rows_that_take_as_long_as_a_step_each_goes_on() -> None:
    shares = shares_of(0.01, 0.001, "one", "two", two_decodes=0.05)
    steps = [
        shares.step_shares({"one": TenantStepDemand(1, 300), "two": TenantStepDemand(1, 0)}, 1)["one"]
        for _ in range(40)
    ]
    assert sum(share.num_prompt_tokens for share in steps) >= 10 * LEAST_TOKENS


def test_tenants_that_all_owe_time_get_a_step_nevertheless() -> None:
    shares = shares_of(0.001, 0.1, "one", "two")
    assert shares.step_shares({"one": TenantStepDemand(1, 0), "two": TenantStepDemand(0, 300)}, 1)[
        "two"
    ].num_prompt_tokens
    assert shares.step_shares({"one": TenantStepDemand(0, 300), "two": TenantStepDemand(1, 0)}, 1)[
        "one"
    ].num_prompt_tokens
    found = shares.step_shares({"one": TenantStepDemand(0, 2), "two": TenantStepDemand(0, 1)}, 2)
    assert found["one"].num_prompt_tokens or found["two"].num_prompt_tokens


def test_places_that_a_tenant_does_not_use_are_lent() -> None:
    engine = make_engine(120, max_seqs=4)
    engine.add_request(make_request("one", [91] * 5, 30, tenant="one"))
    for number in range(8):
        engine.add_request(make_request(f"h{number}", [number] * 5, 20, tenant="hog"))
    for _ in range(3):
        engine.step()
    assert Counter(seq.request.tenant for seq in engine.scheduler.running) == {"hog": 3, "one": 1}


def test_tokens_of_prompts_are_divided_evenly_and_what_one_does_not_want_is_lent() -> None:
    engine = make_engine(400, max_seqs=4, max_batched_tokens=64, max_model_len=700)
    engine.add_request(make_request("long", [1] * 600, 1, tenant="hog"))
    engine.add_request(make_request("more", [2] * 600, 1, tenant="one"))
    engine.add_request(make_request("short", [3] * 9, 1, tenant="two"))
    engine.step()
    (batch,) = executor_of(engine).batches
    planned = {chunk.request_id: len(chunk.token_ids) for chunk in batch.chunks}
    assert planned["short"] == 9 and sum(planned.values()) == 64
    assert abs(planned["long"] - planned["more"]) <= 16
    generate(engine)
