"""Checks on computed rows: whether they are finite, and their greatest number. In kernels, or in torch without them."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.model.kernels.library import KernelLibrary, num_kernel_threads


def are_chunks_finite(kernels: KernelLibrary | None, rows: Tensor, indptr: NDArray[np.int32]) -> list[bool]:
    """Return whether each run [indptr[i], indptr[i + 1]) of `rows` [T, H] is finite. Runs must not be empty."""
    if kernels is None or not _ours(rows) or rows.dtype != torch.bfloat16:
        good = torch.isfinite(rows.sum(-1, dtype=torch.float32))  # a sum is finite exactly if its terms are
        return np.logical_and.reduceat(good.cpu().numpy(), indptr[:-1]).tolist()
    if indptr.dtype != np.int32 or not indptr.flags.c_contiguous or indptr[-1] > len(rows):
        raise ValueError(f"runs {indptr} of {len(rows)} rows")
    found = np.empty(len(indptr) - 1, np.bool_)
    kernels.library.headstart_finite(rows.data_ptr(), rows.shape[1], indptr.ctypes.data, len(found), found.ctypes.data)
    return found.tolist()


def row_argmax_and_max(kernels: KernelLibrary | None, rows: Tensor) -> tuple[list[int], list[float]]:
    """Return, for each row of `rows` [R, V], the first index of its greatest number, and that number; NaN if any."""
    if kernels is None or not _ours(rows) or rows.dtype not in (torch.bfloat16, torch.float32):
        values, ids = rows.max(dim=-1)
        return ids.tolist(), values.tolist()
    count, size = rows.shape
    if not size:
        raise ValueError("rows without numbers have no greatest")
    ids, values = (ctypes.c_int64 * count)(), (ctypes.c_float * count)()
    is_bf16 = int(rows.dtype == torch.bfloat16)
    kernels.library.headstart_greatest(rows.data_ptr(), is_bf16, count, size, ids, values, num_kernel_threads())
    return list(ids), list(values)


def _ours(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.is_contiguous()
