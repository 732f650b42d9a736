"""The read plan of one step: pages to gather and masks, computed once for all layers with the same window.

Chunks of one token ("decode rows", also if they belong to a prefill) are computed together in buckets of similar
length, so that one long sequence does not pad the others. Decode rows whose block tables begin with the same blocks
form a group, which reads these blocks once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.model.paged_kv import PagedKV
from headstart.model.step_inputs import StepInputs

BUCKET_BYTES = 8 << 20  # KV gathered at a time: small enough to stay in a shared CPU cache between gather and matmul
MIN_SHARED_BYTES = 1 << 20  # reads a group must save to be worth its extra calls
FILL = 0.75  # a row shorter than this share of its bucket's longest opens a new bucket
SMALL_PADDING = 8  # pages of padding that are cheaper than another bucket


class DecodeBucket(NamedTuple):
    """Decode rows [begin, end) of the plan's order, padded to `num_pages` pages each."""

    begin: int
    end: int
    num_pages: int
    pages: Tensor  # [2 * Hkv * rows * num_pages] rows of the flat cache
    masked: Tensor | None  # [rows, 1, num_pages * block_size] bool: keys that the row does not attend to


class DecodeGroup(NamedTuple):
    """Decode rows that share the same `num_pages` leading pages and attend to all their tokens."""

    rows: Tensor  # int64, in the plan's order
    num_pages: int
    pages: Tensor


class PrefillChunkReads(NamedTuple):
    """Tokens [begin, end) of one chunk, the first at position `start`; its pages begin at position `first_key`."""

    begin: int
    end: int
    start: int
    first_key: int
    num_pages: int
    pages: Tensor


class AttentionPlan(NamedTuple):
    """All reads of a step for one window."""

    tokens: Tensor | None  # [Rd] int64: the packed row of each decode row, in the plan's order
    buckets: list[DecodeBucket]
    groups: list[DecodeGroup]
    prefills: list[PrefillChunkReads]


class _Row(NamedTuple):
    """One decode row: its token, its position, and the blocks it reads without a group, from `first_page` on."""

    token: int
    position: int
    first_key: int
    first_page: int
    table: NDArray[np.int32]


def plan_attention_reads(step: StepInputs, kv: PagedKV, window: int | None) -> AttentionPlan:
    """Plan the reads of `step` with `window` (None: whole prefixes). Changes nothing."""
    pages = _PageRows(kv)
    rows: list[_Row] = []
    prefills: list[PrefillChunkReads] = []
    for index in range(step.num_chunks):
        begin, end = int(step.qo_indptr[index]), int(step.qo_indptr[index + 1])
        start = int(step.starts[index])
        table = step.kv_indices[step.kv_indptr[index] : step.kv_indptr[index + 1]]
        first_key = 0 if window is None else max(0, start - window + 1)
        first_page = first_key // kv.block_size
        table = table[first_page:]
        if end - begin == 1:
            rows.append(_Row(begin, start, first_key, first_page, table))
        else:
            first = first_page * kv.block_size
            prefills.append(PrefillChunkReads(begin, end, start, first, len(table), pages.of(table)))
    if not rows:
        return AttentionPlan(None, [], [], prefills)
    shared = _shared(rows, kv) if window is None else []
    for members, num_pages in shared:
        for member in members:
            row = rows[member]
            rows[member] = row._replace(first_page=row.first_page + num_pages, table=row.table[num_pages:])
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].table))
    place = {index: at for at, index in enumerate(order)}
    groups = [
        DecodeGroup(
            torch.tensor([place[member] for member in members], device=kv.device),
            num_pages,
            pages.of(step.kv_indices[_span(step, rows[members[0]].token, num_pages)]),
        )
        for members, num_pages in shared
    ]
    ordered = [rows[index] for index in order]
    tokens = torch.tensor([row.token for row in ordered], device=kv.device)
    return AttentionPlan(tokens, _buckets(ordered, kv, pages), groups, prefills)


class _PageRows:
    """Conversion of block ids to rows of the cache viewed as [2 * Hkv * num_blocks, block_size * D]."""

    def __init__(self, kv: PagedKV) -> None:
        self._heads = np.arange(2 * kv.shape.num_kv_heads, dtype=np.int64)[:, None] * kv.num_blocks
        self._device = kv.device

    def of(self, blocks: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy((self._heads + blocks.reshape(1, -1)).reshape(-1)).to(self._device)


def _span(step: StepInputs, token: int, num_pages: int) -> slice:
    first = int(step.kv_indptr[np.searchsorted(step.qo_indptr, token)])
    return slice(first, first + num_pages)


def _shared(rows: Sequence[_Row], kv: PagedKV) -> list[tuple[list[int], int]]:
    """Group the rows by their first block, with the number of full pages that all rows of a group share."""
    by_block: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_block.setdefault(int(row.table[0]), []).append(index)
    groups: list[tuple[list[int], int]] = []
    page_bytes = kv.block_size * kv.layer_token_bytes
    for members in by_block.values():
        if len(members) < 2:
            continue
        limit = min(rows[member].position // kv.block_size for member in members)  # excludes each row's last block
        if limit * page_bytes * (len(members) - 1) < MIN_SHARED_BYTES:
            continue
        tables = np.stack([rows[member].table[:limit] for member in members])
        differing = np.flatnonzero((tables != tables[0]).any(axis=0))
        num_pages = int(differing[0]) if len(differing) else limit
        if num_pages * page_bytes * (len(members) - 1) >= MIN_SHARED_BYTES:
            groups.append((members, num_pages))
    return groups


def _buckets(rows: Sequence[_Row], kv: PagedKV, pages: _PageRows) -> list[DecodeBucket]:
    """Cut the rows, longest first, where the next row is much shorter or the bucket is full."""
    page_bytes = kv.block_size * kv.layer_token_bytes
    buckets: list[DecodeBucket] = []
    begin = 0
    for end in range(1, len(rows) + 1):
        longest = len(rows[begin].table)
        if end < len(rows):
            length = len(rows[end].table)
            full = longest * page_bytes * (end + 1 - begin) > BUCKET_BYTES
            uneven = length < FILL * longest and longest - length > SMALL_PADDING
            if not (full or uneven):
                continue
        buckets.append(_bucket(rows[begin:end], begin, longest, kv, pages))
        begin = end
    return buckets


def _bucket(rows: Sequence[_Row], begin: int, num_pages: int, kv: PagedKV, pages: _PageRows) -> DecodeBucket:
    tables = np.zeros((len(rows), num_pages), dtype=np.int32)  # padding reads block 0, which stays zero
    for at, row in enumerate(rows):
        tables[at, : len(row.table)] = row.table
    keys = np.arange(num_pages * kv.block_size)
    offsets, firsts, lasts = (
        np.array(values)[:, None]
        for values in zip(*((row.first_page * kv.block_size, row.first_key, row.position) for row in rows), strict=True)
    )
    unseen = (keys + offsets > lasts) | (keys + offsets < firsts)
    masked = torch.from_numpy(unseen[:, None]).to(kv.device) if unseen.any() else None
    return DecodeBucket(begin, begin + len(rows), num_pages, pages.of(tables), masked)
