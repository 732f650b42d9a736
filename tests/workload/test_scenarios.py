"""Every scenario by its lengths and by what a perfect cache would compute of it."""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from headstart.workload import scenarios
from headstart.workload.jobs import perfect_cache_prefill_tokens
from headstart.workload.scenarios import WorkloadScenario
from headstart.workload.synthetic import RequestShape, random_tokens

VOCAB_SIZE = 32_000
SHAPE = RequestShape(shared=40, own=8, output=3)
EVERY: dict[str, Callable[[Random], WorkloadScenario]] = {
    "rotations": lambda rng: scenarios.token_rotations_scenario(VOCAB_SIZE, rng, count=4, length=33, passes=2),
    "single": lambda rng: scenarios.single_stream_scenario(VOCAB_SIZE, rng, prompt=8, output=3, requests=2),
    "cold": lambda rng: scenarios.cold_ttft_scenario(VOCAB_SIZE, rng, length=20, requests=2),
    "warm": lambda rng: scenarios.warm_ttft_scenario(VOCAB_SIZE, rng, shape=SHAPE, requests=2),
    "prefill": lambda rng: scenarios.prefill_scenario(VOCAB_SIZE, rng, lengths=(10, 20), cached_share=0.5, requests=2),
    "decode": lambda rng: scenarios.concurrent_decode_scenario(VOCAB_SIZE, rng, is_shared=True, streams=3, shape=SHAPE),
    "decode, distinct": lambda rng: scenarios.concurrent_decode_scenario(
        VOCAB_SIZE, rng, is_shared=False, streams=3, shape=SHAPE
    ),
    "shared-prefix": lambda rng: scenarios.shared_prefix_scenario(VOCAB_SIZE, rng, groups=2, prompts=3, shape=SHAPE),
    "twins": lambda rng: scenarios.shared_burst_scenario(VOCAB_SIZE, rng, requests=3, shape=SHAPE),
    "intent": lambda rng: scenarios.intent_recognition_scenario(VOCAB_SIZE, rng, shape=SHAPE, requests=2),
    "poisson": lambda rng: scenarios.poisson_intent_recognition_scenario(
        VOCAB_SIZE, rng, due=(0.5, 1.0), prefix=random_tokens(40, VOCAB_SIZE, rng), shape=SHAPE
    ),
}


def ideals(scenario: WorkloadScenario) -> list[int]:
    """Return the blocks that are new in each phase, given those before it."""
    prompts, totals = [], [0]
    for phase in scenario.phases:
        prompts += [job.prompt for job in phase.jobs]
        totals.append(perfect_cache_prefill_tokens(prompts))
    return [after - before for before, after in pairwise(totals)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rotations", [4 * 33, 4, 4]),
        ("single", [2 * 8]),
        ("cold", [2 * 20]),
        ("warm", [40 + 2 * 8, 2 * 8]),
        ("prefill", [2 * 10, 10, 2 * 5, 2 * 20, 20, 2 * 10]),
        ("decode", [48, 3 * 8]),
        ("decode, distinct", [3 * 48, 3 * 8]),
        ("shared-prefix", [2 * (40 + 3 * 8)]),
        ("twins", [40 + 3 * 8]),
        ("intent", [40 + 2 * 8, 2 * 8]),
        ("poisson", [48, 2 * 8]),
    ],
)
def test_what_there_is_to_compute_in_each_phase(name: str, expected: list[int]) -> None:
    assert ideals(EVERY[name](Random(1))) == expected


@pytest.mark.parametrize("name", EVERY)
def test_one_seed_is_one_set_of_prompts_and_another_seed_shares_nothing_with_it(name: str) -> None:
    first, again, other = (EVERY[name](Random(seed)) for seed in (1, 1, 2))
    assert first == again
    starts = [{job.prompt[:4].tobytes() for phase in s.phases for job in phase.jobs} for s in (first, other)]
    assert not starts[0] & starts[1]


@pytest.mark.parametrize("name", EVERY)
def test_what_prepares_is_not_measured_and_generates_two_tokens(name: str) -> None:
    phases = EVERY[name](Random(1)).phases
    assert any(phase.is_measured for phase in phases)
    assert {job.output for phase in phases if not phase.is_measured for job in phase.jobs} <= {2}


def test_decoding_streams_share_one_prefix_or_have_their_own() -> None:
    for name, distinct in (("decode", 1), ("decode, distinct", 3)):
        jobs = EVERY[name](Random(1)).phases[-1].jobs
        assert len(jobs) == 3 and len({job.prompt[:40].tobytes() for job in jobs}) == distinct


def test_questions_come_in_random_order_when_they_are_due() -> None:
    due = [0.1 * i for i in range(40)]
    scenario = scenarios.shared_prefix_scenario(VOCAB_SIZE, Random(3), groups=2, prompts=20, shape=SHAPE, due=due)
    jobs = scenario.phases[0].jobs
    assert [job.at for job in jobs] == due
    groups = [job.prompt[:40].tobytes() for job in jobs]
    assert groups != sorted(groups) and groups != sorted(groups, reverse=True)


def test_room_for_everything_is_counted_in_whole_blocks() -> None:
    scenario = EVERY["twins"](Random(1))
    assert scenario.longest == 51
    assert scenario.num_blocks_without_sharing(16) == 3 * 4
