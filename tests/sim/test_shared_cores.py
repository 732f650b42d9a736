"""Replicas that share the cores of one machine: exact end times of hand-made cases, and no work lost or gained."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.fleets import check_conservation, fleet, profile, replica_of, requests

from headstart.sim.sim_fleet import Act, FleetOptions, SharedCores
from headstart.sim.sim_request import SimRequest

ONE, TWO = (1.0,), (1.0, 1.0)


def ends(speeds: Sequence[float], steps: Sequence[tuple[float, float]]) -> list[float]:
    """Return the end of each step, given as (start, seconds at full speed)."""
    events: list[tuple[float, int, Act]] = []
    found, order = [0.0] * len(steps), count()

    def at(time: float, act: Act) -> None:
        heappush(events, (time, next(order), act))

    cores = SharedCores(speeds, at)

    def start(number: int, now: float) -> None:
        def end(then: float) -> None:
            found[number] = then

        cores.start(steps[number][1], end, now)

    for number, (begin, _) in enumerate(steps):
        at(begin, lambda now, number=number: start(number, now))
    while events:
        time, _, act = heappop(events)
        act(time)
    return found


def test_without_speeds_every_replica_has_its_own_cores() -> None:
    assert ends((), [(0.0, 2.0), (0.0, 2.0), (1.0, 2.0)]) == [2.0, 2.0, 3.0]


def test_steps_share_one_core_equally_from_the_moment_the_second_starts() -> None:
    # alone until 1, half speed each until the second has its second at 3, then alone again
    assert ends(ONE, [(0.0, 4.0), (1.0, 1.0)]) == [5.0, 3.0]


def test_two_cores_are_shared_from_the_third_step_on() -> None:
    assert ends(TWO, [(0.0, 2.0), (0.0, 2.0)]) == [2.0, 2.0]
    assert ends(TWO, [(0.0, 2.0)] * 4) == [4.0] * 4


def test_a_busy_neighbour_slows_a_core() -> None:
    # 1 second alone, then half speed beside the other one
    assert ends((1.0, 0.5), [(0.0, 2.0), (1.0, 1.0)]) == [3.0, 3.0]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=8))
def test_one_core_is_busy_until_all_work_is_done(steps: list[tuple[float, float]]) -> None:
    last = 0.0
    for begin, seconds in sorted(steps):
        last = max(last, begin) + seconds
    found = ends(ONE, steps)
    assert max(found) == pytest.approx(last)
    assert all(end >= begin + seconds - 1e-9 for end, (begin, seconds) in zip(found, steps, strict=True))


def test_requests_on_two_replicas_of_one_core_take_twice_as_long() -> None:
    found = fleet(2, profile(), policy="round-robin", options=FleetOptions(speeds=ONE))
    found.run([SimRequest(0.0, 12, 1, (number, number + 1, number + 2), 4) for number in (1, 50)])
    assert [one.record.finish for one in found.records] == [8.0, 8.0]
    assert {one.replica for one in found.records} == {"r0", "r1"}


def test_a_scheduler_learns_the_step_time_of_shared_cores() -> None:
    found = fleet(2, profile(), policy="round-robin", options=FleetOptions(speeds=ONE))
    found.run([SimRequest(0.0, 16, 1, tuple(range(number, number + 4)), 4) for number in (1, 50)])
    assert replica_of(found).scheduler.step_times.seconds_per_token == pytest.approx(10 / 16)


@given(st.integers(0, 1000), st.sampled_from(["cost", "round-robin"]))
def test_every_request_ends_on_shared_cores(seed: int, policy: str) -> None:
    asked = requests(seed, 20)
    found = fleet(3, profile(noise=0.1), policy=policy, seed=seed, options=FleetOptions(speeds=(1.0, 0.6)))
    found.run(asked)
    check_conservation(found, asked)
    assert all(one.record.ok for one in found.records)
