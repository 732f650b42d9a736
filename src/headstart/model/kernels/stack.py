"""Stack: all layers of a decoder in one call, with no Python between two parallel regions of threads.

The parts of a stack are chains of products (chain.py) and mixers between them: attentions (attention.py) and layers
with a recurrent state (recurrence.py). In bfloat16 it begins with token ids.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.model.kernels.chain import Angles, ChainBuffers, LinearChain
from headstart.model.kernels.library import KernelLibrary, num_kernel_threads
from headstart.model.kernels.packed import PackedLinear, check_tensor

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float


class KernelKind(IntEnum):
    """`Kind` of step.cpp: the kernel of a part."""

    PRODUCTS = 0
    ATTENTION = 1
    SHORT_CONVOLUTION = 2
    MATRICES = 3
    GATE = 4


class PartDescriptor(ctypes.Structure):
    """`Part` of step.cpp."""

    _fields_ = (("call", _pointer), ("number", _long), ("kind", _long))


class StackDescriptor(ctypes.Structure):
    """`Stack` of step.cpp: one step through all layers."""

    _fields_ = (
        *((name, _pointer) for name in ("parts", "buffers", "stream", "embedding", "packed", "cosines", "sines")),
        *((name, _pointer) for name in ("cosine", "sine", "token_ids", "positions", "scratch", "chunks")),
        *((name, _long) for name in ("count", "hidden", "vocab", "angles", "num_positions", "num_chunks")),
        *((name, _pointer) for name in ("head", "logits", "indptr", "finite")),
        *((name, _long) for name in ("num_head_links", "num_rows", "layer_bytes")),
        ("scale", _float),
        ("num_parts", _int),
        ("threads", _int),
    )


class StepTokens(NamedTuple):
    """The tokens of a step. The tables hold the angles of every position, [positions, 1, 2, rotary_dim / 2]."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    tables: Angles


@dataclass(slots=True)
class HeadOutputs:
    """Results behind the layers of a stack if all rows are sampled: the logits and a check of hidden states."""

    indptr: NDArray[np.int32]  # [R + 1]: the runs of rows that are checked
    logits: Tensor | None = None  # [T, vocab]
    finite: list[bool] | None = None  # [R]: whether all hidden states of a run are finite


class LayerStack:
    """Runs of chains with mixers between two of them; `mixers` are their kernels in order: the kind and a number.

    The number of an attention is that of its layer in the KV pool. Buffer `stream` is the residual stream. It starts
    with rows of `embedding` [vocab, hidden], times `scale`, if there are Tokens. `head` reads it as buffer 0.
    """

    def __init__(
        self,
        kernels: KernelLibrary,
        runs: Sequence[Sequence[LinearChain]],
        mixers: Sequence[Sequence[tuple[KernelKind, int]]],
        embedding: Tensor | PackedLinear,
        head: LinearChain,
        *,
        stream: int,
        scale: float = 1.0,
    ) -> None:
        self._function = kernels.library.headstart_stack
        self._chains = [chain for run in runs for chain in run]
        self._rotary_dim = max(chain.rotary_dim or 0 for chain in self._chains)
        parts, slots = list[PartDescriptor](), list[int]()
        for run, calls in zip_longest(runs, mixers, fillvalue=()):
            parts += [PartDescriptor(*chain.link_address_and_count, KernelKind.PRODUCTS) for chain in run]
            slots += range(len(parts), len(parts) + len(calls))
            parts += [PartDescriptor(None, number, kind) for kind, number in calls]
        self._parts = (PartDescriptor * len(parts))(*parts)
        self._slots = [self._parts[slot] for slot in slots]
        self._calls = list[ctypes.Structure | None]([None] * len(slots))  # of the slots
        self._checked: tuple[ChainBuffers, Tensor] | None = None
        self._stream, self._hidden = stream, self._chains[0].widths[stream]
        self._kept, self._head = embedding, head  # like the chains: the descriptors hold only addresses
        self._embedding = {"scale": scale}
        if isinstance(embedding, PackedLinear):
            if not embedding.has_rows or embedding.in_features != self._hidden:
                raise ValueError(f"the packed embedding has no rows of {self._hidden} numbers")
            self._vocab = embedding.out_features
            self._embedding["packed"] = ctypes.addressof(embedding.descriptor)
        else:
            self._vocab = len(embedding)
            check_tensor(embedding, "embedding", (self._vocab, self._hidden), self._chains[0].dtype)
            self._embedding["embedding"] = embedding.data_ptr()

    def __call__(
        self,
        buffers: ChainBuffers,
        scratch: Tensor,
        calls: Sequence[ctypes.Structure],
        *,
        tokens: StepTokens | None = None,
        ahead: HeadOutputs | None = None,
        layer_bytes: int = 0,
        chunks: tuple[int, int] = (0, 0),
    ) -> None:
        """Run all parts on `buffers`, which must all be set. Without `tokens` the residual stream is filled already.

        `calls` has the argument of each kernel of a mixer; of an attention with the pages of layer 0; those of layer i
        are `i * layer_bytes` further. `chunks`: the table of States for recurrent layers. Raises ValueError for
        arguments that do not fit together, and for a token or a position outside its table; nothing is written then.
        """
        if self._checked is None or self._checked[0] is not buffers or self._checked[1] is not scratch:
            for chain in self._chains:
                chain.check_buffers(buffers, scratch)
            self._checked = buffers, scratch
        if len(calls) != len(self._slots):
            raise ValueError(f"{len(calls)} arguments for {len(self._slots)} kernels of mixers")
        for index, (call, known) in enumerate(zip(calls, self._calls, strict=True)):
            if call is not known:
                self._calls[index], self._slots[index].call = call, ctypes.addressof(call)
        stack = StackDescriptor(
            parts=ctypes.addressof(self._parts),
            num_parts=len(self._parts),
            buffers=ctypes.addressof(buffers.addresses),
            scratch=scratch.data_ptr(),
            count=buffers.count,
            threads=num_kernel_threads(),
            layer_bytes=layer_bytes,
            chunks=chunks[0],
            num_chunks=chunks[1],
            stream=buffers.addresses[self._stream],
            hidden=self._hidden,
        )
        kept = None if tokens is None else self._begin(stack, buffers, tokens)
        found = None if ahead is None else self._end(stack, buffers, ahead)
        if not self._function(ctypes.byref(stack)):
            raise ValueError(f"a token outside [0, {self._vocab}), or a position outside [0, {stack.num_positions})")
        del kept
        if ahead is not None and found is not None:
            ahead.logits, ahead.finite = found[0], list(found[1])

    def _begin(self, stack: StackDescriptor, buffers: ChainBuffers, tokens: StepTokens) -> object:
        """Let the step begin with tokens. Return memory that must live as long as it."""
        count, num_positions = buffers.count, tokens.tables[0].shape[0]
        if buffers.dtype != torch.bfloat16:
            raise ValueError(f"tokens are looked up in bfloat16, not in {buffers.dtype}")
        check_tensor(tokens.ids, "token_ids", (count,), torch.int64)
        check_tensor(tokens.positions, "positions", (count,), torch.int64)
        if self._rotary_dim:
            for name, table in zip(("cosines", "sines"), tokens.tables, strict=True):
                check_tensor(table, name, (num_positions, 1, 2, self._rotary_dim // 2), torch.bfloat16)
        angles = np.empty((2, count, self._rotary_dim), np.uint16)
        for name, value in self._embedding.items():
            setattr(stack, name, value)
        stack.vocab = self._vocab
        stack.cosines, stack.sines = (table.data_ptr() for table in tokens.tables)
        stack.cosine, stack.sine = angles[0].ctypes.data, angles[1].ctypes.data
        stack.token_ids, stack.positions = tokens.ids.data_ptr(), tokens.positions.data_ptr()
        stack.angles, stack.num_positions = self._rotary_dim, num_positions
        return angles

    def _end(
        self, stack: StackDescriptor, buffers: ChainBuffers, ahead: HeadOutputs
    ) -> "tuple[Tensor, ctypes.Array[Any]]":
        """Let the step end with logits [T, vocab] and a flag for each run of `ahead`, which are returned."""
        num_rows = len(ahead.indptr) - 1
        if buffers.dtype != torch.bfloat16 or ahead.indptr.dtype != np.int32 or ahead.indptr[-1] > buffers.count:
            raise ValueError(f"runs {ahead.indptr} of {buffers.count} rows in {buffers.dtype}")
        logits = torch.empty((buffers.count, self._head.widths[1]), dtype=buffers.dtype)
        finite = (ctypes.c_bool * num_rows)()
        stack.head, stack.num_head_links = self._head.link_address_and_count
        stack.logits, stack.indptr, stack.num_rows = logits.data_ptr(), ahead.indptr.ctypes.data, num_rows
        stack.finite = ctypes.addressof(finite)
        return logits, finite
