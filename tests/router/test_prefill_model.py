from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.router.prefill_model import PrefillModel, RateLearner, Work


def test_the_last_token_is_computed_even_of_a_cached_prompt() -> None:
    assert Work.of(100, 100).tokens == Work.of(100, 99).tokens == 1


def test_every_new_token_meets_those_before_it() -> None:
    assert Work.of(10, 0).pairs == 10 * 5.0
    assert Work.of(10, 6).pairs == 4 * 8.0


@pytest.mark.parametrize(
    "truth",
    [
        PrefillModel(10.0, 0.05, 5e-7, 0.1),
        PrefillModel(0.0, 2.0, 1e-4, 0.0),
        PrefillModel(30.0, 0.006, 1e-8, 1.0),
        PrefillModel(1.0, 0.1, 0.0, 0.0),
    ],
)
def test_rates_are_found_from_noisy_samples_of_any_machine(truth: PrefillModel) -> None:
    rng, learner = Random(0), RateLearner()
    for _ in range(200):
        total = int(10 ** rng.uniform(1, 4.5))
        work = Work.of(total, int(total * rng.choice((0.0, 0.5, 0.95))), rng.randrange(8))
        learner.learn(work, truth.prefill_ms(work) * rng.uniform(0.95, 1.05))
    for total, cached, streams in ((1000, 0, 2), (8000, 0, 4), (8000, 7500, 4), (20000, 10000, 0)):
        work = Work.of(total, cached, streams)
        assert learner.rates.prefill_ms(work) == pytest.approx(truth.prefill_ms(work), rel=0.2)


def test_a_replica_that_becomes_slower_is_noticed() -> None:
    learner = RateLearner(PrefillModel(1.0, 0.1, 0.0, 0.0))
    work = Work.of(1000, 0)
    for ms in [100.0] * 50 + [400.0] * 50:
        learner.learn(work, ms)
    assert learner.rates.prefill_ms(work) == pytest.approx(400.0, rel=0.25)


def test_one_pause_is_not_a_rate() -> None:
    learner, work = RateLearner(), Work.of(1000, 0)
    for _ in range(50):
        learner.learn(work, 60.0)
    learner.learn(work, 60_000.0)
    assert learner.rates.prefill_ms(work) < 120.0


def test_two_first_tokens_of_one_step_average_out() -> None:
    learner, work = RateLearner(), Work.of(1000, 0)
    for index in range(200):
        learner.learn(work, 120.0 if index % 2 else 0.0)
    assert learner.rates.prefill_ms(work) == pytest.approx(60.0, rel=0.2)


@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 1), st.integers(0, 64), st.floats(0, 1e5)), max_size=60)
)
def test_rates_are_never_negative_nor_a_longer_prompt_faster(samples: list[tuple[int, float, int, float]]) -> None:
    learner = RateLearner()
    for total, share, streams, ms in samples:
        learner.learn(Work.of(total, int(total * share), streams), ms)
    assert min(learner.rates) >= 0.0
    times = [learner.rates.prefill_ms(Work.of(total, 0)) for total in (1, 100, 10_000)]
    assert times == sorted(times) and times[-1] < float("inf")
