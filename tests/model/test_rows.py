"""The greatest number of a row, and whether rows are finite: kernels against torch, on every kind of number."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model.guarded import Guards

from headstart.model.kernels.library import KernelLibrary, load_kernels, runnable_variants
from headstart.model.kernels.rows import are_chunks_finite, row_argmax_and_max

RUNNABLE = runnable_variants()
DTYPES = [torch.bfloat16, torch.float32]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.5, -3e38, 3e38, 1e-40, math.inf, -math.inf, math.nan]
numbers = st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=1, max_size=80)


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    found = load_kernels(request.param)
    if found.kernels is None:
        pytest.skip(found.note)
    return found.kernels


def assert_like_torch(kernels: KernelLibrary, rows: torch.Tensor) -> None:
    ids, values = row_argmax_and_max(kernels, rows)
    expected_ids, expected = row_argmax_and_max(None, rows)
    for id, value, expected_id, expected_value in zip(ids, values, expected_ids, expected, strict=True):
        assert math.isnan(value) == math.isnan(expected_value)
        if not math.isnan(value):
            assert (id, value) == (expected_id, expected_value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 33, 1024, 1025, 5000])
def test_the_first_of_the_greatest_is_found(kernels: KernelLibrary, size: int, dtype: torch.dtype) -> None:
    rows = torch.randn((5, size), generator=torch.Generator().manual_seed(size))
    rows[1] = -rows[1].abs()
    rows[2] = rows[2].round()  # many are equal
    rows[3] = -2.0
    rows[4, -1] = 100.0
    guards = Guards()
    assert_like_torch(kernels, guards.put(rows.to(dtype)))
    assert guards.intact()


@pytest.mark.parametrize("dtype", DTYPES)
@given(row=numbers)
def test_any_row_gives_what_torch_gives(dtype: torch.dtype, row: list[float]) -> None:
    for variant in RUNNABLE:
        found = load_kernels(variant).kernels
        if found is not None:
            assert_like_torch(found, torch.tensor([row, row[::-1]]).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_either_sign_are_equal_however_far_apart(kernels: KernelLibrary, dtype: torch.dtype) -> None:
    rows = torch.full((2, 3000), -1.0)
    rows[0, 5], rows[0, 2500] = -0.0, 0.0
    rows[1, 5], rows[1, 2500] = 0.0, -0.0
    assert row_argmax_and_max(kernels, rows.to(dtype)) == ([5, 5], [0.0, 0.0])


def test_many_rows_are_shared_out(kernels: KernelLibrary) -> None:
    rows = torch.randn((40, 4000), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_like_torch(kernels, rows)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_chunk_with_one_bad_number_is_not_finite(kernels: KernelLibrary, bad: float) -> None:
    rows = torch.full((6, 37), 3e38).bfloat16()
    rows[3, 36] = bad
    indptr = np.array([0, 1, 3, 5, 6], np.int32)
    guards = Guards()
    assert are_chunks_finite(kernels, guards.put(rows), indptr) == [True, True, False, True]
    assert are_chunks_finite(None, (rows / 100), indptr) == [True, True, False, True]


def test_rows_that_are_not_there_are_refused(kernels: KernelLibrary) -> None:
    with pytest.raises(ValueError, match="of 2 rows"):
        are_chunks_finite(kernels, torch.zeros((2, 4), dtype=torch.bfloat16), np.array([0, 3], np.int32))
    with pytest.raises(ValueError, match="no greatest"):
        row_argmax_and_max(kernels, torch.zeros((2, 0), dtype=torch.bfloat16))
