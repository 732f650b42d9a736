"""The array of a step of decodes, made from the array of the step before it.

Most steps move every sequence on by one token. What StepPlanner would write is then what it wrote before, but for the
tokens, positions and slots, the end of each row's last item, and blocks that tables were given room for. Every chunk is
compared with the one before; whatever else has changed, the step is planned anew.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headstart.core.batch import Chunk
from headstart.model.cuda.step_plan import ITEM, Ints, PackedStepChunks, StepArrayLayout
from headstart.model.step_inputs import StepInputBounds


class _Row(NamedTuple):
    """One sequence of the last step: its next chunk is compared with this."""

    request_id: str
    start: int
    held: "array[int]"  # its blocks
    table: int  # where they begin in the step's array


class _Moved(NamedTuple):
    """The changes that the next step makes."""

    tokens: list[int]
    before: list[int]
    slots: list[int]
    blocks: list[tuple[int, int]]  # new ones, each after its place in the step's array
    rows: list[_Row]


class SteadyDecodes:
    """The last step of decodes that was planned, and how to go on from it."""

    def __init__(self, bounds: StepInputBounds, split: int) -> None:
        """`split`: keys of a partial result; when a sequence begins another one, the step is planned anew."""
        self._bounds, self._split = bounds, split
        self._rows: list[_Row] = []
        self._memory, self._layout = np.zeros(0, np.int32), StepArrayLayout(0, 0, 0)
        self._last_ends = np.zeros(0, np.intp)

    def pad_block_tables(self, rows: PackedStepChunks) -> PackedStepChunks:
        """Return a step of decodes whose tables have room until each sequence begins another partial result."""
        page = self._bounds.block_size
        pages = np.diff(rows.table_ptr)
        room = (rows.positions // self._split + 1) * self._split // page
        table_ptr = np.concatenate(([0], np.cumsum(np.maximum(room, pages)))).astype(np.int32)
        blocks = np.zeros(table_ptr[-1], np.int32)
        at = np.arange(len(rows.blocks)) + np.repeat(table_ptr[:-1] - rows.table_ptr[:-1], pages)
        blocks[at] = rows.blocks
        return rows._replace(table_ptr=table_ptr, blocks=blocks)

    def remember(self, chunks: Sequence[Chunk], rows: PackedStepChunks, memory: Ints, layout: StepArrayLayout) -> None:
        """Keep a step that was planned from rows with room."""
        page, tables = self._bounds.block_size, layout.total - len(rows.blocks)
        self._memory, self._layout = memory[: layout.total].copy(), layout
        self._rows = [
            _Row(c.request_id, c.start + 1, array("i", c.block_ids[: c.start // page + 1]), tables + int(first))
            for c, first in zip(chunks, rows.table_ptr, strict=False)
        ]
        items = memory[layout.singles_offset : layout.singles_offset + ITEM * layout.num_singles].reshape(-1, ITEM)
        last = np.flatnonzero(np.diff(items[:, 0], append=-1))
        self._last_ends = layout.singles_offset + ITEM * last + 4
        assert len(last) == len(chunks), (len(last), len(chunks))

    def forget(self) -> None:
        """Plan the next step anew."""
        self._rows = []

    def try_build_next_step(
        self, chunks: Sequence[Chunk], previous: Sequence[int]
    ) -> tuple[Ints, StepArrayLayout] | None:
        """Return the array of a step and its layout if it goes on from the step before, else None.

        `previous` are the rows of tokens sampled before, by chunk. The array is valid until the next call.
        """
        found = self._moved(chunks, previous) if len(chunks) == len(self._rows) else None
        if found is None:
            return None
        memory, layout, count = self._memory, self._layout, len(chunks)
        memory[layout.tokens_offset : layout.tokens_offset + count] = found.tokens
        memory[layout.positions_offset : layout.positions_offset + count] += 1
        memory[layout.slots_offset : layout.slots_offset + count] = found.slots
        memory[layout.previous_rows_offset : layout.previous_rows_offset + count] = found.before
        memory[self._last_ends] += 1
        for at, block in found.blocks:
            memory[at] = block
        self._rows = found.rows
        return memory, layout

    def _moved(self, chunks: Sequence[Chunk], previous: Sequence[int]) -> _Moved | None:
        """Return what changes; None if a chunk does not go on from its row, or is out of bounds."""
        num_blocks, page, vocab_size, max_positions = self._bounds
        moved = _Moved([], [], [], [], [])
        for chunk, (request_id, start, held, table) in zip(chunks, self._rows, strict=True):
            ids, (number, inside) = chunk.block_ids, divmod(start, page)
            if (
                chunk.request_id != request_id or chunk.start != start or len(chunk.token_ids) != 1
                or chunk.num_logits != 1 or chunk.write_from > start or chunk.adapter is not None
                or start >= max_positions or start % self._split == 0
                or not isinstance(ids, array) or ids[: len(held)] != held or number >= len(ids)
            ):  # fmt: skip
                return None
            token = chunk.token_ids[0] if chunk.from_previous is None else 0
            block = ids[number]
            if not 0 <= token < vocab_size or not 0 < block < num_blocks:
                return None
            if number == len(held):
                held = held + ids[number : number + 1]
                moved.blocks.append((table + number, block))
            moved.tokens.append(token)
            moved.before.append(-1 if chunk.from_previous is None else previous[chunk.from_previous])
            moved.slots.append(block * page + inside)
            moved.rows.append(_Row(request_id, start + 1, held, table))
        return moved
