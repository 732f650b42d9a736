"""The two eviction orders by themselves, and what every one of them must do."""

from collections.abc import Callable

import pytest

from headstart.core.cache.eviction import HOT, EvictionOrder, TwoQueueOrder
from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.model.kernels.compiled_blocks import compiled_block_loops

MakeOrder = Callable[[], EvictionOrder]
MakeTwoQueue = Callable[..., tuple[EvictionOrder, bytearray]]
COMPILED = "2q, compiled"


@pytest.fixture(params=[*sorted(EVICTION_POLICIES), COMPILED])
def make(request: pytest.FixtureRequest) -> MakeOrder:
    if request.param == COMPILED:
        return lambda: _compiled(bytearray(32), 8)
    return lambda: EVICTION_POLICIES[request.param](bytearray(32), 8)


@pytest.fixture(params=["2q", COMPILED])
def two_queue(request: pytest.FixtureRequest) -> "MakeTwoQueue":
    def make(max_protected: int = 8) -> tuple[EvictionOrder, bytearray]:
        marks = bytearray(32)
        return (TwoQueueOrder if request.param == "2q" else _compiled)(marks, max_protected), marks

    return make


def _compiled(marks: bytearray, max_protected: int) -> EvictionOrder:
    ops = compiled_block_loops()
    if ops is None:
        pytest.skip("no compiler")
    return ops.two_queue_factory(marks, len(marks))(max_protected)


def drain(order: EvictionOrder) -> list[int]:
    return [order.pop_victim() for _ in range(len(order))]


def test_first_come_first_evicted_while_nothing_is_used_again(make: MakeOrder) -> None:
    order = make()
    order.add_chain([3, 2, 1])
    order.add_chain([5, 4])
    assert list(order) == [3, 2, 1, 5, 4] and 2 in order and 9 not in order
    assert drain(order) == [3, 2, 1, 5, 4] and len(order) == 0


def test_draining_to_empty_and_refilling_works(make: MakeOrder) -> None:
    order = make()
    for _ in range(3):
        order.add_chain([2, 1])
        assert drain(order) == [2, 1]
    with pytest.raises(KeyError):
        order.pop_victim()


def test_taking_one_out_of_the_middle_keeps_the_order_of_the_rest(make: MakeOrder) -> None:
    order = make()
    order.add_chain([4, 3, 2, 1])
    order.remove(3)
    assert list(order) == [4, 2, 1] and len(order) == 3
    with pytest.raises(KeyError):
        order.remove(3)
    with pytest.raises(KeyError):
        order.remove_for_reuse([9])


def test_what_is_used_again_goes_last(make: MakeOrder) -> None:
    order = make()
    order.add_chain([2, 1])
    order.add_chain([4, 3])
    order.remove_for_reuse([1, 2])
    order.add_chain([2, 1])
    assert drain(order) == [4, 3, 2, 1]


def test_used_again_survives_any_number_used_once(two_queue: MakeTwoQueue) -> None:
    order, _ = two_queue()
    order.add_chain([2, 1])
    order.remove_for_reuse([1, 2])
    order.add_chain([2, 1])
    for block in range(10, 30):
        order.add_chain([block])
        assert order.pop_victim() == block


def test_heat_spreads_from_the_tail_of_a_chain_to_its_head(two_queue: MakeTwoQueue) -> None:
    order, marks = two_queue()
    marks[2] = HOT  # the middle of a chain 1-2-3: each use of it used 1 too
    assert order.add_chain([3, 2, 1]) == HOT
    assert list(order) == [3, 2, 1] and marks[1] & HOT and not marks[3] & HOT
    order.add_chain([4])
    assert drain(order) == [3, 4, 2, 1]


def test_heat_comes_in_from_a_part_of_the_chain_that_was_added_before(two_queue: MakeTwoQueue) -> None:
    order, marks = two_queue()
    assert order.add_chain([1], HOT) == HOT and marks[1] & HOT
    assert order.add_chain([2]) == 0


def test_too_many_protected_blocks_go_back_on_probation_tails_first(two_queue: MakeTwoQueue) -> None:
    order, marks = two_queue(max_protected=2)
    order.add_chain([4, 3, 2, 1], HOT)
    assert [bool(marks[block] & HOT) for block in (4, 3, 2, 1)] == [False, False, True, True]
    order.add_chain([5])
    assert drain(order) == [4, 3, 5, 2, 1]


def test_one_that_was_demoted_is_protected_again_when_it_is_used_again(two_queue: MakeTwoQueue) -> None:
    order, marks = two_queue(max_protected=1)
    order.add_chain([2, 1], HOT)
    order.remove_for_reuse([2])
    order.add_chain([2])
    assert marks[2] & HOT and not marks[1] & HOT and drain(order) == [1, 2]


def test_nothing_is_protected_from_the_last_resort_of_an_empty_probation(two_queue: MakeTwoQueue) -> None:
    order, _ = two_queue()
    order.add_chain([2, 1], HOT)
    assert drain(order) == [2, 1]
