"""PrefixTree: the published blocks of a pool as a tree of runs, for people to look at. Pure.

A run is a chain of blocks without a branch that all have the same owner, users and state. Where prompts diverge, a run
ends and its children begin. Only the largest subtrees are kept if there are too many runs.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

COLUMNS = ("id", "parent", "tokens", "subtree_tokens", "users", "state", "pinned", "tenant", "text")
STATES = ("in_use", "reused", "cached")  # a run that is neither in use nor pinned may be evicted


class TreeBlock(NamedTuple):
    """A published block. `key` and `parent` are hashes, or the beginnings of hashes."""

    block: int
    key: bytes
    parent: bytes
    num_users: int
    is_pinned: bool
    is_reused: bool
    tenant: str

    @property
    def usage_state(self) -> str:
        """One of STATES."""
        return "in_use" if self.num_users else "reused" if self.is_reused else "cached"


class BlockRun(NamedTuple):
    """A chain of blocks without a branch; counts in blocks. `parent`: the index of another run, -1: none."""

    first: TreeBlock
    parent: int
    num_blocks: int
    num_subtree_blocks: int


class PrefixTree:
    """The tree of some blocks: their runs in preorder. A block whose parent is not among them is a root."""

    def __init__(self, blocks: Sequence[TreeBlock]) -> None:
        self._blocks = blocks
        self.runs: list[BlockRun] = []
        self._children: list[list[int]] = [[]]  # of each run, then of the root
        self._build()

    @property
    def num_blocks(self) -> int:
        """The number of blocks in all runs."""
        return sum(self.runs[index].num_subtree_blocks for index in self._children[-1])

    def largest_runs(self, max_runs: int) -> list[BlockRun]:
        """Return at most `max_runs` runs in preorder, those with the largest subtrees, with the parents of each."""
        order = [(-self.runs[index].num_subtree_blocks, index) for index in self._children[-1]]
        heapq.heapify(order)
        chosen: list[int] = []
        while order and len(chosen) < max_runs:
            _, index = heapq.heappop(order)
            chosen.append(index)
            for child in self._children[index]:
                heapq.heappush(order, (-self.runs[child].num_subtree_blocks, child))
        chosen.sort()
        places = {index: place for place, index in enumerate(chosen)}
        return [self.runs[index]._replace(parent=places.get(self.runs[index].parent, -1)) for index in chosen]

    def _build(self) -> None:
        blocks = self._blocks
        index = {block.key: number for number, block in enumerate(blocks)}
        children: dict[int, list[int]] = {}
        for number, block in enumerate(blocks):
            children.setdefault(index.get(block.parent, -1), []).append(number)
        order = _preorder(children)
        sizes = [1] * len(blocks)
        for number in reversed(order):
            parent = index.get(blocks[number].parent, -1)
            if parent >= 0:
                sizes[parent] += sizes[number]
        for below in children.values():
            below.sort(key=lambda number: (-sizes[number], blocks[number].key))
        run_of: dict[int, int] = {-1: -1}
        found: list[list[int]] = []  # first block, parent, blocks
        for number in _preorder(children):
            above = index.get(blocks[number].parent, -1)
            if above >= 0 and len(children[above]) == 1 and _alike(blocks[above], blocks[number]):
                run_of[number] = run_of[above]
                found[run_of[number]][2] += 1
                continue
            run_of[number] = len(found)
            found.append([number, run_of[above], 1])
        self.runs = [BlockRun(blocks[first], parent, count, sizes[first]) for first, parent, count in found]
        self._children = [[] for _ in range(len(found) + 1)]
        for place, run in enumerate(self.runs):
            self._children[run.parent].append(place)


def _preorder(children: dict[int, list[int]]) -> list[int]:
    """Return the blocks that can be reached from the root, parents first."""
    order: list[int] = []
    stack = list(reversed(children.get(-1, ())))
    while stack:
        number = stack.pop()
        order.append(number)
        stack.extend(reversed(children.get(number, ())))
    return order


def _alike(one: TreeBlock, other: TreeBlock) -> bool:
    return one[3:] == other[3:]
