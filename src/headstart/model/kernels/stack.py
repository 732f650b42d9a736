"""Stack: all layers of a decoder in one call, with no Python between two parallel regions of threads.

The parts of a stack are chains of products (chain.py) and mixers between them: attentions (attention.py) and layers
with a recurrent state (recurrence.py). The step of a dense decoder begins with token ids.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.model.kernels.chain import Angles, Buffers, Chain
from headstart.model.kernels.library import Kernels, threads
from headstart.model.kernels.packed import PackedLinear, check

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long


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
        *((name, _pointer) for name in ("cosine", "sine", "token_ids", "positions", "scratch")),
        *((name, _long) for name in ("count", "hidden", "vocab", "angles", "num_positions", "layer_bytes")),
        ("num_parts", _int),
        ("threads", _int),
    )


class Stack:
    """Runs of chains with mixers between two of them; `mixers` are the kinds of their kernels, in order."""

    def __init__(
        self, kernels: Kernels, runs: Sequence[Sequence[Chain]], mixers: Sequence[Sequence[KernelKind]]
    ) -> None:
        self._function = kernels.library.headstart_stack
        self._chains = [chain for run in runs for chain in run]  # kept: the descriptors hold only addresses
        dims = {chain.rotary_dim for chain in self._chains} - {None}
        self.rotary_dim = dims.pop() if dims else None
        parts, slots = list[PartDescriptor](), list[int]()
        for layer, (run, kinds) in enumerate(zip_longest(runs, mixers, fillvalue=())):
            parts += [PartDescriptor(*chain.links, KernelKind.PRODUCTS) for chain in run]
            slots += range(len(parts), len(parts) + len(kinds))
            parts += [PartDescriptor(None, layer, kind) for kind in kinds]
        self._parts = (PartDescriptor * len(parts))(*parts)
        self._slots = [self._parts[slot] for slot in slots]
        self._checked: tuple[Buffers, Tensor] | None = None

    def __call__(
        self, buffers: Buffers, scratch: Tensor, angles: Angles | None, calls: Sequence[ctypes.Structure]
    ) -> None:
        """Run all parts on `buffers`, which must all be set. `calls` has the argument of each kernel of a mixer.

        Raises ValueError for arguments that do not fit together.
        """
        cosine = sine = None
        if self.rotary_dim is not None:
            if angles is None:
                raise ValueError("heads cannot be rotated without angles")
            for name, tensor in zip(("cosine", "sine"), angles, strict=True):
                check(tensor, name, (buffers.count, 1, 2, self.rotary_dim // 2), torch.bfloat16)
            cosine, sine = (tensor.data_ptr() for tensor in angles)
        self._run(buffers, scratch, calls, cosine=cosine, sine=sine)

    def _run(self, buffers: Buffers, scratch: Tensor, calls: Sequence[ctypes.Structure], **more: Any) -> bool:
        """Call the kernel, with `more` fields of its argument."""
        if self._checked is None or self._checked[0] is not buffers or self._checked[1] is not scratch:
            for chain in self._chains:
                chain.check(buffers, scratch)
            self._checked = buffers, scratch
        if len(calls) != len(self._slots):
            raise ValueError(f"{len(calls)} arguments for {len(self._slots)} kernels of mixers")
        for slot, call in zip(self._slots, calls, strict=True):
            slot.call = ctypes.addressof(call)
        stack = StackDescriptor(
            parts=ctypes.addressof(self._parts),
            num_parts=len(self._parts),
            buffers=ctypes.addressof(buffers.addresses),
            scratch=scratch.data_ptr(),
            count=buffers.count,
            threads=threads(),
            **more,
        )
        return bool(self._function(ctypes.byref(stack)))


class DenseStack(Stack):
    """A stack with an attention between two chains. Buffer `stream` starts with `embedding` [vocab, hidden]."""

    def __init__(
        self, kernels: Kernels, chains: Sequence[Chain], embedding: Tensor | PackedLinear, *, stream: int
    ) -> None:
        super().__init__(kernels, [[chain] for chain in chains], [[KernelKind.ATTENTION]] * (len(chains) - 1))
        self._stream, self._hidden, self._kept = stream, chains[0].widths[stream], embedding
        if isinstance(embedding, PackedLinear):
            if not embedding.has_rows or embedding.in_features != self._hidden:
                raise ValueError(f"the packed embedding has no rows of {self._hidden} numbers")
            self._vocab = embedding.out_features
            self._embedding = {"packed": ctypes.addressof(embedding.descriptor)}
        else:
            self._vocab = len(embedding)
            check(embedding, "embedding", (self._vocab, self._hidden), torch.bfloat16)
            self._embedding = {"embedding": embedding.data_ptr()}

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        tables: Angles,
        buffers: Buffers,
        scratch: Tensor,
        attentions: Sequence[ctypes.Structure],
        layer_bytes: int,
    ) -> None:
        """Run all layers on `buffers`, which must all be set, for tokens and positions [T] int64.

        `tables` holds the angles of every position, [positions, 1, 2, rotary_dim / 2]. `attentions` has one call per
        layer, with the pages of layer 0; those of layer i are `i * layer_bytes` further. Raises ValueError for
        arguments that do not fit together, and for a token or a position outside its table; nothing is written then.
        """
        count, num_positions, half = buffers.count, len(tables[0]), (self.rotary_dim or 0) // 2
        check(token_ids, "token_ids", (count,), torch.int64)
        check(positions, "positions", (count,), torch.int64)
        for name, table in zip(("cosines", "sines"), tables, strict=True):
            check(table, name, (num_positions, 1, 2, half), torch.bfloat16)
        angles = np.empty((2, count, 2 * half), np.uint16)
        are_inside = self._run(
            buffers,
            scratch,
            attentions,
            stream=buffers.addresses[self._stream],
            **self._embedding,
            cosines=tables[0].data_ptr(),
            sines=tables[1].data_ptr(),
            cosine=angles[0].ctypes.data,
            sine=angles[1].ctypes.data,
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            hidden=self._hidden,
            vocab=self._vocab,
            angles=2 * half,
            num_positions=num_positions,
            layer_bytes=layer_bytes,
        )
        if not are_inside:
            raise ValueError(f"a token outside [0, {self._vocab}), or a position outside [0, {num_positions})")
