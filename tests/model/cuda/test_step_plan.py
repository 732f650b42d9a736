"""Properties of the plan of a step; numpy only."""

from typing import Any

import numpy as np
import pytest

from headstart.model.cuda.step_plan import HEADER, ITEM, PackedStepChunks, StepPlanner

PAGE, ROOM = 16, 1 << 21


def random_rows(random: np.random.Generator, *, decodes_only: bool, longest: int = 700) -> PackedStepChunks:
    """Return chunks, some of which begin with the blocks of the first."""
    count = int(random.integers(1, 9))
    lengths = np.where(random.random(count) < 0.6, 1, random.integers(1, 90, count))
    lengths = np.ones(count, np.int64) if decodes_only else lengths
    starts = random.integers(0, longest, count)
    need = -(-(starts + lengths) // PAGE)
    tables = [np.arange(10000 * row + 1, 10000 * row + 1 + pages) for row, pages in enumerate(need)]
    for row in range(1, count):
        if random.random() < 0.6:
            common = int(random.integers(0, min(starts[0], starts[row]) // PAGE + 1))
            tables[row][:common] = tables[0][:common]
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)
    ends, pages = (np.concatenate(([0], np.cumsum(sizes))).astype(np.int32) for sizes in (lengths, need))
    blocks = np.concatenate(tables).astype(np.int32)
    return PackedStepChunks(positions * 0, positions, positions * 0, positions * 0 - 1, ends, pages, blocks)


def check(
    rows: PackedStepChunks, random: np.random.Generator, *, padded: int | None, exact: bool,
    planner_class: type[StepPlanner] = StepPlanner,
) -> None:  # fmt: skip
    memory = np.full(ROOM, -7, np.int32)
    planner = planner_class(
        page=PAGE, group=int(random.choice([1, 2, 4])), kv_heads=int(random.integers(1, 40)), processors=132,
        max_parts=32768, split=int(random.choice([64, 128])), exact=exact,
    )  # fmt: skip
    assert planner.step_fits(rows, ROOM)
    selected = np.sort(random.choice(len(rows.tokens), random.integers(0, len(rows.tokens) + 1), replace=False))
    layout = planner.fill(
        memory, rows, padded=padded, tile_rows=int(random.choice([16, 64, 128])), selected=selected.astype(np.int32),
        outputs=len(selected) + 3,
    )  # fmt: skip
    firsts = memory[layout.first_part_indices_offset :][: layout.merged + 1]
    merged = memory[layout.merged_tokens_offset :][: layout.merged].tolist()
    seen = [np.zeros(position + 1, np.int32) for position in rows.positions]
    filled = np.zeros(layout.num_parts, np.int32)
    chunk_of = np.repeat(np.arange(len(rows.indptr) - 1), np.diff(rows.indptr))

    def take(token: int, part: int, table: int, begin: int, end: int) -> None:
        keys = np.arange(begin, min(end, rows.positions[token] + 1))
        assert len(keys) > 0
        seen[token][keys] += 1
        own = rows.blocks[rows.table_ptr[chunk_of[token]] :]
        assert (memory[table + keys // PAGE] == own[keys // PAGE]).all()
        if part < 0:
            assert begin == 0 and token not in merged
            return
        at = merged.index(token)
        assert begin % planner.split == 0 and firsts[at] <= part < firsts[at + 1]
        is_decode = np.diff(rows.indptr)[chunk_of[token]] == 1
        if is_decode or exact:  # whatever else is in the step
            assert end - begin <= planner.split and part == firsts[at] + begin // planner.split
        filled[part] += 1

    singles = memory[layout.singles_offset :][: layout.num_singles * ITEM].reshape(-1, ITEM)
    for token, part, table, begin, end, first, num_parts in singles.tolist():
        take(token, part, table, begin, end)
        at = merged.index(token)
        assert (first, num_parts) == (firsts[at], firsts[at + 1] - firsts[at])
    tiles, entries = memory[memory[2] :], memory[memory[3] :]
    for first, count, table, begin, end, *_ in tiles[: layout.num_tiles * ITEM].reshape(-1, ITEM).tolist():
        for token, part in entries[2 * first :][: 2 * count].reshape(-1, 2).tolist():
            take(token, part, table, begin, end)
    assert all((counts == 1).all() for counts in seen)
    assert (filled == 1).all()
    assert memory[:2].tolist() == [layout.num_singles, layout.num_tiles]
    assert (memory[HEADER:][: len(rows.tokens)] == rows.tokens).all()
    assert memory[layout.selected_offset :][: layout.outputs].tolist() == [*selected, 0, 0, 0]
    assert (memory[layout.total :] == -7).all()


@pytest.mark.parametrize("seed", range(60))
def test_every_token_meets_each_of_its_keys_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    padded = bool(seed % 2)
    rows = random_rows(random, decodes_only=padded)
    check(rows, random, padded=12 if padded else None, exact=seed % 4 > 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 2100))
def test_every_token_meets_each_of_its_keys_once_in_many_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    padded = bool(seed % 2)
    rows = random_rows(random, decodes_only=padded, longest=131_072 if seed % 50 == 0 else 3000)
    check(rows, random, padded=12 if padded else None, exact=seed % 4 > 1)


def test_a_shared_prefix_is_one_set_of_items() -> None:
    starts = np.full(32, 8192 + 5, np.int32)
    common = np.arange(1, 513)
    tables = [np.append(common, 1000 + row) for row in range(32)]
    pointers = np.arange(33, dtype=np.int32)
    blocks = np.concatenate(tables).astype(np.int32)
    rows = PackedStepChunks(starts * 0, starts, starts * 0, starts * 0 - 1, pointers, pointers * 513, blocks)
    memory = np.zeros(ROOM, np.int32)
    planner = StepPlanner(page=PAGE, group=4, kv_heads=8, processors=132, max_parts=32768, exact=False)
    none = np.zeros(0, np.int32)
    layout = planner.fill(memory, rows, padded=None, tile_rows=128, selected=none, outputs=0)
    assert layout.num_singles == 32  # only the last keys of each
    assert layout.num_tiles == 8192 // planner.split  # each key of the prefix is read once


def test_what_does_not_fit_is_refused_before_it_is_written() -> None:
    ends = np.full(4, 131_072, np.int32)
    pages = 131_072 // PAGE
    pointers = np.arange(5, dtype=np.int32)
    blocks = np.arange(1, 4 * pages + 1, dtype=np.int32)
    rows = PackedStepChunks(ends * 0, ends - 1, ends * 0, ends * 0 - 1, pointers, pointers * pages, blocks)
    roomy = StepPlanner(page=PAGE, group=1, kv_heads=32, processors=132, max_parts=2048, exact=False)
    assert roomy.step_fits(rows, ROOM) and not roomy.step_fits(rows, 4 * pages)
    tight = StepPlanner(page=PAGE, group=1, kv_heads=32, processors=132, max_parts=2047, exact=False)
    assert not tight.step_fits(rows, ROOM)


@pytest.mark.parametrize(("num_decodes", "fits"), [(180, True), (230, False)])
def test_parts_of_a_prompt_have_room_beside_those_of_decodes(num_decodes: int, fits: bool) -> None:
    lengths, pages = np.array([1] * num_decodes + [60]), 2048 // PAGE
    positions = np.concatenate([np.arange(2048 - length, 2048) for length in lengths]).astype(np.int32)
    indptr, table_ptr = np.cumsum([0, *lengths], dtype=np.int32), np.arange(len(lengths) + 1, dtype=np.int32) * pages
    blocks = np.arange(1, len(lengths) * pages + 1, dtype=np.int32)
    none = np.zeros(len(positions), np.int32)
    rows = PackedStepChunks(none, positions, none, none - 1, indptr, table_ptr, blocks)
    max_parts = 60 * 16 * 4  # a prompt of few tiles is cut into a quarter of them
    planner = StepPlanner(page=PAGE, group=1, kv_heads=8, processors=132, max_parts=max_parts, exact=False)
    selected = np.zeros(0, np.int32)
    layout = planner.fill(np.zeros(ROOM, np.int32), rows, padded=None, tile_rows=128, selected=selected, outputs=0)
    assert layout.num_parts == num_decodes * 16 + 60 * 16
    assert planner.step_fits(rows, ROOM) == (layout.num_parts <= max_parts) == fits
    assert (
        layout.num_parts <= planner.max_parts_and_ints(rows)[0] and layout.total <= planner.max_parts_and_ints(rows)[1]
    )


class _Overlapping(StepPlanner):
    """Items of decodes begin one key early."""

    def _singles(self, *arguments: Any) -> Any:
        items = super()._singles(*arguments)
        items[:, 3] = np.maximum(items[:, 3] - 1, 0)
        return items


def test_a_key_that_is_met_twice_is_seen() -> None:
    random = np.random.default_rng(2)
    rows = random_rows(random, decodes_only=True)
    with pytest.raises(AssertionError):
        check(rows, random, padded=None, exact=False, planner_class=_Overlapping)
