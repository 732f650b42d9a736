"""PrefixTree by hand and at random: runs, sizes, bounds, and what a block without its parent becomes."""

from hypothesis import given
from hypothesis import strategies as st

from headstart.page.prefix_tree import PrefixTree, TreeBlock


def block(number: int, parent: int, *, users: int = 0, pinned: bool = False, tenant: str = "") -> TreeBlock:
    return TreeBlock(number, b"%d" % number, b"%d" % parent, users, pinned, False, tenant)


def shape(tree: PrefixTree, max_runs: int = 100) -> list[tuple[int, int, int, int]]:
    return [
        (run.first.block, run.parent, run.num_blocks, run.num_subtree_blocks) for run in tree.largest_runs(max_runs)
    ]


def test_a_chain_is_one_run_and_a_branch_ends_it() -> None:
    tree = PrefixTree([block(1, 0), block(2, 1), block(3, 2), block(4, 3), block(5, 2)])
    assert shape(tree) == [(1, -1, 2, 5), (3, 0, 2, 2), (5, 0, 1, 1)] and tree.num_blocks == 5


def test_users_pins_and_tenants_end_a_run() -> None:
    blocks = [
        block(1, 0, pinned=True),
        block(2, 1, users=2),
        block(3, 2, users=1),
        block(4, 3),
        block(5, 4, tenant="a"),
    ]
    assert [run[2] for run in shape(PrefixTree(blocks))] == [1, 1, 1, 1, 1]


def test_a_block_whose_parent_is_not_there_is_a_root_and_a_cycle_is_left_out() -> None:
    assert shape(PrefixTree([block(7, 6), block(3, 2)])) == [(3, -1, 1, 1), (7, -1, 1, 1)]
    assert shape(PrefixTree([block(1, 2), block(2, 1)])) == []
    assert shape(PrefixTree([])) == []


def test_the_largest_subtrees_are_kept_and_their_sizes_count_what_is_not_shown() -> None:
    tree = PrefixTree([block(1, 0), block(2, 1), block(3, 1), block(4, 3), block(5, 4), block(6, 4), block(7, 0)])
    assert shape(tree, 3) == [(1, -1, 1, 6), (3, 0, 2, 4), (5, 1, 1, 1)]
    assert shape(tree, 1) == [(1, -1, 1, 6)]


def test_a_deep_tree_needs_no_recursion() -> None:
    tree = PrefixTree([block(number, number - 1, users=number) for number in range(1, 20_001)])
    assert len(tree.runs) == 20_000 and tree.largest_runs(2)[1].num_subtree_blocks == 19_999


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 70))
def test_runs_hold_every_block_once_and_parents_come_first(parents: list[int], max_runs: int) -> None:
    blocks = [block(number, min(parent, number - 1)) for number, parent in enumerate(parents, 1)]
    tree = PrefixTree(blocks)
    assert sum(run.num_blocks for run in tree.runs) == tree.num_blocks == len(blocks)
    chosen = tree.largest_runs(max_runs)
    assert len(chosen) == min(max_runs, len(tree.runs))
    for place, run in enumerate(chosen):
        below = [other for other in chosen if other.parent == place]
        assert run.parent < place
        assert sum(other.num_subtree_blocks for other in below) <= run.num_subtree_blocks - run.num_blocks
