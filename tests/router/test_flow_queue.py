"""FairQueue: each tenant gets its share of uncached tokens, whatever it sends; each request is sent once or removed."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.router.flow_queue import QUANTUM, FairQueue, WaitingRequest


def popped(queue: FairQueue) -> WaitingRequest:
    found = queue.pop()
    assert found is not None
    return found


@given(st.integers(0, 2**32))
def test_every_request_is_sent_once_unless_it_is_removed(seed: int) -> None:
    rng, queue = Random(seed), FairQueue()
    waiting, sent = set[WaitingRequest](), list[WaitingRequest]()
    for _ in range(80):
        act = rng.random()
        if act < 0.5:
            waiting.add(queue.add(rng.choice("abc"), rng.randrange(-1, 2), rng.choice((0, 5, 3000))))
        elif act < 0.65 and waiting:
            gone = rng.choice(sorted(waiting))
            queue.remove(gone)
            queue.remove(gone)
            waiting.remove(gone)
        elif (request := queue.pop()) is not None:
            waiting.remove(request)
            sent.append(request)
        assert queue.num_waiting == len(waiting) and queue.num_tokens == sum(one.cost for one in waiting)
    while (request := queue.pop()) is not None:
        waiting.remove(request)
    assert not waiting and queue.num_waiting == queue.num_tokens == 0


def test_in_a_tenant_smaller_priorities_go_first_and_equal_ones_in_order() -> None:
    queue = FairQueue()
    later, first, second, urgent = (queue.add("a", priority, 8) for priority in (5, 0, 0, -1))
    assert [popped(queue) for _ in range(4)] == [urgent, first, second, later]


def test_a_priority_moves_no_request_past_those_of_another_tenant() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.add("greedy", -100, 100)
    queue.add("modest", 0, 100)
    assert "modest" in [popped(queue).tenant for _ in range(2)]


@pytest.mark.parametrize("seed", range(5))
def test_tenants_that_always_wait_get_equal_numbers_of_tokens(seed: int) -> None:
    """One sends many small requests, one few large ones, one both."""
    rng, queue = Random(seed), FairQueue()
    costs = {"small": (1, 20), "large": (5_000,), "both": (1, 300, 5_000)}
    sent = dict.fromkeys(costs, 0)
    for tenant, choices in costs.items():
        for _ in range(2):
            queue.add(tenant, 0, rng.choice(choices))
    for _ in range(3_000):
        request = popped(queue)
        sent[request.tenant] += request.cost
        queue.add(request.tenant, 0, rng.choice(costs[request.tenant]))
        assert max(sent.values()) - min(sent.values()) <= 2 * (QUANTUM + 5_000)


@pytest.mark.parametrize(("own", "others"), [(2_000, 2_000), (500, 500), (2_000, 500), (30, 30)])
def test_with_twenty_clients_of_another_tenant_the_median_is_at_most_twice_that_of_one_alone(
    own: int, others: int
) -> None:
    """A server that computes one request after the other; times are in tokens that it has computed."""
    queue, clock, times = FairQueue(), 0, list[int]()
    for _ in range(20):
        queue.add("big", 0, others)
    mine, arrived = queue.add("small", 0, own), 0
    while len(times) < 51:
        request = popped(queue)
        clock += request.cost
        if request is mine:
            times.append(clock - arrived)
            clock += others // 2  # it thinks for a moment, in which another request begins
            arrived = clock
            mine = queue.add("small", 0, own)
        else:
            queue.add("big", 0, others)
    assert sorted(times)[25] <= 2 * own
