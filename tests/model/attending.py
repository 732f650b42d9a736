"""Random steps over a backend and the reference beside it, each with a pool of its own; and poisoned blocks."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.model.attention.base import BackendFactory
from headstart.model.attention.cpu import CPUAttention
from headstart.model.attention.reference import ReferenceAttention
from headstart.model.kv_writes import StepChunkArrays, plan_kv_writes
from headstart.model.paged_kv import TokenKVShape
from headstart.model.step_inputs import StepInputs

CPU = torch.device("cpu")
ATOL = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # of outputs about 1; bf16 has 8 bits, and is rounded in between


class Pools:
    """Sequences in random blocks of both backends; `share` makes their tables begin alike."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        seed: int = 0,
        backend: BackendFactory = CPUAttention,
        **options: Any,
    ) -> None:
        """`options` are those of `backend`."""
        self.rng, self.block_size = Random(seed), block_size
        torch.manual_seed(seed)
        self.lengths, self.heads, self.dtype = list(lengths), heads, dtype
        counts = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(counts) + 3  # two unused ones
        free = self.rng.sample(range(1, self.num_blocks), self.num_blocks - 1)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.unused = free
        self.shape = TokenKVShape(2, kv_heads, dim)
        size = {"num_blocks": self.num_blocks, "block_size": block_size, "dtype": dtype, "device": CPU}
        self.reference = ReferenceAttention(self.shape, **size)
        self.own: Any = backend(self.shape, **size, **options)
        self.queries, self.keys, self.values = (
            [torch.randn(length, count, dim).to(dtype) for length in lengths] for count in (heads, kv_heads, kv_heads)
        )

    def share(self, follower: int, leader: int, num_blocks: int) -> None:
        """The follower's first blocks become the leader's."""
        self.tables[follower][:num_blocks] = self.tables[leader][:num_blocks]
        tokens = num_blocks * self.block_size
        for rows in (self.keys, self.values):
            rows[follower][:tokens] = rows[leader][:tokens]

    def step(self, starts: Sequence[int], ends: Sequence[int], write_from: Sequence[int] | None = None) -> StepInputs:
        """The step that computes positions [start, end) of every sequence."""
        lengths = np.array(ends, np.int32) - np.array(starts, np.int32)
        tables = [table[: -(-end // self.block_size)] for table, end in zip(self.tables, ends, strict=True)]
        first = np.array(starts, np.int32)
        qo_indptr = np.cumsum([0, *lengths], dtype=np.int32)
        kv_indptr = np.cumsum([0, *map(len, tables)], dtype=np.int32)
        kv_indices = np.array([block for table in tables for block in table], np.int32)
        positions = np.arange(qo_indptr[-1]) - np.repeat(qo_indptr[:-1] - first, lengths)
        from_ = np.array(write_from or [0] * len(first), np.int64)
        return StepInputs(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.from_numpy(positions),
            writes=plan_kv_writes(
                StepChunkArrays(qo_indptr, first, from_, kv_indptr, kv_indices), positions, self.block_size, CPU
            ),
            qo_indptr=qo_indptr,
            starts=first,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
        )

    def fill(self, ends: Sequence[int]) -> None:
        """Writes the KV before `ends` to both pools, sequence by sequence."""
        for index, end in enumerate(ends):
            if end:
                only = Pools.step(self._only(index), [0], [end])
                self.reference.kv.write_layer(1, self.keys[index][:end], self.values[index][:end], only.writes)
                if isinstance(self.own, CPUAttention):
                    self.own.kv.write_layer(1, self.keys[index][:end], self.values[index][:end], only.writes)
                    continue
                for number in range(-(-end // self.block_size)):  # what lies behind the last token stays as it is
                    self._copy(self.tables[index][number], min(self.block_size, end - number * self.block_size))

    def _copy(self, block: int, count: int) -> None:
        """Copies the first `count` tokens of a block from the reference's pool."""
        size = (self.shape.num_layers, 2, self.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        found, data = (bytearray(kv.read_block(block)) for kv in (self.reference.kv, self.own.kv))
        source, target = (torch.frombuffer(one, dtype=self.dtype).view(size) for one in (found, data))
        target[:, :, :count] = source[:, :, :count]
        self.own.kv.write_block(block, data)

    def _only(self, index: int) -> "Pools":
        one = object.__new__(Pools)
        one.tables, one.block_size = [self.tables[index]], self.block_size
        return one

    def rows(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a step, packed."""
        spans = list(zip(range(len(starts)), starts, ends, strict=True))
        q, k, v = (torch.cat([x[i][s:e] for i, s, e in spans]) for x in (self.queries, self.keys, self.values))
        return q, k, v

    def compute(
        self,
        starts: Sequence[int],
        *,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """Return the outputs of reference and backend for the rest of every sequence, and the backend's step."""
        step = self.step(starts, self.lengths)
        q, k, v = self.rows(starts, self.lengths)
        due = self.reference.begin_step(step)(1, q, k, v, scale=scale, window=window, softcap=cap, sinks=sinks)
        own = self.own.begin_step(step)
        return due, own(1, q, k, v, scale=scale, window=window, softcap=cap, sinks=sinks), own


def poison(backend: Any, block: int, slots: slice = slice(None)) -> None:
    """Fills slots of a block with NaN, in all layers."""
    kv, data = backend.kv, bytearray(backend.kv.read_block(block))
    size = (kv.shape.num_layers, 2, kv.block_size, kv.shape.num_kv_heads, kv.shape.head_dim)
    torch.frombuffer(data, dtype=kv.dtype).view(size)[:, :, slots] = float("nan")
    kv.write_block(block, data)
