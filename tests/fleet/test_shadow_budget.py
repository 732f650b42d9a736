"""Blocks of all shadows together."""

from io import StringIO

from headstart.fleet.shadow_budget import MAX_REPLICA_BLOCKS, MAX_TOTAL_BLOCKS, MIN_BLOCKS, ShadowBudget
from headstart.router.shadow import MAX_UNKNOWN_BLOCKS
from headstart.server.logs import Log


def full() -> ShadowBudget:
    """A budget of which all is granted."""
    budget = ShadowBudget(Log(StringIO()))
    for number in range(MAX_TOTAL_BLOCKS // MAX_REPLICA_BLOCKS):
        assert budget.grant(f"large {number}", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS
    return budget


def test_a_replica_is_believed_up_to_a_bound_and_that_is_said_once() -> None:
    told = StringIO()
    budget = ShadowBudget(Log(told))
    assert budget.grant("honest", 400_000) == 400_000 and told.getvalue() == ""
    for _ in range(3):
        assert budget.grant("liar", 10**9) == MAX_REPLICA_BLOCKS
    assert told.getvalue().count("liar says it has 1000000000 blocks") == 1


def test_when_all_is_granted_every_replica_still_gets_a_little() -> None:
    budget = full()
    assert budget.grant("late", 100_000) == MIN_BLOCKS
    assert budget.grant("small", 77) == 77
    assert budget.grant("unknown", 0) == MIN_BLOCKS


def test_a_replica_that_starts_again_or_goes_gives_its_blocks_back() -> None:
    budget = full()
    for _ in range(3):
        assert budget.grant("large 0", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS
    budget.release("large 0")
    assert budget.grant("new", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS


def test_a_size_that_nobody_knows_counts_as_the_largest_it_may_become() -> None:
    budget = full()
    budget.release("large 0")
    assert budget.grant("unknown", 0) == 0
    assert budget.grant("new", MAX_REPLICA_BLOCKS) == MAX_REPLICA_BLOCKS - MAX_UNKNOWN_BLOCKS
