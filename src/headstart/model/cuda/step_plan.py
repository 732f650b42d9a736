"""The work of one step as one int32 array, copied to the device at once: tokens, slots, attention items, block tables.

An item of attention is a set of query tokens and a range of keys. The tokens may belong to many sequences, so a prefix
that they share is read once. Keys of decodes are cut at multiples of a constant counted from position 0, whatever the
batch: a partial result is a function of its own row. Numpy only, no torch: all of it is tested without a device.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
HEADER = 4  # ints at the start: number of singles, number of tiles, offset of the tiles, offset of their entries
ITEM = 7  # ints of an item. Single: token, part, table, first key, end key, first part of its row, number of its parts
#           Tile: first entry, number of entries, table, first key, end key, 0, 0. Entry: token, part (-1: whole result)
_MAX_MERGED_BY_LAST = 32  # parts of a step of one token that a program merges


class PackedStepChunks(NamedTuple):
    """The chunks of a step, packed. A decode is a chunk of one token."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]: where the KV of the token is stored; -1: nowhere
    previous: Ints  # [T]: the row of the previous step whose sampled token this is; -1: `tokens` has it
    indptr: Ints  # [R + 1]: chunk r has the tokens indptr[r] : indptr[r + 1]
    table_ptr: Ints  # [R + 1]: chunk r reads the blocks blocks[table_ptr[r] : table_ptr[r + 1]]
    blocks: Ints


class StepArrayLayout(NamedTuple):
    """Offsets of a step's array. Those up to `singles` depend on `rows`, `merged` and `outputs` alone."""

    rows: int  # tokens, padding included
    merged: int  # rows whose output is merged from parts, padding included
    outputs: int  # selected rows, padding included; 0: all rows are outputs
    num_singles: int = 0
    num_tiles: int = 0
    num_parts: int = 0
    longest: int = 0  # the most parts of a row
    total: int = 0  # ints used

    @property
    def tokens_offset(self) -> int:
        return HEADER

    @property
    def positions_offset(self) -> int:
        return HEADER + pad_int32s_to_16_bytes(self.rows)

    @property
    def slots_offset(self) -> int:
        return HEADER + 2 * pad_int32s_to_16_bytes(self.rows)

    @property
    def previous_rows_offset(self) -> int:
        return HEADER + 3 * pad_int32s_to_16_bytes(self.rows)

    @property
    def merged_tokens_offset(self) -> int:
        return HEADER + 4 * pad_int32s_to_16_bytes(self.rows)

    @property
    def first_part_indices_offset(self) -> int:
        return self.merged_tokens_offset + pad_int32s_to_16_bytes(self.merged)

    @property
    def selected_offset(self) -> int:
        return self.first_part_indices_offset + pad_int32s_to_16_bytes(self.merged + 1)

    @property
    def singles_offset(self) -> int:
        return self.selected_offset + pad_int32s_to_16_bytes(self.outputs)

    @property
    def needs_no_merge_pass(self) -> bool:
        """Whether decodes share no prefix, and one that is alone has few parts: it is merged by its last program."""
        return self.num_tiles == 0 and (self.rows > 1 or self.longest <= _MAX_MERGED_BY_LAST)


class _Tiles:
    """Items of many tokens, collected run by run."""

    def __init__(self, tile: int) -> None:
        self._tile, self._num_entries = tile, 0
        self._items: list[Ints] = []
        self._entries: list[Ints] = []

    def add(self, tokens: Ints, parts: Ints, table: int, begin: int, ends: Ints) -> None:
        """Add tokens that read the keys `[begin, ends)` of one table, cut into tiles; `ends` ascends."""
        firsts = np.arange(0, len(tokens), self._tile, dtype=np.int32)
        items = np.zeros((len(firsts), ITEM), np.int32)
        items[:, 0] = firsts + self._num_entries
        items[:, 1] = np.minimum(self._tile, len(tokens) - firsts)
        items[:, 2], items[:, 3] = table, begin
        items[:, 4] = ends[firsts + items[:, 1] - 1]
        self._items.append(items)
        self._entries.append(np.stack((tokens, parts), 1).astype(np.int32, copy=False))
        self._num_entries += len(tokens)

    def arrays(self) -> tuple[Ints, Ints]:
        """Return the items, most keys first, so that the device is not left waiting for a long one; and entries."""
        if not self._items:
            return np.zeros((0, ITEM), np.int32), np.zeros((0, 2), np.int32)
        items = np.concatenate(self._items)
        return items[np.argsort(items[:, 3] - items[:, 4], kind="stable")], np.concatenate(self._entries)


class StepPlanner:
    """Plans the attention of steps and writes their arrays."""

    def __init__(
        self, *, page: int, group: int, kv_heads: int, processors: int, max_parts: int, split: int = 0, exact: bool
    ) -> None:
        """`group`: query heads of a kv head. `max_parts`: partial results that fit on the device. `split`: keys of a
        partial result; it depends on the model, never on the batch. `exact`: prefills are neither cut nor grouped.
        """
        self.split = split or keys_per_partial_result(kv_heads)
        self._page, self._group, self._kv_heads, self._processors = page, group, kv_heads, processors
        self._max_parts, self._exact = max_parts, exact

    def step_fits(self, step: PackedStepChunks, room: int) -> bool:
        """Return whether the step's partial results fit, and its array in `room` ints. May refuse what just fits."""
        parts, ints = self.max_parts_and_ints(step)
        return parts <= self._max_parts and ints <= room

    def max_parts_and_ints(self, step: PackedStepChunks) -> tuple[int, int]:
        """Return the most partial results and the most ints that the step may need."""
        single = np.diff(step.indptr) == 1
        ends = step.positions[step.indptr[1:] - 1] + 1
        parts = int(np.ceil(ends[single] / self.split).sum())
        count = len(step.tokens)
        ints = 16 * count + (ITEM + 2) * (parts + min(self._max_parts, count * 64)) + len(step.blocks) + 1024
        return parts + (0 if single.all() else self._max_parts // 4), ints  # prefills are cut within a quarter

    def fill(
        self, memory: Ints, step: PackedStepChunks, *, padded: int | None, tile_rows: int, selected: Ints, outputs: int
    ) -> StepArrayLayout:
        """Write the step to `memory` and return where things are.

        `padded`: the number of tokens of a graph, all of which may be merged. `tile_rows`: query rows of a tile.
        `selected`: tokens whose logits are wanted, padded with 0 to `outputs`.
        """
        lengths, starts = np.diff(step.indptr), step.positions[step.indptr[:-1]]
        ends = step.positions[step.indptr[1:] - 1] + 1
        single = lengths == 1
        tile = max(1, tile_rows // self._group)  # tokens of a tile
        groups = self._prefill_groups(step, lengths, starts, tile)
        parted = single | self._few(lengths, ends, tile, groups)
        shared_end = np.zeros(len(lengths), np.int64)  # of a chunk in a group of prefills
        for members, end in groups:
            shared_end[members] = end
        merged_chunks = np.flatnonzero(parted | (shared_end > 0))
        merged_tokens = _ranges(step.indptr[merged_chunks], lengths[merged_chunks])
        parts_of = -(-(step.positions[merged_tokens] + 1) // self.split)
        parts_of[np.repeat(shared_end[merged_chunks] > 0, lengths[merged_chunks])] = 2
        firsts = np.zeros(len(merged_tokens) + 1, np.int32)
        np.cumsum(parts_of, out=firsts[1:])
        first_of = np.zeros(len(lengths), np.int64)  # index into `merged_tokens` of a chunk's first token
        first_of[merged_chunks] = np.cumsum(lengths[merged_chunks]) - lengths[merged_chunks]

        tiles = _Tiles(tile)
        decodes = np.flatnonzero(single)
        base = firsts[first_of[decodes]]
        common = self._share_decodes(step, decodes, base, tiles)
        for members, end in groups:
            tokens = _ranges(step.indptr[members], lengths[members])
            own = _ranges(first_of[members].astype(np.int32), lengths[members])
            tiles.add(tokens, firsts[own], int(step.table_ptr[members[0]]), 0, np.full(len(tokens), end, np.int32))
        for chunk in np.flatnonzero(~single):
            begin, end, table = int(step.indptr[chunk]), int(step.indptr[chunk + 1]), int(step.table_ptr[chunk])
            tokens = np.arange(begin, end, dtype=np.int32)
            keys = step.positions[begin:end] + 1
            first = firsts[first_of[chunk] :][: end - begin]
            if shared_end[chunk]:
                tiles.add(tokens, first + 1, table, int(shared_end[chunk]), keys)
            elif not parted[chunk]:
                tiles.add(tokens, np.full(len(tokens), -1, np.int32), table, 0, keys)
            else:
                for index in range(-(-int(keys[-1]) // self.split)):
                    own = keys > index * self.split  # the others have no such part
                    limits = np.minimum(keys[own], (index + 1) * self.split)
                    tiles.add(tokens[own], (first + index)[own], table, index * self.split, limits)
        return self._write(
            memory, step, (decodes, base, common), tiles.arrays(), merged_tokens, firsts,
            padded=padded, selected=selected, outputs=outputs,
        )  # fmt: skip

    def _write(
        self,
        memory: Ints,
        step: PackedStepChunks,
        singles: tuple[NDArray[np.int64], Ints, NDArray[np.int64]],
        tiles: tuple[Ints, Ints],
        merged_tokens: Ints,
        firsts: Ints,
        *,
        padded: int | None,
        selected: Ints,
        outputs: int,
    ) -> StepArrayLayout:
        items, entries = tiles
        alone = self._singles(step, *singles)
        count = len(step.tokens)
        rows = count if padded is None else padded
        merged = len(merged_tokens) if padded is None else padded
        longest = int(np.diff(firsts).max()) if len(merged_tokens) else 0
        layout = StepArrayLayout(rows, merged, outputs, len(alone), len(items), int(firsts[-1]), longest)
        at_tiles = layout.singles_offset + alone.size
        at_entries = at_tiles + items.size
        at_tables = at_entries + entries.size
        layout = layout._replace(total=at_tables + len(step.blocks))
        alone[:, 2] += at_tables
        items[:, 2] += at_tables
        memory[:HEADER] = len(alone), len(items), at_tiles, at_entries
        for at, values, length, padding in (
            (layout.tokens_offset, step.tokens, rows, 0),
            (layout.positions_offset, step.positions, rows, 0),
            (layout.slots_offset, step.slots, rows, -1),
            (layout.previous_rows_offset, step.previous, rows, -1),
            (layout.merged_tokens_offset, merged_tokens, merged, 0),  # those added have no parts
            (layout.first_part_indices_offset, firsts, merged + 1, firsts[-1]),
            (layout.selected_offset, selected, outputs, 0),
        ):
            memory[at : at + len(values)] = values
            memory[at + len(values) : at + length] = padding
        memory[layout.singles_offset : at_tiles] = alone.reshape(-1)
        memory[at_tiles:at_entries] = items.reshape(-1)
        memory[at_entries:at_tables] = entries.reshape(-1)
        memory[at_tables : layout.total] = step.blocks
        return layout

    def _singles(
        self, step: PackedStepChunks, decodes: NDArray[np.int64], base: Ints, common: NDArray[np.int64]
    ) -> Ints:
        """Return the items of decodes; the first `common` parts of each are computed by tiles."""
        ends = step.positions[step.indptr[decodes]] + 1
        parts = -(-ends // self.split)
        pieces = parts - common
        row = np.repeat(np.arange(len(decodes)), pieces)
        index = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + common[row]
        items = np.empty((len(row), ITEM), np.int32)
        items[:, 0] = step.indptr[decodes][row]
        items[:, 1] = base[row] + index
        items[:, 2] = step.table_ptr[decodes][row]
        items[:, 3] = index * self.split
        items[:, 4] = np.minimum((index + 1) * self.split, ends[row])
        items[:, 5], items[:, 6] = base[row], parts[row]
        return items

    def _share_decodes(
        self, step: PackedStepChunks, decodes: NDArray[np.int64], base: Ints, tiles: _Tiles
    ) -> NDArray[np.int64]:
        """Add tiles of decodes that share leading blocks; return the number of parts they cover of each decode."""
        common = np.zeros(len(decodes), np.int64)
        for members, keys in self._shared(step, decodes):
            common[members] = keys // self.split
            tokens, parts = step.indptr[decodes[members]], base[members]
            table = int(step.table_ptr[decodes[members[0]]])
            for index in range(keys // self.split):
                ends = np.full(len(tokens), (index + 1) * self.split, np.int32)
                tiles.add(tokens, parts + index, table, index * self.split, ends)
        return common

    def _prefill_groups(
        self, step: PackedStepChunks, lengths: Ints, starts: Ints, tile: int
    ) -> list[tuple[NDArray[np.int64], int]]:
        """Return groups of short prefills behind the same leading blocks, with the number of keys they share.

        Alone, each would fill a part of a tile; together they fill tiles, and read these keys once.
        """
        short = np.flatnonzero((lengths > 1) & (lengths < tile) & (starts >= self.split))
        if self._exact or len(short) < 2 or 2 * int(lengths[short].sum()) > self._max_parts // 4:
            return []
        return [(short[members], keys) for members, keys in self._shared(step, short)]

    def _few(
        self, lengths: Ints, ends: Ints, tile: int, groups: list[tuple[NDArray[np.int64], int]]
    ) -> NDArray[np.bool_]:
        """Return which prefills are cut: those with keys enough, if all tiles together are too few for the device."""
        long = lengths > 1
        units = int((-(-lengths // tile) * long).sum()) * self._kv_heads
        parts = int((lengths * -(-ends // self.split) * long).sum())
        few = not self._exact and not groups and 2 * units <= self._processors and parts <= self._max_parts // 4
        return long & few & (ends > self.split)

    def _shared(self, step: PackedStepChunks, chunks: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], int]]:
        """Return groups (indices into `chunks`) whose tables begin with the same blocks, with the keys they share.

        These keys are a multiple of the split, and all before the first token of every member.
        """
        if len(chunks) < 2:
            return []
        heads = step.blocks[step.table_ptr[chunks]]
        order = np.argsort(heads, kind="stable")
        groups: list[tuple[NDArray[np.int64], int]] = []
        for members in np.split(order, np.flatnonzero(np.diff(heads[order])) + 1):
            if len(members) < 2:
                continue
            pages = int(step.positions[step.indptr[chunks[members]]].min()) // self._page
            if pages * self._page < self.split:
                continue
            tables = step.blocks[step.table_ptr[chunks[members]][:, None] + np.arange(pages)]
            same = (tables == tables[0]).all(0)
            pages = pages if same.all() else int(same.argmin())
            if keys := pages * self._page // self.split * self.split:
                groups.append((members, keys))
        return groups


def keys_per_partial_result(kv_heads: int) -> int:
    """Return the keys of a partial result: fewer where few kv heads would leave processors idle."""
    return 256 if kv_heads > 8 else 128


def pad_int32s_to_16_bytes(count: int) -> int:
    """Round up to 16 bytes: Triton compiles a kernel again for a pointer that is aligned otherwise."""
    return -(-count // 4) * 4


def _ranges(begins: Ints, lengths: Ints) -> Ints:
    """Return the numbers [begin, begin + length) of all ranges, one after the other."""
    if not len(lengths):
        return np.zeros(0, np.int32)
    ends = np.cumsum(lengths)
    return (np.arange(ends[-1]) + np.repeat(begins - (ends - lengths), lengths)).astype(np.int32)
