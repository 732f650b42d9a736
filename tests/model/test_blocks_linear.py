"""Weights in blocks, as in GGUF files: the kernels multiply by exactly the numbers that the reference unpacks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model.guarded import Guards
from model.test_linear import RUNNABLE, assert_near, random
from torch import Tensor

from headstart.model.kernels.chain import ChainBuffers, ChainLink, LinearChain
from headstart.model.kernels.library import KernelLibrary, load_kernels
from headstart.model.kernels.packed import BLOCKS, PackedLinear
from headstart.model.layers.layer_ops import RMSNorm
from headstart.model.layers.linear import FusedLinear, WeightForm
from headstart.model.layers.quantise import quantise_weight
from headstart.model.weights.gguf.block_formats import FORMATS, PackedTensor, dequantise, row_bytes

FORMS = [(kind, 16) for kind in BLOCKS] + [(kind, 8) for kind in BLOCKS if kind != "Q8_0"]  # kind, bits of activations
HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}  # bytes of a block that are fp16; others: 0 and 2
OUTPUTS = 70


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    found = load_kernels(request.param)
    if found.kernels is None:
        pytest.skip(found.note)
    return found.kernels


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> PackedTensor:
    """A weight of random bits, with scales of about 0.01."""
    rng, form = np.random.default_rng(seed), FORMATS[kind]
    data = rng.integers(0, 256, (rows, row_bytes(kind, columns)), dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2)):
        halves = (rng.standard_normal((rows, columns // form.block_size, 1)) / 100).astype(np.float16)
        data.reshape(rows, -1, form.block_bytes)[:, :, at : at + 2] = halves.view(np.uint8)
    return PackedTensor("weight", kind, (rows, columns), data)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return rows [T, K] as a product reads them, in fp32: those of 8 bits in steps of 1/127 of the largest of 32."""
    if bits == 16:
        return x.float()
    groups = x.float().view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, 0)
    return ((groups * inverse).round() * (largest / 127)).view(x.shape)


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_weights_of_a_product_are_bit_equal_to_the_reference(kernels: KernelLibrary, kind: str) -> None:
    """A row with a single 1 reads one column of the weight, rounded to bfloat16 only by the output."""
    weight = blocks(kind, OUTPUTS, 512)
    expected = dequantise(weight).bfloat16()
    layer = FusedLinear(weight, form=WeightForm(kernels))
    assert torch.equal(layer(torch.eye(512).bfloat16()).T, expected)
    assert torch.equal(layer(4 * torch.eye(512).bfloat16()[:3]).T, 4 * expected[:, :3])


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_that_are_looked_up_are_bit_equal_to_the_reference(kernels: KernelLibrary, kind: str) -> None:
    weight = blocks(kind, OUTPUTS, 512)
    ids = torch.tensor([69, 0, 31, 32, 69, *range(OUTPUTS)])
    found = PackedLinear(kernels, weight).look_up_rows(ids)
    assert torch.equal(found.view(torch.int16), dequantise(weight, torch.bfloat16)[ids].view(torch.int16))


@pytest.mark.parametrize("kind", [kind for kind, bits in FORMS if bits == 8])
def test_activations_of_8_bits_read_the_weights_too(kernels: KernelLibrary, kind: str) -> None:
    """127 times a 127th may be one fp32 step from 1, so a weight may be rounded to the neighbouring bfloat16."""
    weight = blocks(kind, OUTPUTS, 512)
    expected = dequantise(weight).bfloat16()
    found = FusedLinear(weight, form=WeightForm(kernels, activation_bits=8))(torch.eye(512).bfloat16()).T
    assert (found - expected).abs().le(expected.abs() / 128).all()
    assert found.eq(expected).float().mean() > 0.99


@pytest.mark.parametrize("kind", [kind for kind, bits in FORMS if bits == 8])
def test_the_greatest_integers_fit_the_sums_of_8_bit_activations(kernels: KernelLibrary, kind: str) -> None:
    """All integers of the weights are the largest ones, and all numbers of a row are equal."""
    weight = blocks(kind, OUTPUTS, 512)
    block = weight.data.reshape(OUTPUTS, -1, FORMATS[kind].block_bytes)
    scales = {at + i for at in HALVES.get(kind, (0, 2)) for i in (0, 1)}
    block[:, :, [i for i in range(FORMATS[kind].block_bytes) if i not in scales]] = 0xFF
    if kind == "Q6_K":
        block[:, :, 192:208] = 0x7F  # signed
    layer, whole = FusedLinear(weight, form=WeightForm(kernels, activation_bits=8)), dequantise(weight)
    for sign in (1, -1):
        x = sign * torch.ones(7, 512).bfloat16()
        exact = F.linear(x.float(), whole)
        assert (layer(x).float() - exact).abs().max() < exact.abs().max() / 200


@pytest.mark.parametrize(("kind", "bits"), FORMS)
@pytest.mark.parametrize("columns", [256, 1280, 5120])
def test_products_equal_those_with_unpacked_weights(kernels: KernelLibrary, kind: str, bits: int, columns: int) -> None:
    weight, bias, gain = blocks(kind, 2 * OUTPUTS, columns), random(2 * OUTPUTS), random(columns)
    whole, form, norm = dequantise(weight), WeightForm(kernels, activation_bits=bits), RMSNorm(gain, 1e-5)
    scale = columns**0.5 * float(whole.std())
    plain, normed = FusedLinear(weight, bias.clone(), form=form), FusedLinear(weight, norm=norm, form=form)
    gated = FusedLinear(weight, bias.clone(), gated=True, form=form)
    for count in (1, 2, 3, 7, 13, 150):
        x, residual = random(count, columns), random(count, 2 * OUTPUTS)
        exact = F.linear(rounded(x, bits), whole, bias.float())
        assert_near(plain(x), exact, scale / 3)
        assert_near(plain(x, residual), exact + residual.float(), scale + 3)  # rounded twice
        # A sum of squares in another order may turn a number into the next bfloat16, and so into the next integer.
        step = 0.0 if bits == 16 else float(norm(x).abs().max() / 127 * whole.abs().max())
        assert_near(normed(x), F.linear(rounded(norm(x), bits), whole), scale + step / 6e-3)
        small = (x / scale).bfloat16()
        both = F.linear(rounded(small, bits), whole, bias.float()).bfloat16().float()
        assert_near(gated(small), F.silu(both[:, :OUTPUTS]) * both[:, OUTPUTS:], 8)


@pytest.mark.parametrize(("kind", "bits"), FORMS)
def test_a_row_depends_neither_on_others_nor_on_threads(kernels: KernelLibrary, kind: str, bits: int) -> None:
    layer = FusedLinear(blocks(kind, 100, 2304), form=WeightForm(kernels, activation_bits=bits))
    x, before = random(330, 2304), torch.get_num_threads()
    together = layer(x)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), together)
            for rows in (slice(0, 1), slice(3, 16), slice(20, 40), slice(50, 180)):
                assert torch.equal(layer(x[rows].contiguous()), together[rows])
        for count in range(1, 14):  # each has a pass of its own
            assert torch.equal(layer(x[:count]), together[:count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 16), ("Q6_K", 16), ("Q4_K", 8), ("Q5_0", 8)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_leaves_the_others_alone(
    kernels: KernelLibrary, kind: str, bits: int, bad: float
) -> None:
    layer, x = FusedLinear(blocks(kind, 50, 256), form=WeightForm(kernels, activation_bits=bits)), random(13, 256)
    clean = layer(x)
    x[1, 33] = bad
    found = layer(x)
    assert not found[1].isfinite().any()
    others = [row for row in range(13) if row != 1]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize(("kind", "bits"), FORMS)
def test_kernels_stay_within_their_buffers(kernels: KernelLibrary, kind: str, bits: int) -> None:
    guards = Guards()
    linear = PackedLinear(kernels, blocks(kind, 2 * OUTPUTS, 512), gated=True, activation_bits=bits)
    widths = (512, OUTPUTS, OUTPUTS)
    chain = LinearChain(kernels, [ChainLink(linear, 0, 1, residual=2)], widths)
    for count in (1, 2, 5, 12, 13, 140):
        buffers = ChainBuffers(count, widths)
        for index, width in enumerate(widths):
            buffers[index] = guards.put(random(count, width))
        scratch = guards.put(torch.zeros(-(-chain.allocate_scratch(count).numel() // 4)))
        chain(buffers, scratch)
        assert guards.intact() and buffers[1].isfinite().all()


def test_parts_of_different_formats_make_one_product(kernels: KernelLibrary) -> None:
    """As queries, keys and values of a file whose values have more bits."""
    parts = [blocks(kind, rows, 256) for kind, rows in [("Q4_K", 64), ("Q4_K", 20), ("Q6_K", 20), ("Q8_0", 3)]]
    bias, whole = random(107), torch.cat([dequantise(part) for part in parts])
    layer = FusedLinear(parts, bias, norm=RMSNorm(torch.ones(256).bfloat16(), 0.0), form=WeightForm(kernels))
    assert len(layer.packed) == 3
    for count in (1, 5, 300):
        x, residual = random(count, 256), random(count, 107)
        exact = F.linear(RMSNorm(torch.ones(256).bfloat16(), 0.0)(x).float(), whole, bias.float())
        assert_near(layer(x), exact, float(exact.std()))
        assert_near(layer(x, residual), exact + residual.float(), 4 * float(exact.std()))
    gated = FusedLinear([parts[0], blocks("Q6_K", 64, 256)], gated=True, form=WeightForm(kernels))
    assert gated.out_features == 64 and gated(random(2, 256)).isfinite().all()


def test_in_fp32_and_without_kernels_the_unpacked_weights_are_used(kernels: KernelLibrary) -> None:
    weight, x = blocks("Q4_K", 40, 512), torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).double()
    exact = F.linear(x, dequantise(weight).double())
    for form in (WeightForm(kernels, dtype=torch.float32), WeightForm(None, dtype=torch.float32)):
        layer = FusedLinear(weight, form=form)
        assert all(part.dtype == torch.float32 for part in layer.packed) and bool(layer.packed) == bool(form.kernels)
        assert (layer(x.float()).double() - exact).abs().max() < 1e-6 * exact.abs().max()
    rounded = F.linear(x.bfloat16().float(), dequantise(weight, torch.bfloat16).float())
    assert_near(FusedLinear(weight)(x.bfloat16()), rounded, float(rounded.std()))


def test_packed_weights_take_little_more_than_their_bits(kernels: KernelLibrary) -> None:
    for kind, form in FORMATS.items():
        if kind in BLOCKS:
            size = FusedLinear(blocks(kind, 64, 1024), form=WeightForm(kernels)).weight_bytes
            assert size <= 1.04 * 64 * 1024 / form.block_size * form.block_bytes, kind


def test_rounding_to_four_bits_is_that_of_torch_and_better_than_the_whole_range(kernels: KernelLibrary) -> None:
    weight = random(50, 640)
    weight[3] = 0
    weight[4, :32] = 0.25
    errors = [error_of(quantise_weight(weight, found), weight) for found in (kernels, None)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)
    least, greatest = (getattr(weight.float().view(-1, 32), name)(1, keepdim=True) for name in ("amin", "amax"))
    step = torch.where(greatest > least, (greatest - least) / 15, 1)
    simple = ((weight.float().view(-1, 32) - least) / step).round() * step + least
    assert errors[0] < 0.95 * float((simple - weight.float().view(-1, 32)).norm())
    assert torch.equal(dequantise(quantise_weight(weight, kernels))[3], torch.zeros(640))
    assert dequantise(quantise_weight(weight, kernels))[4, :32].sub(0.25).abs().max() < 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stays_so(kernels: KernelLibrary, bad: float) -> None:
    weight = random(2, 64)
    weight[1, 40] = bad
    for found in (kernels, None):
        whole = dequantise(quantise_weight(weight, found))
        assert not whole[1, 32:].isfinite().any()
        assert whole[0].isfinite().all() and whole[1, :32].isfinite().all()


def error_of(rounded: PackedTensor, weight: Tensor) -> float:
    return float((dequantise(rounded) - weight.float()).norm())
