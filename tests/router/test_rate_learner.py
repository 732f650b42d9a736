from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.router.rate_learner import RateLearner, RateSample, ReplicaSlowdown
from headstart.router.step_rates import STEP_TOKENS, PrefillWork, StepRates
from headstart.sim.profile import REFERENCE, ReplicaProfile
from headstart.sim.profile_file import datasheet_profile
from headstart.sim.step_cost import StepWork


def test_the_last_token_is_computed_even_of_a_cached_prompt() -> None:
    assert PrefillWork.of(100, 100).tokens == PrefillWork.of(100, 99).tokens == 1


def test_every_new_token_meets_those_before_it() -> None:
    assert PrefillWork.of(10, 0).pairs == 10 * 5.0
    assert PrefillWork.of(10, 6).pairs == 4 * 8.0


def test_a_long_prefill_has_several_steps_and_each_carries_the_decodes() -> None:
    rates = StepRates(8.0, 0.5, 0.25, 0.0, 0.0)
    assert rates.prefill_ms(PrefillWork.of(STEP_TOKENS, 0, 4, 8)) == 8.0 + 2.0 + 2.0
    assert rates.prefill_ms(PrefillWork.of(STEP_TOKENS + 1, 0, 4, 8)) == 2 * 12.0


def sample(truth: StepRates, rng: Random, noise: float = 0.05) -> RateSample:
    """A decode of many steps beside some prefills, or a prefill beside some streams, as a fleet sees them."""
    streams, prompt = rng.randrange(1, 24), 10 ** rng.uniform(1.5, 4.0)
    tokens = 0.0 if rng.random() < 0.3 else 10 ** rng.uniform(1, 4.5)
    steps = 10 ** rng.uniform(1, 3) if rng.random() < 0.5 else max(tokens / STEP_TOKENS, 1.0)
    resident = steps * streams * prompt
    found = RateSample(0.0, steps, steps * streams, resident, tokens, tokens * (prompt + tokens / 2))
    return found._replace(ms=found.expected_ms(truth) * rng.uniform(1 - noise, 1 + noise))


TRUTHS = [
    StepRates(8.0, 0.02, 39e-6, 0.0628, 1.5e-6),  # the reference profile
    StepRates(30.0, 1.0, 1e-5, 0.006, 1e-8),
    StepRates(1.0, 0.0, 0.0, 0.1, 0.0),
    StepRates(60.0, 5.0, 2e-3, 4.0, 1e-4),
    StepRates(0.3, 0.01, 1e-6, 0.01, 1e-7),
]


@pytest.mark.parametrize("truth", TRUTHS)
def test_rates_are_found_from_noisy_samples_of_any_machine(truth: StepRates) -> None:
    rng, learner = Random(0), RateLearner()
    for _ in range(400):
        learner.learn(sample(truth, rng))
    assert not learner.is_unreliable and learner.residual < 0.1
    for streams, prompt, tokens in ((8, 2000, 0), (1, 100, 0), (4, 8000, 4096), (20, 500, 64)):
        one = RateSample(0.0, 1.0, streams, streams * prompt, tokens, tokens * prompt)
        assert one.expected_ms(learner.rates) == pytest.approx(one.expected_ms(truth), rel=0.2)


def test_first_tokens_alone_do_not_move_what_they_cannot_tell() -> None:
    """Prefills of one length without streams tell one number; the rest keeps the prior's proportions."""
    learner, prior = RateLearner(), StepRates()
    work = PrefillWork.of(1000, 0)
    for _ in range(500):
        learner.learn(RateSample(2 * prior.prefill_ms(work), 1.0, 0.0, 0.0, work.tokens, work.pairs))
    rates = learner.rates
    assert rates.prefill_ms(work) == pytest.approx(2 * prior.prefill_ms(work), rel=0.01)
    assert rates.step == pytest.approx(2 * prior.step, rel=0.1)
    assert rates.stream == pytest.approx(2 * prior.stream, rel=0.1)


def test_a_fleet_that_becomes_slower_is_noticed() -> None:
    learner = RateLearner(StepRates(1.0, 0.0, 0.0, 0.1, 0.0))
    for ms in [100.0] * 50 + [400.0] * 400:
        learner.learn(RateSample(ms, 1.0, 0.0, 0.0, 1000, 0.0))
    assert learner.rates.prefill_ms(PrefillWork.of(1000, 0)) == pytest.approx(400.0, rel=0.25)


def test_one_pause_is_not_a_rate() -> None:
    learner = RateLearner()
    for ms in [60.0] * 50 + [60_000.0]:
        learner.learn(RateSample(ms, 1.0, 0.0, 0.0, 1000, 0.0))
    assert learner.rates.prefill_ms(PrefillWork.of(1000, 0)) < 75.0


def test_rates_are_doubtful_while_few_samples_or_large_errors() -> None:
    learner, rng = RateLearner(), Random(0)
    for number in range(8):
        assert learner.is_unreliable == (number < 8)
        learner.learn(RateSample(60.0, 1.0, 0.0, 0.0, 1000, 0.0))
    assert not learner.is_unreliable
    for _ in range(200):
        learner.learn(RateSample(60.0 * 10 ** rng.uniform(-1, 1), 1.0, 0.0, 0.0, 1000, 0.0))
    assert learner.is_unreliable
    assert not RateLearner(StepRates()).is_unreliable  # given, and not contradicted


@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.floats(0, 1), st.integers(0, 64), st.floats(0, 1000), st.floats(0, 1e5)),
        max_size=60,
    )
)
def test_rates_are_never_negative_nor_a_longer_prompt_faster(
    samples: list[tuple[int, float, int, float, float]],
) -> None:
    learner = RateLearner()
    for total, share, streams, steps, ms in samples:
        work = PrefillWork.of(total, int(total * share))
        learner.learn(RateSample(ms, steps, steps * streams, steps * streams * total, work.tokens, work.pairs))
    assert min(learner.rates) >= 0.0
    times = [learner.rates.prefill_ms(PrefillWork.of(total, 0)) for total in (1, 100, 10_000)]
    assert times == sorted(times) and times[-1] < float("inf")


# -------------------------------------------------------------------------------------------------------------- pace


def alone(pace: ReplicaSlowdown, now: float) -> float:
    """The factor of a replica among others without samples."""
    return RateLearner().slowdown_versus_fleet(pace, now)


def test_a_slow_replica_gets_a_factor_after_a_few_samples_and_loses_it_as_soon() -> None:
    pace = ReplicaSlowdown()
    for number in range(4):
        pace.learn(2.0, float(number))
    assert alone(pace, 4.0) == pytest.approx(2.0, rel=0.01)
    for number in range(4):
        pace.learn(1.0, 5.0 + number)
    assert alone(pace, 9.0) == 1.0


def test_luck_is_no_slowness() -> None:
    """Law: noise of 20 % never gives a factor of more than 1.5, and seldom any."""
    rng, num_used = Random(0), 0
    pace = ReplicaSlowdown()
    for number in range(2000):
        pace.learn(rng.lognormvariate(0.0, 0.2), float(number))
        num_used += pace.is_used
        assert alone(pace, float(number)) < 1.6
    assert num_used < 100


def test_one_slow_sample_is_no_evidence() -> None:
    pace = ReplicaSlowdown()
    for number in range(20):
        pace.learn(1.0, float(number))
    pace.learn(2.0, 20.0)
    assert alone(pace, 20.0) == 1.0


def test_a_fast_replica_gets_no_factor() -> None:
    pace = ReplicaSlowdown()
    for number in range(20):
        pace.learn(0.3, float(number))
    assert alone(pace, 20.0) == 1.0


def test_a_factor_is_forgotten_without_samples() -> None:
    pace = ReplicaSlowdown()
    for number in range(8):
        pace.learn(4.0, float(number))
    factors = [alone(pace, 8.0 + 60.0 * number) for number in range(5)]
    assert factors == sorted(factors, reverse=True) and factors[0] == pytest.approx(4.0, rel=0.1) and factors[-1] < 1.2


def test_the_prior_is_used_for_decisions_before_there_are_samples_but_nothing_is_measured_by_it() -> None:
    learner = RateLearner()
    assert learner.is_unreliable and not learner.is_contradicted_by_samples


def test_replicas_defer_followers_until_the_opposite_is_seen() -> None:
    learner = RateLearner()
    assert learner.replicas_wait_for_prefix_leader
    for _ in range(8):
        learner.record_follower_deferral(is_later=False)
    assert not learner.replicas_wait_for_prefix_leader
    for _ in range(8):
        learner.record_follower_deferral(is_later=True)
    assert learner.replicas_wait_for_prefix_leader


# ---------------------------------------------------------------------------------------------- pace within a fleet


class Fleet:
    """Replicas that share a learner; each sample teaches the pace of its replica, then the rates, as in load.py."""

    def __init__(self, num: int, learner: RateLearner) -> None:
        self.learner = learner
        self.paces = [ReplicaSlowdown() for _ in range(num)]

    def ran(self, number: int, interval: RateSample, now: float) -> None:
        pace, learner = self.paces[number], self.learner
        if not learner.is_unreliable:
            learner.record_pace_sample(pace, interval.ms / interval.expected_ms(learner.rates), now)
        learner.learn(interval._replace(ms=interval.ms / learner.slowdown_versus_fleet(pace, now)))

    def factors(self, now: float) -> list[float]:
        return [self.learner.slowdown_versus_fleet(pace, now) for pace in self.paces]


def busy_steps(profile: ReplicaProfile, rng: Random) -> RateSample:
    """Eight steps whose time a datasheet's roofline gives, which no five rates do; a noise of 10 % each."""
    total = RateSample(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for _ in range(8):
        streams, prompt = rng.randrange(0, 48), rng.randrange(500, 16_000)
        new = min(rng.choice((0, 200, 2_000, 8_000)), profile.max_batched_tokens)
        work = StepWork(streams, streams * prompt, new, new * (prompt + new / 2))
        ms = 1e3 * profile.cost.seconds(work) * rng.lognormvariate(0.0, 0.1)
        one = RateSample(ms, 1, streams, work.resident, new, work.pairs)
        total = RateSample(*(a + b for a, b in zip(total, one, strict=True)))
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b@l4", "qwen3-32b@2xh100", "llama-3.3-70b@4xh100", "qwen3-30b-a3b@2xh100", "reference"]
)
def test_of_equal_replicas_no_more_than_a_quarter_is_slow(name: str, seed: int) -> None:
    """Law: paces are relative to the fleet, so rates that are too low cannot make all replicas look slow, and stay."""
    profile = REFERENCE if name == "reference" else datasheet_profile(name)
    rng, fleet, num_many = Random(seed), Fleet(8, RateLearner()), 0
    for number in range(600):
        now, busy = 0.05 * number, busy_steps(profile, rng)
        slower = 1.5 if number > 200 else 1.0  # all at once: what they compute costs more than the rates can say
        fleet.ran(rng.randrange(8), busy._replace(ms=slower * busy.ms), now)
        num_many += sum(factor > 1.15 for factor in fleet.factors(now)) > 2
    assert num_many < 40, "while the first replicas have shown it"
    assert max(fleet.factors(30.0)) < 1.3


@given(st.lists(st.lists(st.floats(0.2, 5.0), max_size=12), min_size=1, max_size=16))
def test_at_most_three_quarters_have_a_factor_and_the_slower_ones_the_larger(ratios: list[list[float]]) -> None:
    fleet = Fleet(len(ratios), RateLearner(StepRates()))
    for pace, found in zip(fleet.paces, ratios, strict=True):
        for ratio in found:
            fleet.learner.record_pace_sample(pace, ratio, 1.0)
    factors = fleet.factors(1.0)
    assert min(factors) >= 1.0
    assert sum(factor > 1.0 for factor in factors) <= 3 * sum(map(bool, ratios)) / 4
    in_use = sorted(
        (pace.mean_log_slowdown(1.0), factor) for pace, factor in zip(fleet.paces, factors, strict=True) if pace.is_used
    )
    assert [factor for _, factor in in_use] == sorted(factor for _, factor in in_use)


@given(st.integers(1, 16), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=12))
def test_what_slows_all_replicas_alike_makes_none_of_them_slow(count: int, ratios: list[float]) -> None:
    fleet = Fleet(count, RateLearner(StepRates()))
    for pace in fleet.paces:
        for ratio in ratios:
            fleet.learner.record_pace_sample(pace, ratio, 1.0)
    assert fleet.factors(1.0) == [1.0] * count


def test_the_half_that_is_twice_as_slow_has_a_factor_of_two() -> None:
    rng, fleet = Random(0), Fleet(8, RateLearner())
    for number in range(1200):
        replica = rng.randrange(8)
        interval = sample(TRUTHS[0], rng)
        fleet.ran(replica, interval._replace(ms=interval.ms * (2.0 if replica < 4 else 1.0)), 0.05 * number)
    factors = fleet.factors(60.0)
    assert factors[:4] == pytest.approx([2.0] * 4, rel=0.15) and factors[4:] == [1.0] * 4
