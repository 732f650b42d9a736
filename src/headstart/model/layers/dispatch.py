"""Dispatch: what multiplies the weights of a model on a CPU, and a test that rows do not depend on each other.

By invariant 15 (docs/invariants.md) a row's outputs must not depend on how many rows its step has. Our kernels divide
products alike for any number of rows. Torch divides them by that number, so reuse may change tokens: its products are
used only where there are no kernels, or if they are asked for.
"""

from collections.abc import Iterable

import torch

from headstart.model.kernels.build import TWIN
from headstart.model.kernels.library import KernelLibrary, kernel_library_in_use, num_kernel_threads
from headstart.model.layers.linear import FusedLinear

CHOICES = ("auto", "kernels", "torch")
PARTS = ((0, 1), (1, 4), (5, 13), (18, 32))  # begin and number of rows that are computed alone
MANY_ROWS, MANY_ON_TILES = 64, 256  # per thread: from here on our kernels divide the work by rows; see sizes.h
MOST_OUTPUTS = 1 << 24  # of all rows together, as far as every part has its rows


def linear_kernels_of_option(kernels: KernelLibrary | None, choice: str) -> KernelLibrary | None:
    """Return the kernels that are to multiply weights, or None for torch; `choice`: see CHOICES."""
    assert choice in CHOICES, choice
    return None if choice == "torch" else kernels


@torch.inference_mode()
def are_linears_batch_invariant(linears: Iterable[FusedLinear]) -> bool:
    """Return whether packed products give rows the same bits alone, in small steps and in a large one."""
    return all(_is_exact(linear) for linear in linears)


def _is_exact(linear: FusedLinear) -> bool:
    found, first = kernel_library_in_use(), linear.packed[0]
    on_tiles = found is not None and found.variant in ("amx", TWIN)
    count = (MANY_ON_TILES if on_tiles else MANY_ROWS) * num_kernel_threads() + 8
    count = max(min(count, MOST_OUTPUTS // linear.out_features), sum(PARTS[-1]))
    rows = torch.randn(count, first.in_features, generator=torch.Generator().manual_seed(0)).to(first.dtype)
    together = linear(rows)
    return all(torch.equal(linear(rows[at : at + num]), together[at : at + num]) for at, num in PARTS)
