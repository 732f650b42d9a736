"""Random steps and the plain attention they are compared with: dense, in float64, row by row."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.model.cuda.step_plan import PackedStepChunks, StepArrayLayout, StepPlanner
from headstart.model.cuda.triton_attention import (
    LayerScoring,
    TileShape,
    allocate_partial_results,
    launch_attention,
    merge_partial_results,
)


@dataclass
class Case:
    """Chunks (first position, tokens) over a pool whose unused and future slots hold NaN."""

    rows: PackedStepChunks
    queries: Tensor  # [T, Hq * D]: already rotated
    kv: Tensor  # [blocks, 2, Hkv, page, D]: one layer; holds the new tokens already
    heads: int
    scoring: LayerScoring
    expected: Tensor  # [T, Hq, D] in float64


def make_case(
    chunks: list[tuple[int, int]], *, shared: dict[int, tuple[int, int]] | None = None, queries: int = 4, kvs: int = 2,
    dim: int = 16, page: int = 16, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
    window: int | None = None, softcap: float | None = None, sinks: bool = False,
) -> Case:  # fmt: skip
    """`shared` {chunk: (other chunk, pages)}: its table begins with those pages of the other chunk's."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shared = shared or {}
    need = [-(-(start + count) // page) for start, count in chunks]
    ids = list(random.permutation(np.arange(1, sum(need) + 9)))
    tables: list[list[int]] = []
    for chunk, pages in enumerate(need):
        other, common = shared.get(chunk, (0, 0))
        own = [int(ids.pop()) for _ in range(pages - common)]
        tables.append((tables[other][:common] if common else []) + own)
    kv = torch.full((sum(need) + 10, 2, kvs, page, dim), float("nan"), dtype=dtype, device=device)
    scoring = LayerScoring(dim**-0.5, window, softcap, torch.randn(queries, device=device) if sinks else None)
    indptr = np.cumsum([0] + [count for _, count in chunks]).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + c) for s, c in chunks]).astype(np.int32)
    slots = np.concatenate(
        [
            np.array(t)[np.arange(s, s + c) // page] * page + np.arange(s, s + c) % page
            for t, (s, c) in zip(tables, chunks, strict=True)
        ]
    ).astype(np.int32)
    rows = torch.randn(len(positions), queries * dim, device=device).to(dtype)
    expected = torch.empty(len(positions), queries, dim, dtype=torch.float64, device=device)
    for chunk, (start, count) in enumerate(chunks):
        end = start + count
        blocks = torch.tensor(tables[chunk], device=device)
        for number, block in enumerate(tables[chunk]):
            filled = min(page, end - number * page)
            if chunk not in shared or number >= shared[chunk][1]:
                kv[block, :, :, :filled] = torch.randn(2, kvs, filled, dim, device=device).to(dtype)
        flat = kv[blocks].transpose(0, 1).transpose(2, 3).reshape(2, -1, kvs, dim)[:, :end].double()
        at = slice(int(indptr[chunk]), int(indptr[chunk + 1]))
        query = rows[at].view(count, queries, dim).double()
        expected[at] = _dense(query, flat.repeat_interleave(queries // kvs, 2), start, scoring)
    table_ptr = np.cumsum([0, *need]).astype(np.int32)
    blocks = np.concatenate([np.array(t) for t in tables]).astype(np.int32)
    tokens = np.zeros(len(positions), np.int32)
    step = PackedStepChunks(tokens, positions, slots, tokens - 1, indptr, table_ptr, blocks)
    return Case(step, rows, kv, queries, scoring, expected)


def _dense(query: Tensor, kv: Tensor, start: int, scoring: LayerScoring) -> Tensor:
    """Return the attention of queries [n, Hq, D] from position `start` on over keys and values [2, S, Hq, D]."""
    scores = torch.einsum("qhd,khd->hqk", query, kv[0]) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    key, own = torch.arange(kv.shape[1])[None], torch.arange(start, start + len(query))[:, None]
    unseen = (key > own) | (key <= own - (scoring.window or 1 << 30))
    scores = scores.masked_fill(unseen.to(scores.device), float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat((scores, sink), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : kv.shape[1]], kv[1])


def run_case(
    case: Case, *, padded: int | None = None, tile_rows: int = 16, processors: int = 132, split: int = 64,
    exact: bool = False, tile_keys: int = 32, single_rows: int = 16, programs: int = 3,
) -> tuple[StepArrayLayout, Tensor]:  # fmt: skip
    """Return the attention of a case as a step of the runner computes it; what nothing may read is NaN."""
    _, _, kvs, page, dim = case.kv.shape
    device = case.queries.device
    memory = np.full(1 << 17, -7, np.int32)
    planner = StepPlanner(
        page=page,
        group=case.heads // kvs,
        kv_heads=kvs,
        processors=processors,
        max_parts=4096,
        split=split,
        exact=exact,
    )
    none = np.zeros(0, np.int32)
    layout = planner.fill(memory, case.rows, padded=padded, tile_rows=tile_rows, selected=none, outputs=0)
    meta = torch.from_numpy(memory[: layout.total].copy()).to(device)
    missing = torch.full((layout.rows - len(case.queries), case.queries.shape[1]), float("nan"), device=device)
    queries = torch.cat((case.queries, missing.to(case.queries.dtype)))
    out = torch.full((layout.rows, case.heads, dim), float("nan"), dtype=case.queries.dtype, device=device)
    parts = allocate_partial_results(max(1, layout.num_parts), case.heads, kvs, dim, out.device)
    parts.out.fill_(float("nan")), parts.lse.fill_(float("nan"))
    kv = (case.kv[:, 0], case.kv[:, 1])
    common = (
        queries,
        kv,
        out,
        parts,
        meta,
        meta[layout.positions_offset :],
        meta[layout.singles_offset :],
        case.scoring,
    )
    wide = planner.split if exact else 0
    launch_attention(*common, TileShape(single_rows, tile_keys), single=True, programs=programs, split=wide)
    if layout.num_tiles:
        shape = TileShape(tile_rows, tile_keys, max(1, tile_rows // 16))
        launch_attention(*common, shape, single=False, programs=2, split=wide)
    if layout.merged:
        merge_partial_results(
            parts,
            out,
            meta[layout.merged_tokens_offset :][: layout.merged],
            meta[layout.first_part_indices_offset :],
            case.scoring.sinks,
        )
    return layout, out
