"""The kernels of layers with a recurrent state: their twins in torch, and bits that depend on the tokens alone."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from model.guarded import Guards
from torch import Tensor

from headstart.model.kernels.library import KernelLibrary, load_kernels, runnable_variants
from headstart.model.kernels.packed import PackedNorm
from headstart.model.kernels.recurrence import (
    MixerWeights,
    StepRecurrentStates,
    apply_sigmoid_gate,
    run_matrix_mixer,
    short_convolution,
)
from headstart.model.layers.recurrent import convolve_in_torch, delta_net_in_torch, mamba_in_torch, sigmoid
from headstart.model.step_inputs import RecurrentState
from headstart.model.weights.hybrid_config import MixerShape

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # key heads, value heads, key_dim, value_dim, tokens of the convolution
    MixerShape(2, 4, 8, 12, 4),
    MixerShape(1, 1, 128, 128, 4),
    MixerShape(3, 3, 33, 70, 1),
    MixerShape(1, 6, 17, 5, 2),
]
TWINS = {"delta": delta_net_in_torch, "mamba": mamba_in_torch}
OFFSET = 7  # of the layer's part of a state
LENGTHS = (75, 1, 21)  # of the sequences


@pytest.fixture(params=runnable_variants(), scope="module")
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    found = load_kernels(request.param)
    if found.kernels is None:
        pytest.skip(found.note)
    return found.kernels


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix_weights(shape: MixerShape, dtype: torch.dtype, kind: str) -> MixerWeights:
    heads = shape.num_value_heads
    rate, bias = -draw(heads, seed=2).exp(), draw(heads, seed=3)
    norm = PackedNorm(1 + 0.1 * draw(shape.value_dim if kind == "delta" else shape.value_width, seed=4).to(dtype), 1e-6)
    made = MixerWeights(draw(shape.conv_size, shape.num_channels, seed=1), rate, bias, norm)
    if kind == "delta":
        return made
    return made._replace(convolution_bias=draw(shape.num_channels, seed=8), skip=draw(heads, seed=9))


def matrix_rows(shape: MixerShape, dtype: torch.dtype, kind: str) -> Tensor:
    rates = (2 if kind == "delta" else 1) * shape.num_value_heads
    return draw(sum(LENGTHS), shape.num_channels + shape.value_width + rates, seed=5, dtype=dtype)


def states_of(
    guards: Guards, size: int, lengths: Sequence[int], places: Sequence[Sequence[int]]
) -> StepRecurrentStates:
    """States of sequences, each with copies to be saved behind `places`, in guarded memory."""
    rows, begin = list[RecurrentState](), 0
    for index, (length, own) in enumerate(zip(lengths, places, strict=True)):
        saves = tuple((at, guards.put(torch.zeros(size))) for at in own)
        rows.append(RecurrentState(begin, begin + length, guards.put(draw(size, seed=10 + index)), saves))
        begin += length
    return StepRecurrentStates(rows)


def tensors(states: StepRecurrentStates) -> list[Tensor]:
    return [tensor for row in states.rows for tensor in (row.state, *(saved for _, saved in row.saves))]


PLACES = ((16, 17, 75), (), (1,))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TWINS)
def test_a_matrix_mixer_equals_its_twin(
    kernels: KernelLibrary, shape: MixerShape, dtype: torch.dtype, kind: str
) -> None:
    weights, rows, guards = matrix_weights(shape, dtype, kind), matrix_rows(shape, dtype, kind), Guards()
    found, due = (states_of(guards, OFFSET + shape.num_state_elements + 3, LENGTHS, PLACES) for _ in range(2))
    expected = TWINS[kind](shape, weights, rows, due, OFFSET)
    guarded = weights._replace(convolution=guards.put(weights.convolution), rate=guards.put(weights.rate))
    outputs = run_matrix_mixer(kernels, shape, guarded, guards.put(rows), found, OFFSET)
    exact = dtype == torch.float32
    # In bfloat16 an input of the recurrence may be rounded to the other neighbour.
    torch.testing.assert_close(outputs, expected, atol=2e-5 if exact else 0.06, rtol=1e-4 if exact else 0.02)
    for one, other in zip(tensors(found), tensors(due), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5 if exact else 0.03, rtol=1e-4 if exact else 0.02)
    assert guards.intact()


@pytest.mark.parametrize(("taps", "channels"), [(3, 64), (1, 5), (4, 131), (2, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_short_convolution_equals_its_twin(
    kernels: KernelLibrary, taps: int, channels: int, dtype: torch.dtype, with_bias: bool
) -> None:
    guards, rows = Guards(), draw(sum(LENGTHS), 3 * channels, seed=5, dtype=dtype)
    weight, bias = draw(taps, channels, seed=1), draw(channels, seed=2) if with_bias else None
    found, due = (states_of(guards, OFFSET + (taps - 1) * channels, LENGTHS, PLACES) for _ in range(2))
    expected = convolve_in_torch(weight, bias, rows, due, OFFSET)
    outputs = short_convolution(kernels, guards.put(weight), bias, guards.put(rows), found, OFFSET)
    torch.testing.assert_close(outputs, expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0.01)
    for one, other in zip(tensors(found), tensors(due), strict=True):
        assert torch.equal(one, other)
    assert guards.intact()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_open_rows_as_torch_does(kernels: KernelLibrary, dtype: torch.dtype) -> None:
    guards, wide = Guards(), draw(9, 100, seed=1, dtype=dtype)
    rows, gates = draw(9, 37, dtype=dtype), wide[:, 60:97]
    found = guards.put(rows)
    apply_sigmoid_gate(kernels, found, gates)
    expected = rows * sigmoid(gates.float()).to(dtype)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 0.01)
    assert guards.intact()


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TWINS)
def test_no_chunk_batch_or_number_of_threads_changes_a_bit(
    kernels: KernelLibrary, shape: MixerShape, dtype: torch.dtype, kind: str
) -> None:
    weights, rows, rng = matrix_weights(shape, dtype, kind), matrix_rows(shape, dtype, kind), Random(1)
    size, taps = shape.num_state_elements, 3
    inner, weight = draw(len(rows), 3 * 131, seed=6, dtype=dtype), draw(taps, 131, seed=7)
    conv_size = (taps - 1) * 131
    together = states_of(Guards(), size + conv_size, LENGTHS, PLACES)
    outputs = run_matrix_mixer(kernels, shape, weights, rows.clone(), together, conv_size)
    convolved = short_convolution(kernels, weight, None, inner, together, 0)
    before = torch.get_num_threads()
    try:
        for row, begin in zip(together.rows, (0, 75, 76), strict=True):
            length = row.end - row.begin
            for threads in (1, 3):
                torch.set_num_threads(threads)
                alone = states_of(Guards(), size + conv_size, (75, 1, 21), ((), (), ())).rows[together.rows.index(row)]
                cuts = sorted({0, length, *(at for at, _ in row.saves), *(rng.randrange(length) for _ in range(4))})
                saved = dict(row.saves)
                for start, end in pairwise(cuts):
                    states = StepRecurrentStates([RecurrentState(0, end - start, alone.state)])
                    part = slice(begin + start, begin + end)
                    found = run_matrix_mixer(kernels, shape, weights, rows[part].clone(), states, conv_size)
                    assert torch.equal(found, outputs[part])
                    assert torch.equal(
                        short_convolution(kernels, weight, None, inner[part].contiguous(), states, 0), convolved[part]
                    )
                    if end in saved:
                        assert torch.equal(alone.state, saved[end])
                assert torch.equal(alone.state, row.state)
    finally:
        torch.set_num_threads(before)


def test_arguments_that_do_not_fit_are_refused(kernels: KernelLibrary) -> None:
    shape = SHAPES[0]
    weights, rows = matrix_weights(shape, torch.float32, "delta"), matrix_rows(shape, torch.float32, "delta")
    states = states_of(Guards(), shape.num_state_elements, LENGTHS, ((), (), ()))
    with pytest.raises(ValueError, match=r"for \d+ rows and 625 numbers"):
        run_matrix_mixer(kernels, shape, weights, rows, states, 1)
    with pytest.raises(ValueError, match=f"states of {len(rows)} rows .* for {len(rows) - 1} rows"):
        run_matrix_mixer(kernels, shape, weights, rows[:-1], states, 0)
    with pytest.raises(ValueError, match="norm is"):
        run_matrix_mixer(kernels, shape, matrix_weights(shape, torch.bfloat16, "delta"), rows, states, 0)
    with pytest.raises(ValueError, match="rows is"):
        run_matrix_mixer(kernels, shape, matrix_weights(shape, torch.float32, "mamba"), rows, states, 0)
    with pytest.raises(ValueError, match="skip is"):
        run_matrix_mixer(kernels, shape, weights._replace(skip=draw(3)), rows[:, 4:].contiguous(), states, 0)
    with pytest.raises(ValueError, match="bfloat16 and float32"):
        run_matrix_mixer(kernels, shape, weights, rows.double(), states, 0)
    with pytest.raises(ValueError, match="and 1020 numbers"):
        short_convolution(kernels, draw(3, 60), None, draw(sum(LENGTHS), 180), states, 900)
    with pytest.raises(ValueError, match="gates"):
        apply_sigmoid_gate(kernels, draw(3, 4), draw(3, 5))


def test_a_table_of_chunks_out_of_order_is_refused() -> None:
    state = torch.zeros(4)
    for rows in (
        [RecurrentState(1, 2, state)],
        [RecurrentState(0, 0, state)],
        [RecurrentState(0, 2, state, ((2, state), (1, state)))],
        [RecurrentState(0, 2, state, ((3, state),))],
        [RecurrentState(0, 2, state, ((0, state),))],
    ):
        with pytest.raises(ValueError, match="a chunk"):
            StepRecurrentStates(rows)
    with pytest.raises(ValueError, match="state is"):
        StepRecurrentStates([RecurrentState(0, 1, state), RecurrentState(1, 2, torch.zeros(5))])
