"""Promised blocks (law 13): a burst computes a shared prefix once, under caps, as a tree, whatever request fails.

By hand with blocks of 4 tokens; then by hypothesis, over forests of prompts that all arrive at once.
"""

from checking import executor_of, expected_tokens, generate, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.engine import Engine
from headstart.core.request import CacheMode

BLOCK = 4


def chunks(engine: Engine) -> list[list[tuple[str, int, int]]]:
    """(request, start, n) of every chunk of every step."""
    return [[(c.request_id, c.start, len(c.token_ids)) for c in b.chunks] for b in executor_of(engine).batches]


def prefill_computed(engine: Engine) -> int:
    return engine.scheduler.counters.prefill_tokens


def ideal(prompts: list[list[int]], block: int = BLOCK) -> int:
    """Tokens a perfect cache computes: every whole block once, every tail, and at least one token of each prompt."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for prompt in prompts:
        full = [tuple(prompt[:end]) for end in range(block, len(prompt) + 1, block)]
        known = sum(1 for name in full if name in seen)
        seen.update(full)
        total += max(len(prompt) - known * block, 1)
    return total


def test_twins_wait_one_step_and_take_over_what_the_first_computed() -> None:
    engine = make_engine(num_blocks=40)
    tokens = generate(engine, *(make_request(f"r{i}", [*range(12), 50 + i], 2) for i in range(3)))
    assert chunks(engine)[:2] == [[("r0", 0, 13)], [("r0", 13, 1), ("r1", 12, 1), ("r2", 12, 1)]]
    assert all(tokens[f"r{i}"] == expected_tokens([*range(12), 50 + i], 2) for i in range(3))


def test_a_prefix_is_computed_once_over_many_capped_steps() -> None:
    engine = make_engine(num_blocks=60, long_prefill_threshold=4, max_batched_tokens=16)
    prompts = [[*range(24), 50 + i, 60] for i in range(5)]
    generate(engine, *(make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)))
    assert prefill_computed(engine) == ideal(prompts) == 24 + 5 * 2


def test_skipping_leaves_the_budget_to_others() -> None:
    engine = make_engine(num_blocks=60, max_batched_tokens=20, policy="fcfs")
    engine.add_request(make_request("leader", range(12)))
    engine.add_request(make_request("twin", range(12)))
    engine.add_request(make_request("stranger", range(40, 46)))
    engine.step()
    assert chunks(engine) == [[("leader", 0, 12), ("stranger", 0, 6)]]


def test_a_follower_computes_itself_when_the_leader_is_aborted() -> None:
    engine = make_engine(num_blocks=60, max_batched_tokens=8, max_seqs=4)
    for rid in ("leader", "twin"):
        engine.add_request(make_request(rid, range(20)))
    engine.step()
    assert engine.abort("leader")
    tokens = generate(engine)
    assert tokens["twin"] == expected_tokens(range(20), 1)
    assert prefill_computed(engine) == 20  # 8 of the leader's, adopted


def test_a_follower_computes_itself_when_the_leader_fails() -> None:
    engine = make_engine(num_blocks=60, poison=lambda chunk: chunk.request_id == "leader")
    for rid in ("leader", "twin"):
        engine.add_request(make_request(rid, range(20)))
    outputs = run(engine)
    assert outputs["leader"][-1].error and outputs["twin"][-1].num_cached_tokens == 0
    assert [t for o in outputs["twin"] for t in o.token_ids] == expected_tokens(range(20), 1)


def test_a_running_sequence_adopts_what_another_published_and_drops_its_partly_filled_block() -> None:
    engine = make_engine(num_blocks=60, long_prefill_threshold=6, max_batched_tokens=32)
    engine.add_request(make_request("slow", [*range(20), 50]))
    engine.add_request(make_request("other", [70] * 9))  # so that the cap holds
    engine.step()  # slow has 6 tokens: one block and half of another
    scheduler = engine.scheduler
    (slow,) = (seq for seq in scheduler.running if seq.request_id == "slow")
    assert slow.num_computed_tokens == 6
    partly_filled = slow.block_ids[1]
    engine.add_request(make_request("racer", [*range(20), 51], cache=CacheMode.READ_WRITE))
    scheduler.running.remove(slow)  # for one step it is not planned: the racer overtakes it
    engine.step()
    for _ in range(2):
        engine.step()
    scheduler.running.add(slow)
    outputs = run(engine)["slow"]
    assert scheduler.counters.num_adoptions == 1
    assert partly_filled not in slow.block_ids
    assert list(outputs[0].token_ids) == expected_tokens([*range(20), 50], 1)
    assert outputs[0].breakdown == (0, 0, 0, 14, 7)  # 6 tokens before it was overtaken, and the last one


def test_the_last_token_of_a_prompt_is_a_promise_too() -> None:
    engine = make_engine(num_blocks=60, long_prefill_threshold=15, max_batched_tokens=40)
    for rid in ("leader", "twin"):
        engine.add_request(make_request(rid, range(16)))
    run(engine)
    assert prefill_computed(engine) == 16 + 1


def test_a_single_promised_block_is_waited_for() -> None:
    engine = make_engine(num_blocks=60)
    for i in range(2):
        engine.add_request(make_request(f"r{i}", [*range(4), *[50 + i] * 7]))  # one shared block
    engine.step()
    assert len(chunks(engine)[0]) == 1


def test_one_off_and_bypassing_requests_promise_nothing() -> None:
    for mode in (CacheMode.READ_ONLY, CacheMode.BYPASS):
        engine = make_engine(num_blocks=60)
        for i in range(2):
            engine.add_request(make_request(f"r{i}", range(12), cache=mode))
        engine.step()
        assert len(chunks(engine)[0]) == 2


def test_many_choices_of_one_prompt_compute_it_once() -> None:
    engine = make_engine(num_blocks=60)
    generate(engine, *(make_request(f"r{i}", range(13)) for i in range(8)))
    assert prefill_computed(engine) == 13 + 7


def test_followers_are_told_that_they_followed_and_the_account_adds_up() -> None:
    engine = make_engine(num_blocks=60)
    generate(engine, make_request("before", range(8)))
    for i in range(3):
        engine.add_request(make_request(f"r{i}", [*range(16), 50 + i]))
    breakdowns = {rid: outs[0].breakdown for rid, outs in run(engine).items()}
    assert breakdowns["r0"] is not None and breakdowns["r0"][1:] == (8, 0, 0, 9)
    for rid in ("r1", "r2"):
        assert breakdowns[rid] is not None and breakdowns[rid][1:] == (8, 0, 8, 1)


forests = st.lists(
    st.builds(
        lambda root, branch, leaf: [*range(root * 4), *[100 + branch] * (branch * 4), *leaf],
        st.integers(0, 5), st.integers(0, 3), st.lists(st.integers(200, 201), min_size=1, max_size=6),
    ),
    min_size=1, max_size=10,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    prompts=forests,
    cap=st.sampled_from([0, 4, 5, 8]),
    budget=st.integers(10, 64),
    policy=st.sampled_from(["fcfs", "lpm", "priority"]),
    align=st.sampled_from([1, 4]),
)
def test_a_burst_computes_every_shared_block_once(
    prompts: list[list[int]], cap: int, budget: int, policy: str, align: int
) -> None:
    engine = make_engine(
        200, BLOCK, policy=policy, long_prefill_threshold=cap, align=align,
        max_batched_tokens=max(budget, 10 + align), max_seqs=10, max_model_len=64,
    )  # fmt: skip
    tokens = generate(engine, *(make_request(f"r{i}", prompt, 2) for i, prompt in enumerate(prompts)))
    assert prefill_computed(engine) == ideal(prompts) == engine.scheduler.counters.ideal_tokens
    for i, prompt in enumerate(prompts):
        assert tokens[f"r{i}"] == expected_tokens(prompt, 2)
