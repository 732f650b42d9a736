"""The budget of retries: a share of what is under way, and a few when that is nothing."""

from headstart.gateway.proxy.flow_control import MIN_RETRIES, RetryBudget


def test_a_share_of_the_requests_under_way_may_be_retries() -> None:
    budget = RetryBudget(0.2)
    budget.num_active = 50
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False] and budget.num_refused == 1
    budget.give_back()
    assert budget.take() and not budget.take()


def test_with_few_requests_a_few_retries_are_left() -> None:
    budget = RetryBudget(0.2)
    budget.num_active = 1
    assert [budget.take() for _ in range(MIN_RETRIES + 1)] == [True] * MIN_RETRIES + [False]


def test_none_means_none() -> None:
    budget = RetryBudget(0.0)
    budget.num_active = 100
    assert not budget.take()
