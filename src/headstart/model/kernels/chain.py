"""Chain: matrix products that follow each other, in one call and one parallel region of threads.

Between two attentions a decoder layer does nothing but this, row by row, so its threads need to be woken only once.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.model.kernels.library import Kernels, LinkDescriptor, threads
from headstart.model.kernels.packed import PackedLinear, RotaryHeads, check

Angles = tuple[Tensor, Tensor]
MAX_LINKS = 8  # see linear.cpp


class Link(NamedTuple):
    """linear(buffer `source`), plus buffer `residual` if there is one, into buffer `target`; then heads are turned.

    `residual` may be `target`: rows are then changed in place.
    """

    linear: PackedLinear
    source: int
    target: int
    residual: int | None = None
    turner: RotaryHeads | None = None


class Buffers:
    """Numbered rows [T, widths[i]] of bf16 that chains read and write. Kept alive, and addresses never go stale."""

    __slots__ = ("_tensors", "addresses", "count", "widths")

    def __init__(self, count: int, widths: tuple[int, ...]) -> None:
        self.count, self.widths = count, widths
        self._tensors: list[Tensor | None] = [None] * len(widths)
        self.addresses = (ctypes.c_void_p * len(widths))()

    def __getitem__(self, index: int) -> Tensor:
        tensor = self._tensors[index]
        assert tensor is not None, index
        return tensor

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        """Raises ValueError for rows of another shape or form."""
        check(tensor, f"buffer {index}", (self.count, self.widths[index]), torch.bfloat16)
        self._tensors[index] = tensor
        self.addresses[index] = tensor.data_ptr()

    def fill(self, *indices: int) -> None:
        """Gives buffers fresh memory."""
        for index in indices:
            self[index] = torch.empty((self.count, self.widths[index]), dtype=torch.bfloat16)


class Chain:
    """Links in their order. Raises ValueError for too many, or if they do not fit the buffers' widths."""

    __slots__ = ("_functions", "_kept", "_links", "_rotary_dim", "_widest", "widths")

    def __init__(self, kernels: Kernels, links: list[Link], widths: tuple[int, ...]) -> None:
        if len(links) > MAX_LINKS:
            raise ValueError(f"a chain has at most {MAX_LINKS} links, not {len(links)}")
        self.widths = widths
        self._functions = kernels.library
        self._kept = links  # the descriptors hold only addresses
        self._widest = max(link.linear.in_features for link in links)
        dims = {link.turner.rotary_dim for link in links if link.turner is not None}
        if len(dims) > 1:
            raise ValueError(f"heads are turned by one table of angles, not by those of {sorted(dims)} dimensions")
        self._rotary_dim = dims.pop() if dims else None
        for link in links:
            _check_link(link, widths)
        self._links = (LinkDescriptor * len(links))(
            *(
                LinkDescriptor(
                    linear=ctypes.addressof(link.linear.descriptor),
                    heads=None if link.turner is None else ctypes.addressof(link.turner.descriptor),
                    x=link.source,
                    y=link.target,
                    residual=-1 if link.residual is None else link.residual,
                )
                for link in links
            )
        )

    @property
    def rotary_dim(self) -> int | None:
        """Leading dimensions of a head that are turned; None: no heads are."""
        return self._rotary_dim

    @property
    def links(self) -> tuple[int, int]:
        """Address and number of its links, for who runs several chains in one call."""
        return ctypes.addressof(self._links), len(self._links)

    def scratch(self, count: int) -> Tensor:
        """Memory for calls with `count` rows, by as many threads as torch has now."""
        size = self._functions.headstart_scratch(self._widest, count, threads())
        return torch.empty(size, dtype=torch.uint8)

    def __call__(self, buffers: Buffers, scratch: Tensor, angles: Angles | None = None) -> None:
        """Runs all links on `buffers`, all filled. Heads take their `angles` as Rotary.angles gives them.

        Raises ValueError for buffers, scratch or angles that do not fit.
        """
        count, num_threads = buffers.count, threads()
        self.check(buffers, scratch)
        cosine = sine = None
        if self._rotary_dim is not None:
            if angles is None:
                raise ValueError("heads cannot be turned without angles")
            for name, tensor in zip(("cosine", "sine"), angles, strict=True):
                check(tensor, name, (count, 1, 2, self._rotary_dim // 2), torch.bfloat16)
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

    def check(self, buffers: Buffers, scratch: Tensor) -> None:
        """Raises ValueError unless all links can run on these."""
        count = buffers.count
        if buffers.widths != self.widths or not all(buffers.addresses):
            raise ValueError(f"buffers are {buffers.widths} wide and all to be filled; this chain needs {self.widths}")
        if scratch.nbytes < self._functions.headstart_scratch(self._widest, count, threads()):
            raise ValueError(f"scratch has {scratch.nbytes} bytes, too few for {count} rows of {self._widest}")


def _check_link(link: Link, widths: tuple[int, ...]) -> None:
    linear = link.linear
    ends = [(link.source, linear.in_features), (link.target, linear.out_features)]
    if link.residual is not None:
        ends.append((link.residual, linear.out_features))
    for index, width in ends:
        if not 0 <= index < len(widths) or widths[index] != width:
            raise ValueError(f"buffer {index} of {widths} is not {width} wide")
    if link.source == link.target:
        raise ValueError(f"a product cannot write buffer {link.source}, which it reads")
    if link.turner is not None and link.turner.width != linear.out_features:
        raise ValueError(f"heads fill {link.turner.width} of {linear.out_features} outputs")
