"""Stack: all layers of a decoder in one call, from token ids to the residual stream after the last layer.

The layers are chains (chain.py) and attentions (attention.py); the stack runs them in order, with no Python in between.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headstart.model.kernels.attention import AttentionCall
from headstart.model.kernels.chain import Angles, Buffers, Chain
from headstart.model.kernels.library import Kernels, threads
from headstart.model.kernels.packed import PackedLinear, check

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long


class PartDescriptor(ctypes.Structure):
    """`Part` of step.cpp: the chain between two attentions."""

    _fields_ = (("links", _pointer), ("num_links", _long))


class StackDescriptor(ctypes.Structure):
    """`Stack` of step.cpp: one step through all layers."""

    _fields_ = (
        *((name, _pointer) for name in ("parts", "attentions", "buffers", "stream", "embedding", "packed", "cosines")),
        *((name, _pointer) for name in ("sines", "cosine", "sine", "token_ids", "positions", "scratch")),
        *((name, _long) for name in ("count", "hidden", "vocab", "angles", "num_positions", "layer_bytes")),
        ("num_layers", _int),
        ("threads", _int),
    )


class Stack:
    """All `chains`, with an attention between two of them. Buffer `stream` starts with `embedding` [vocab, hidden]."""

    def __init__(
        self, kernels: Kernels, chains: Sequence[Chain], embedding: Tensor | PackedLinear, *, stream: int
    ) -> None:
        self._hidden = chains[0].widths[stream]
        self._function = kernels.library.headstart_stack
        self._stream, self._rotary_dim = stream, chains[0].rotary_dim
        self._kept = (list(chains), embedding)  # the descriptors hold only addresses
        parts = [PartDescriptor(*chain.links) for chain in chains]
        self._parts = (PartDescriptor * len(parts))(*parts)
        self.num_layers = len(parts) - 1
        if isinstance(embedding, PackedLinear):
            if not embedding.has_rows or embedding.in_features != self._hidden:
                raise ValueError(f"the packed embedding has no rows of {self._hidden} numbers")
            self._vocab = embedding.out_features
            self._embedding = (None, ctypes.addressof(embedding.descriptor))
        else:
            self._vocab = len(embedding)
            check(embedding, "embedding", (self._vocab, self._hidden), torch.bfloat16)
            self._embedding = (embedding.data_ptr(), None)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        tables: Angles,
        buffers: Buffers,
        scratch: Tensor,
        attentions: Sequence[AttentionCall],
        layer_bytes: int,
    ) -> None:
        """Run all layers on `buffers`, which must all be set, for tokens and positions [T] int64.

        `tables` holds the angles of every position, [positions, 1, 2, rotary_dim / 2]. `attentions` has one call per
        layer, with the pages of layer 0; those of layer i are `i * layer_bytes` further. Raises ValueError for
        arguments that do not fit together, and for a token or a position outside its table; nothing is written then.
        """
        count, num_positions, half = buffers.count, len(tables[0]), (self._rotary_dim or 0) // 2
        check(token_ids, "token_ids", (count,), torch.int64)
        check(positions, "positions", (count,), torch.int64)
        for chain in self._kept[0][:2]:  # later chains are like the second
            chain.check(buffers, scratch)
        for name, table in zip(("cosines", "sines"), tables, strict=True):
            check(table, name, (num_positions, 1, 2, half), torch.bfloat16)
        if len(attentions) != self.num_layers:
            raise ValueError(f"{len(attentions)} attentions for {self.num_layers} layers")
        angles = np.empty((2, count, 2 * half), np.uint16)
        addresses = (_pointer * self.num_layers)(*map(ctypes.addressof, attentions))
        call = StackDescriptor(
            ctypes.addressof(self._parts),
            ctypes.addressof(addresses),
            ctypes.addressof(buffers.addresses),
            buffers.addresses[self._stream],
            *self._embedding,
            tables[0].data_ptr(),
            tables[1].data_ptr(),
            angles[0].ctypes.data,
            angles[1].ctypes.data,
            token_ids.data_ptr(),
            positions.data_ptr(),
            scratch.data_ptr(),
            count,
            self._hidden,
            self._vocab,
            2 * half,
            num_positions,
            layer_bytes,
            self.num_layers,
            threads(),
        )
        if not self._function(ctypes.byref(call)):
            raise ValueError(f"a token outside [0, {self._vocab}), or a position outside [0, {num_positions})")
