"""Blocks of all shadows together."""

from io import StringIO

from headstart.gateway.replicas.kv_event_subscriptions import (
    MAX_REPLICA_BLOCKS,
    MAX_TOTAL_BLOCKS,
    MIN_BLOCKS,
    IndexBlockBudget,
)
from headstart.http.logs import ServerLog
from headstart.router.index.approximate_index import MAX_UNKNOWN_BLOCKS


def full() -> IndexBlockBudget:
    """A budget of which all is granted."""
    budget = IndexBlockBudget(ServerLog(StringIO()))
    for number in range(MAX_TOTAL_BLOCKS // MAX_REPLICA_BLOCKS):
        assert budget.grant_blocks(f"large {number}", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS
    return budget


def test_a_replica_is_believed_up_to_a_bound_and_that_is_said_once() -> None:
    told = StringIO()
    budget = IndexBlockBudget(ServerLog(told))
    assert budget.grant_blocks("honest", 400_000) == 400_000 and told.getvalue() == ""
    for _ in range(3):
        assert budget.grant_blocks("liar", 10**9) == MAX_REPLICA_BLOCKS
    assert told.getvalue().count("liar reports 1000000000 blocks") == 1


def test_when_all_is_granted_every_replica_still_gets_a_little() -> None:
    budget = full()
    assert budget.grant_blocks("late", 100_000) == MIN_BLOCKS
    assert budget.grant_blocks("small", 77) == 77
    assert budget.grant_blocks("unknown", 0) == MIN_BLOCKS


def test_a_replica_that_starts_again_or_goes_gives_its_blocks_back() -> None:
    budget = full()
    for _ in range(3):
        assert budget.grant_blocks("large 0", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS
    budget.release("large 0")
    assert budget.grant_blocks("new", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS


def test_an_unknown_size_counts_as_the_largest_it_may_become() -> None:
    budget = full()
    budget.release("large 0")
    assert budget.grant_blocks("unknown", 0) == 0
    assert budget.grant_blocks("new", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS - MAX_UNKNOWN_BLOCKS


def test_growth_is_granted_up_to_half_of_what_is_left_and_to_the_bound_of_one_replica() -> None:
    budget = IndexBlockBudget(ServerLog(StringIO()))
    held = budget.grant_blocks("proven", 1_000)
    assert budget.grow_block_grant("proven", held, 1_500) == 1_500
    assert budget.grow_block_grant("proven", 1_500, 10**9) == MAX_REPLICA_BLOCKS
    assert budget.grow_block_grant("proven", MAX_REPLICA_BLOCKS, 10**9) == MAX_REPLICA_BLOCKS
    assert budget.grow_block_grant("unknown", 1, 10) == 1, "no blocks were granted to it"


def test_however_many_replicas_lie_all_together_stay_within_the_total_and_leave_room() -> None:
    budget = IndexBlockBudget(ServerLog(StringIO()))
    held = {f"liar {number}": budget.grant_blocks(f"liar {number}", 1_000) for number in range(50)}
    for _ in range(20):
        for name in held:
            held[name] = budget.grow_block_grant(name, held[name], 2 * held[name])
    assert sum(held.values()) <= MAX_TOTAL_BLOCKS
    assert budget.grant_blocks("late", 10_000) == 10_000


def test_a_shadow_that_was_replaced_grows_no_more_and_the_grant_of_its_successor_counts() -> None:
    budget = IndexBlockBudget(ServerLog(StringIO()))
    budget.grant_blocks("one", 1_000)
    assert budget.grow_block_grant("one", 1_000, 4_000) == 4_000
    budget.grant_blocks("one", 2_000)  # it was started again
    assert budget.grow_block_grant("one", 4_000, 8_000) == 4_000
    assert budget.grow_block_grant("one", 2_000, 3_000) == 3_000
