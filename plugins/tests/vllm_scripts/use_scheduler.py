"""Checks of the scheduler plug-in against vLLM's own scheduler: use_scheduler.py, in an environment with vLLM.

Prints one JSON object: the name of each check, and null or its error.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from random import Random

from steps import BLOCK, Run, ideal, make_request, make_scheduler, run, run_checks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.request import Request, RequestStatus

from headstart_plugins.vllm import AsyncScheduler, Scheduler

OFF = {"promised_blocks": False, "lpm_k": 1, "page_aligned": False, "max_prefills": 0}
ALL_ON = {"promised_blocks": True, "lpm_k": 8, "page_aligned": True, "max_prefills": 4}
PREFIX = 2_048


def tokens(seed: object, num: int) -> list[int]:
    rng = Random(f"{seed}")
    return [rng.randrange(10, 30_000) for _ in range(num)]


def burst(num: int = 32) -> list[list[int]]:
    """Return prompts behind one new prefix."""
    return [tokens("prefix", PREFIX) + tokens(i, 40) for i in range(num)]


def tree() -> list[list[int]]:
    """Return prompts that branch twice: 4 branches, 8 leaves each."""
    return [
        tokens("root", 1_024) + tokens(f"branch{b}", 512) + tokens(f"leaf{b}.{leaf}", 100)
        for leaf in range(8)
        for b in range(4)
    ]


def requests(prompts: Iterable[Sequence[int]], max_tokens: int = 4) -> list[Request]:
    return [make_request(f"r{i}", prompt, max_tokens=max_tokens, age=i) for i, prompt in enumerate(prompts)]


def mixed(seed: int) -> dict[int, list[Request]]:
    """Return arrivals of prompts with common prefixes, of priorities and lengths, over some steps."""
    rng = Random(seed)
    stems = [tokens(f"stem{seed}.{i}", rng.randrange(1, 40) * 17) for i in range(4)]
    found: dict[int, list[Request]] = {}
    for i in range(60):
        prompt = rng.choice(stems)[: rng.randrange(1, 700)] + tokens(f"tail{seed}.{i}", rng.randrange(1, 300))
        new = make_request(f"r{i}", prompt, max_tokens=rng.randrange(1, 40), priority=rng.randrange(3), age=i)
        found.setdefault(rng.randrange(40), []).append(new)
    return found


def some_aborts(seed: int) -> Callable[[int, VllmScheduler], Iterable[str]]:
    rng = Random(seed)

    def aborts(step: int, scheduler: VllmScheduler) -> Iterable[str]:
        return [f"r{rng.randrange(60)}"] if step % 9 == 8 else []

    return aborts


def check_with_all_off_every_step_is_that_of_vllm() -> None:
    for seed in range(6):
        for policy in ("fcfs", "priority"):
            settings = {"policy": policy, "budget": 300, "cap": 128 * (seed % 2), "num_blocks": 90, "max_seqs": 16}
            runs = [
                run(make_scheduler(cls, options=options, **settings), mixed(seed), aborts=some_aborts(seed))
                for cls, options in ((VllmScheduler, None), (Scheduler, OFF))
            ]
            assert runs[0].steps == runs[1].steps and runs[0].finished == runs[1].finished
            assert any(step["preempted"] for step in runs[0].steps) or policy == "priority", "too easy"


def check_the_asynchronous_one_with_all_off_too() -> None:
    for seed in range(4):
        settings = {"budget": 300, "num_blocks": 200, "max_seqs": 16, "is_async": True}
        runs = [
            run(make_scheduler(cls, options=options, **settings), mixed(seed))
            for cls, options in ((VllmAsyncScheduler, None), (AsyncScheduler, OFF))
        ]
        assert runs[0].steps == runs[1].steps


def check_without_shared_prefixes_promises_change_no_step() -> None:
    prompts = [tokens(i, 100 + 37 * i) for i in range(30)]
    runs = [
        run(make_scheduler(cls, budget=512), {0: requests(prompts[:20], 20), 3: _later(prompts[20:])})
        for cls in (VllmScheduler, Scheduler)
    ]
    assert runs[0].steps == runs[1].steps


def _later(prompts: Iterable[Sequence[int]]) -> list[Request]:
    return [make_request(f"later{i}", prompt, age=100 + i) for i, prompt in enumerate(prompts)]


def check_a_burst_behind_a_new_prefix_computes_it_once() -> None:
    prompts = burst()
    least = ideal(prompts)
    alone, ours = (run(make_scheduler(cls), {0: requests(prompts)}) for cls in (VllmScheduler, Scheduler))
    assert alone.computed > 2.5 * least, alone.computed / least
    assert ours.computed <= 1.05 * least, ours.computed / least
    assert ours.prompt_kv_computed <= 1.05 * least, ours.prompt_kv_computed / least
    assert len(ours.finished) == len(prompts)
    say("burst", alone, ours, least)


def check_trees_of_prefixes_are_computed_once() -> None:
    prompts = tree()
    least = ideal(prompts)
    alone, ours = (run(make_scheduler(cls), {0: requests(prompts)}) for cls in (VllmScheduler, Scheduler))
    assert ours.computed <= 1.05 * least < alone.computed, (ours.computed, alone.computed, least)
    assert len(ours.finished) == len(prompts)
    say("tree", alone, ours, least)


def check_an_aborted_leader_frees_its_followers() -> None:
    """Every third step the oldest running prefill is aborted: what it wrote stays, and another one goes on."""

    def leaders(step: int, scheduler: VllmScheduler) -> Iterable[str]:
        prefills = [r.request_id for r in scheduler.running if r.num_output_tokens == 0]
        return prefills[:1] if step % 3 == 2 and step < 20 else []

    prompts = burst()
    least = ideal(prompts)
    alone, ours = (
        run(make_scheduler(cls), {0: requests(prompts)}, aborts=leaders) for cls in (VllmScheduler, Scheduler)
    )
    assert ours.computed <= 1.05 * least, ours.computed / least
    assert len(ours.finished) >= len(prompts) - 7
    say("aborted leaders", alone, ours, least)


def check_all_requests_finish_with_all_on_in_a_small_pool() -> None:
    for seed in range(8):
        scheduler = make_scheduler(Scheduler, options=ALL_ON, budget=200, cap=64, num_blocks=60, max_seqs=16)
        found = run(scheduler, mixed(seed))
        assert len(found.finished) == 60
        assert not scheduler._inflight_prefills and not scheduler.waiting and not scheduler.deferred_waiting


def check_chunks_end_on_blocks_and_decodes_are_never_cut() -> None:
    options = {"promised_blocks": False, "page_aligned": True}
    prompts = [tokens(i, 700 + i) for i in range(6)]
    scheduler = make_scheduler(Scheduler, options=options, budget=203, cap=0)
    ends: list[int] = []
    schedule = scheduler.schedule

    def watched():
        output = schedule()
        for name, num in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            if request.is_prefill_chunk and num >= BLOCK:
                ends.append(request.num_computed_tokens)
        return output

    scheduler.schedule = watched
    found = run(scheduler, {0: requests(prompts, 30)})
    assert len(found.finished) == 6 and ends
    ragged = [end for end in ends if end % BLOCK]
    assert len(ragged) <= len(ends) // 4, (ragged, ends)  # those cut below one block before


def check_a_budget_below_one_block_does_not_stall() -> None:
    scheduler = make_scheduler(Scheduler, options=ALL_ON, budget=BLOCK - 1, cap=0, max_seqs=8)
    assert len(run(scheduler, {0: requests(burst(4))}).finished) == 4


def check_prefills_at_the_same_time_are_bounded() -> None:
    prompts = [tokens(i, 1_000) for i in range(12)]
    free = run(make_scheduler(Scheduler), {0: requests(prompts)})
    bounded = run(make_scheduler(Scheduler, options={"max_prefills": 2}), {0: requests(prompts)})
    assert free.max_prefills > 2 == bounded.max_prefills and len(bounded.finished) == 12


def check_cached_prefixes_go_first_within_the_bound() -> None:
    """In a pool for one of two prefixes, the requests of the cached one are taken together."""
    stems = [tokens(f"stem{i}", 1_600) for i in range(2)]
    prompts = [stems[i % 2] + tokens(f"t{i}", 20) for i in range(32)]
    settings = {"num_blocks": 75, "max_seqs": 2, "cap": 0}
    computed = [
        run(make_scheduler(Scheduler, options={"lpm_k": k}, **settings), {0: requests(prompts)}).computed
        for k in (1, 8)
    ]
    print(f"order: {computed}", file=sys.stderr)
    assert computed[1] < 0.5 * computed[0], computed


def check_an_order_by_priority_is_not_overruled() -> None:
    try:
        make_scheduler(Scheduler, options={"lpm_k": 8}, policy="priority")
    except ValueError as error:
        assert "--scheduling-policy fcfs" in str(error)
    else:
        raise AssertionError("lpm_k was accepted")


def check_unknown_options_are_refused_at_start() -> None:
    try:
        make_scheduler(Scheduler, options={"promised": True})
    except ValueError as error:
        assert "no option 'promised'" in str(error)
    else:
        raise AssertionError("the option was accepted")


def check_hybrids_are_scheduled_as_by_vllm() -> None:
    prompts = burst(8)
    runs = [run(make_scheduler(cls, is_hybrid=True), {0: requests(prompts)}) for cls in (VllmScheduler, Scheduler)]
    assert runs[0].steps == runs[1].steps


def check_no_request_waits_for_one_that_waits() -> None:
    """A request that is preempted in its prefill writes nothing: another one of the same prefix may go on."""
    scheduler = make_scheduler(Scheduler, num_blocks=400)
    first, second = requests(burst(2))
    scheduler.add_request(first)
    scheduler.schedule()
    assert first.status == RequestStatus.RUNNING
    scheduler.running.remove(first)
    scheduler._preempt_request(first, 0.0)
    scheduler.waiting.remove_request(first)
    scheduler.add_request(second)
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r1"]


def say(name: str, alone: Run, ours: Run, least: int) -> None:
    print(f"{name}: computed over ideal {alone.computed / least:.3f} -> {ours.computed / least:.3f}", file=sys.stderr)


if __name__ == "__main__":
    run_checks(globals(), sys.argv[1:])
