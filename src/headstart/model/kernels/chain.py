"""Chain: consecutive matrix products in one call and one parallel region of threads.

All operations of a decoder layer between two attentions form one chain, so the threads are woken only once for them.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.model.kernels.library import KernelLibrary, LinkDescriptor, num_kernel_threads
from headstart.model.kernels.packed import PackedLinear, RotaryHeads, check_tensor

Angles = tuple[Tensor, Tensor]
MAX_LINKS = 8  # see linear.cpp


class ChainLink(NamedTuple):
    """One product: buffer `target` = linear(buffer `source`) + buffer `residual`, if any; then the rotary embedding.

    `residual` may be `target`: rows are then changed in place. `rotary` None: no rotary embedding. `offset`: the first
    column of `target` and `residual` that the product writes and reads; for a matrix of which several links make parts.
    """

    linear: PackedLinear
    source: int
    target: int
    residual: int | None = None
    rotary: RotaryHeads | None = None
    offset: int = 0


class ChainBuffers:
    """Numbered buffers [T, widths[i]] that chains read and write. Keeps them alive, so addresses stay valid."""

    __slots__ = ("_tensors", "addresses", "count", "dtype", "widths")

    def __init__(self, count: int, widths: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
        self.count, self.widths, self.dtype = count, widths, dtype
        self._tensors: list[Tensor | None] = [None] * len(widths)
        self.addresses = (ctypes.c_void_p * len(widths))()

    def __getitem__(self, index: int) -> Tensor:
        tensor = self._tensors[index]
        assert tensor is not None, index
        return tensor

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        """Set a buffer. Raises ValueError for a tensor of another shape, dtype, layout or device."""
        check_tensor(tensor, f"buffer {index}", (self.count, self.widths[index]), self.dtype)
        self._tensors[index] = tensor
        self.addresses[index] = tensor.data_ptr()

    def allocate(self, *indices: int) -> None:
        """Allocate new memory for these buffers."""
        for index in indices:
            self[index] = torch.empty((self.count, self.widths[index]), dtype=self.dtype)


class LinearChain:
    """A sequence of links. Raises ValueError if there are too many or they do not fit each other or the buffers."""

    __slots__ = ("_functions", "_kept", "_links", "_rotary_dim", "dtype", "widest", "widths")

    def __init__(self, kernels: KernelLibrary, links: list[ChainLink], widths: tuple[int, ...]) -> None:
        if len(links) > MAX_LINKS:
            raise ValueError(f"a chain has at most {MAX_LINKS} links, not {len(links)}")
        self.widths = widths
        self._functions = kernels.library
        self._kept = links  # the descriptors hold only addresses
        self.widest = max(link.linear.in_features for link in links)
        dims = {link.rotary.rotary_dim for link in links if link.rotary is not None}
        if len(dims) > 1:
            raise ValueError(f"a chain has one table of angles, but its links rotate {sorted(dims)} dimensions")
        self._rotary_dim = dims.pop() if dims else None
        dtypes = {link.linear.dtype for link in links}
        if len(dtypes) > 1 or (self._rotary_dim is not None and torch.float32 in dtypes):
            raise ValueError("links of a chain have rows of one dtype, and heads are rotated in bfloat16")
        self.dtype = dtypes.pop()
        for link in links:
            _check_link(link, widths)
        _check_columns(links, widths)
        self._links = (LinkDescriptor * len(links))(
            *(
                LinkDescriptor(
                    linear=ctypes.addressof(link.linear.descriptor),
                    heads=None if link.rotary is None else ctypes.addressof(link.rotary.descriptor),
                    x=link.source,
                    y=link.target,
                    residual=-1 if link.residual is None else link.residual,
                    offset=link.offset,
                    stride=widths[link.target],
                )
                for link in links
            )
        )

    @property
    def rotary_dim(self) -> int | None:
        """The number of leading dimensions of a head that are rotated; None if no heads are rotated."""
        return self._rotary_dim

    @property
    def link_address_and_count(self) -> tuple[int, int]:
        """The address and number of the links, for a call that runs several chains."""
        return ctypes.addressof(self._links), len(self._links)

    def allocate_scratch(self, count: int) -> Tensor:
        """Allocate memory for calls with `count` rows and the current number of torch's threads."""
        size = self._functions.headstart_scratch(self.widest, count, num_kernel_threads())
        return torch.empty(size, dtype=torch.uint8)

    def __call__(self, buffers: ChainBuffers, scratch: Tensor, angles: Angles | None = None) -> None:
        """Run all links on `buffers`, which must all be set. `angles` are the result of RotaryEmbedding.cos_sin.

        Raises ValueError for buffers, scratch or angles that do not fit.
        """
        count, num_threads = buffers.count, num_kernel_threads()
        self.check_buffers(buffers, scratch)
        cosine = sine = None
        if self._rotary_dim is not None:
            if angles is None:
                raise ValueError("heads cannot be rotated without angles")
            for name, tensor in zip(("cosine", "sine"), angles, strict=True):
                check_tensor(tensor, name, (count, 1, 2, self._rotary_dim // 2), torch.bfloat16)
            cosine, sine = angles[0].data_ptr(), angles[1].data_ptr()
        self._functions.headstart_chain(
            ctypes.addressof(self._links),
            len(self._links),
            ctypes.addressof(buffers.addresses),
            cosine,
            sine,
            scratch.data_ptr(),
            count,
            num_threads,
        )

    def check_buffers(self, buffers: ChainBuffers, scratch: Tensor) -> None:
        """Raise ValueError unless all links can run on these buffers and this scratch memory."""
        count = buffers.count
        if buffers.widths != self.widths or not all(buffers.addresses):
            raise ValueError(f"buffers are {buffers.widths} wide and all to be filled; this chain needs {self.widths}")
        if buffers.dtype != self.dtype:
            raise ValueError(f"buffers are {buffers.dtype}; this chain computes in {self.dtype}")
        if scratch.nbytes < self._functions.headstart_scratch(self.widest, count, num_kernel_threads()):
            raise ValueError(f"scratch has {scratch.nbytes} bytes, too few for {count} rows of {self.widest}")


class LinearChainWorkspace:
    """Buffers and scratch for steps through `chains`, reused: memory only grows, so its pages are faulted in once."""

    def __init__(self, chains: Sequence[LinearChain]) -> None:
        self._widths, self._dtype = chains[0].widths, chains[0].dtype
        self._widest = max(chains, key=lambda chain: chain.widest)
        self._memory = [torch.empty((0, width), dtype=self._dtype) for width in self._widths]
        self._threads, self._kept = num_kernel_threads(), self._made(1)

    def buffers_for_rows(self, count: int) -> tuple[ChainBuffers, Tensor]:
        """Return buffers of `count` rows, all set, and scratch memory for them; their content is any."""
        if self._kept[0].count != count or self._threads != num_kernel_threads():
            self._threads, self._kept = num_kernel_threads(), self._made(count)
        return self._kept

    def _made(self, count: int) -> tuple[ChainBuffers, Tensor]:
        if count > len(self._memory[0]):
            size = 1 << (count - 1).bit_length()
            self._memory = [torch.empty((size, width), dtype=self._dtype) for width in self._widths]
        buffers = ChainBuffers(count, self._widths, self._dtype)
        for index, memory in enumerate(self._memory):
            buffers[index] = memory[:count]
        return buffers, self._widest.allocate_scratch(count)


def _check_link(link: ChainLink, widths: tuple[int, ...]) -> None:
    linear = link.linear
    width = widths[link.target] if 0 <= link.target < len(widths) else linear.out_features
    ends = [(link.source, linear.in_features), (link.target, width)]
    if link.residual is not None:
        ends.append((link.residual, width))
    for index, expected in ends:
        if not 0 <= index < len(widths) or widths[index] != expected:
            raise ValueError(f"buffer {index} of {widths} is not {expected} wide")
    if link.offset < 0 or link.offset + linear.out_features > width:
        raise ValueError(f"{linear.out_features} outputs from column {link.offset} on do not fit {width} columns")
    if link.source == link.target:
        raise ValueError(f"a product cannot write buffer {link.source}, which it reads")
    if link.rotary is not None and link.rotary.width != width:
        raise ValueError(f"heads fill {link.rotary.width} of {width} columns")


def _check_columns(links: list[ChainLink], widths: tuple[int, ...]) -> None:
    """Raise ValueError unless adjacent links that write a buffer write all its columns, in order, each once."""
    end = 0
    for index, link in enumerate(links):
        end += link.linear.out_features
        whole = end == widths[link.target]
        follows = index + 1 < len(links) and links[index + 1].target == link.target and links[index + 1].offset == end
        if link.offset != end - link.linear.out_features or not (whole or follows):
            raise ValueError(f"buffer {link.target} is not {end} wide, and no link writes the columns from {end} on")
        end = 0 if whole else end
