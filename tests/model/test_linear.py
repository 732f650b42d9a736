"""Linear equals torch in every form: dtypes, variants of the kernels, int8, odd sizes, gates, norms and residuals."""

import pytest
import torch
import torch.nn.functional as F
from model.guarded import Guards
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.kernels.chain import ChainBuffers, ChainLink, LinearChain
from headstart.model.kernels.library import KernelLibrary, load_kernels, runnable_variants
from headstart.model.kernels.packed import PackedLinear, PackedNorm, RotaryHeads
from headstart.model.layers.layer_ops import RMSNorm
from headstart.model.layers.linear import FusedLinear, WeightForm, can_pack_weight
from headstart.model.layers.quantise import can_quantise, quantise_weight
from headstart.model.layers.rotary import RopeConfig, RotaryEmbedding
from headstart.model.weights.gguf.block_formats import dequantise

RUNNABLE = runnable_variants()
SIZES = [
    (1, 1),
    (31, 2),
    (32, 7),
    (33, 64),
    (80, 129),
    (200, 1030),
    (70, 288),
]  # outputs, inputs: tails of tiles and of pairs
ROWS = [1, 2, 5, 12, 13, 30, 70]
WIDE = (70, 4867)  # enough inputs that a block of rows does not fit the second cache


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    found = load_kernels(request.param)
    if found.kernels is None:
        pytest.skip(found.note)
    assert found.kernels.variant == request.param
    return found.kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def assert_near(found: Tensor, expected: Tensor, scale: float) -> None:
    """bfloat16 `found` is `expected` up to its own rounding and that of sums of numbers as large as `scale`."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), rtol=1.2e-2, atol=6e-3 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 200])
def test_linear_without_kernels_equals_plain(dtype: torch.dtype, with_bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 24).to(dtype), torch.randn(rows, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = FusedLinear(weight.clone(), bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-5)


def test_fp32_rows_do_not_depend_on_their_neighbours() -> None:
    torch.manual_seed(1)
    layer, x = FusedLinear(torch.randn(64, 128)), torch.randn(130, 128)
    together = layer(x)
    for rows in (slice(0, 1), slice(3, 20), slice(100, 130)):
        torch.testing.assert_close(layer(x[rows]), together[rows], rtol=1e-5, atol=1e-5)


def test_only_bfloat16_on_a_cpu_is_packed_and_its_bytes_count_once() -> None:
    assert not can_pack_weight(torch.zeros(4, 4))
    layer = FusedLinear(torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))
    assert layer.weight_bytes == 4 * 8 * 2 + 4 * 2


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_fp32_kernels_equal_torch_and_rows_are_exact(
    kernels: KernelLibrary, outputs: int, inputs: int, quantization: str
) -> None:
    weight, bias, gain = (random(*shape).float() for shape in ((2 * outputs, inputs), (2 * outputs,), (inputs,)))
    rounded, scale = dequantised(weight, quantization, None), inputs**0.5
    form, norm = WeightForm(kernels, quantization, torch.float32), RMSNorm(gain, 1e-5)
    plain = FusedLinear(weight[:outputs].clone(), bias[:outputs].clone(), form=form)
    normed = FusedLinear(weight[:outputs].clone(), norm=norm, form=form)
    gated = FusedLinear(weight.clone(), bias.clone(), gated=True, form=form)
    x, residual = random(200, inputs).float() / scale, random(200, outputs).float()
    exact, both = F.linear(x, rounded[:outputs], bias[:outputs]), F.linear(x, rounded, bias)
    for found, due in (
        (plain(x), exact),
        (plain(x, residual), exact + residual),
        (normed(x), F.linear(norm(x), rounded[:outputs])),
        (gated(x), F.silu(both[:, :outputs]) * both[:, outputs:]),
    ):
        torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5 * scale)
    for layer in (plain, normed, gated):
        whole = layer(x)
        for count in ROWS:
            assert torch.equal(layer(x[7 : 7 + count]), whole[7 : 7 + count])


def test_rows_of_a_packed_fp32_weight_are_looked_up(kernels: KernelLibrary) -> None:
    weight, ids = random(70, 33).float(), torch.tensor([0, 69, 32, 31, 0])
    assert torch.equal(PackedLinear(kernels, weight).look_up_rows(ids), weight[ids])


def test_a_chain_has_rows_of_one_dtype(kernels: KernelLibrary) -> None:
    one, other = PackedLinear(kernels, random(8, 8).float()), PackedLinear(kernels, random(8, 8))
    with pytest.raises(ValueError, match="rows of one dtype"):
        LinearChain(kernels, [ChainLink(one, 0, 1), ChainLink(other, 1, 0)], (8, 8))
    buffers = ChainBuffers(1, (8, 8))
    buffers.allocate(0, 1)
    alone = LinearChain(kernels, [ChainLink(one, 0, 1)], (8, 8))
    with pytest.raises(ValueError, match="this chain computes in"):
        alone(buffers, alone.allocate_scratch(1))


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_kernels_equal_torch_for_all_that_surrounds_a_product(
    kernels: KernelLibrary, outputs: int, inputs: int, quantization: str
) -> None:
    weight, bias, gain = random(2 * outputs, inputs), random(2 * outputs), random(inputs)
    rounded = dequantised(weight, quantization, kernels)
    for count in ROWS:
        x, residual = random(count, inputs), random(count, outputs)
        form, scale = WeightForm(kernels, quantization), inputs**0.5
        exact = F.linear(x.float(), rounded[:outputs], bias[:outputs].float())
        plain = FusedLinear(weight[:outputs].contiguous(), bias[:outputs].clone(), form=form)
        assert_near(plain(x), exact, scale)
        assert_near(plain(x, residual), exact + residual.float(), scale * 4)  # rounded twice
        norm = RMSNorm(gain, 1e-5)
        normed = FusedLinear(weight[:outputs].contiguous(), norm=norm, form=form)
        assert_near(normed(x), F.linear(norm(x).float(), rounded[:outputs]), scale * 2)
        small = (x / scale).bfloat16()  # gates near 1: where a rounded gate is large, so is the difference it makes
        both = F.linear(small.float(), rounded, bias.float()).bfloat16().float()
        gated = FusedLinear(weight.clone(), bias.clone(), gated=True, form=form)
        assert_near(gated(small), F.silu(both[:, :outputs]) * both[:, outputs:], 8)


def dequantised(weight: Tensor, quantization: str, kernels: KernelLibrary | None) -> Tensor:
    """The weight in fp32 as a quantisation rounds it: int8 with one scale per output, int4 with one per 32 inputs."""
    if quantization == "none":
        return weight.float()
    if quantization == "int4" and can_quantise(weight):
        return dequantise(quantise_weight(weight, kernels))
    largest = weight.float().abs().amax(1, keepdim=True)
    return (weight.float() * (torch.tensor(127.0) / largest)).round() * (largest / 127)


def test_int8_without_kernels_is_the_same_rounding(kernels: KernelLibrary) -> None:
    weight, bias, x = random(70, 300), random(70), random(9, 300)
    weight[3] = 0  # an output without weights has no scale
    slow, fast = (FusedLinear(weight.clone(), bias, form=WeightForm(k, "int8")) for k in (None, kernels))
    assert slow.packed == () and fast.packed
    assert_near(fast(x), slow(x), 300**0.5)
    assert (fast(x)[:, 3] == bias[3]).all()
    assert slow.weight_bytes < 0.6 * FusedLinear(weight.clone(), bias).weight_bytes


def test_int8_sums_of_the_largest_numbers_do_not_overflow(kernels: KernelLibrary) -> None:
    weight, x = torch.ones(32, 4096).bfloat16(), torch.ones(1, 4096).bfloat16()
    for sign in (1, -1):
        found = FusedLinear(sign * weight, form=WeightForm(kernels, "int8"))(x)
        assert_near(found, torch.full((1, 32), sign * 4096.0), 1.0)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_leaves_the_others_alone(
    kernels: KernelLibrary, quantization: str, bad: float
) -> None:
    weight, norm = random(50, 70), RMSNorm(random(70), 1e-6)
    for count in (2, 13, 40):
        for layer in (
            FusedLinear(weight.clone(), form=WeightForm(kernels, quantization)),
            FusedLinear(weight.clone(), norm=norm, gated=True, form=WeightForm(kernels, quantization)),
        ):
            x = random(count, 70)
            clean = layer(x)
            x[1, 33] = bad
            found = layer(x)
            assert not found[1].isfinite().any()
            others = [row for row in range(count) if row != 1]
            assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 250), WIDE])
def test_a_row_does_not_depend_on_how_many_there_are_or_on_threads(
    kernels: KernelLibrary, outputs: int, inputs: int, quantization: str
) -> None:
    """Few rows are shared out by tiles, many by blocks of rows; rows too wide for the cache take tiles in groups."""
    layer, x = FusedLinear(random(outputs, inputs), form=WeightForm(kernels, quantization)), random(330, inputs)
    together, before = layer(x), torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), together)
            for rows in (slice(0, 1), slice(3, 16), slice(20, 40), slice(50, 180)):
                assert torch.equal(layer(x[rows].contiguous()), together[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_rows_too_wide_for_the_cache_equal_torch(kernels: KernelLibrary, quantization: str) -> None:
    outputs, inputs = WIDE
    weight, bias, x, residual = random(outputs, inputs), random(outputs), random(150, inputs), random(150, outputs)
    rounded = dequantised(weight, quantization, kernels)
    exact = F.linear(x.float(), rounded, bias.float())
    plain = FusedLinear(weight.clone(), bias, form=WeightForm(kernels, quantization))
    assert_near(plain(x), exact, inputs**0.5)
    assert_near(plain(x, residual), exact + residual.float(), inputs**0.5 * 4)
    gated, half, small = (
        FusedLinear(weight.clone(), gated=True, form=WeightForm(kernels, quantization)),
        outputs // 2,
        x / 70,
    )
    both = F.linear(small.float(), rounded).bfloat16().float()
    assert_near(gated(small), F.silu(both[:, :half]) * both[:, half:], 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [2112, 2111])  # whole cache lines, and not: stored as usual
def test_outputs_of_non_temporal_stores_equal_those_in_parts(
    kernels: KernelLibrary, dtype: torch.dtype, outputs: int
) -> None:
    weight, x, bias = (random(*shape).to(dtype) for shape in ((outputs, 40), (2000, 40), (outputs,)))
    layer = FusedLinear(weight, bias, form=WeightForm(kernels, dtype=dtype))
    whole = layer(x)  # more than NON_TEMPORAL_BYTES in kernels/sizes.h
    assert whole.nbytes > 8 << 20
    assert torch.equal(whole, torch.cat([layer(x[i : i + 250]) for i in range(0, 2000, 250)]))


@pytest.mark.parametrize("count", [5, 40, 300])
def test_a_chain_gives_what_its_links_give_one_by_one(kernels: KernelLibrary, count: int) -> None:
    first, second = (PackedLinear(kernels, random(outputs, inputs)) for outputs, inputs in [(120, 64), (64, 120)])
    widths, before = (64, 120, 64), torch.get_num_threads()
    alone, together = ChainBuffers(count, widths), ChainBuffers(count, widths)
    links = [ChainLink(first, 0, 1), ChainLink(second, 1, 2, residual=0), ChainLink(first, 2, 1)]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for buffers in (alone, together):
                buffers[0] = random(count, 64)
                buffers.allocate(1, 2)
            for chain in (LinearChain(kernels, [link], widths) for link in links):
                chain(alone, chain.allocate_scratch(count))
            whole = LinearChain(kernels, links, widths)
            whole(together, whole.allocate_scratch(count))
            assert torch.equal(alone[1], together[1]) and torch.equal(alone[2], together[2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), [*SIZES, WIDE])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_kernels_neither_read_nor_write_beside_their_buffers(
    kernels: KernelLibrary, outputs: int, inputs: int, quantization: str
) -> None:
    guards = Guards()
    norm = PackedNorm(guards.put(random(inputs)), 1e-5)
    weight, bias = guards.put(random(2 * outputs, inputs)), guards.put(random(2 * outputs))
    stored = quantise_weight(weight, kernels) if quantization == "int4" and can_quantise(weight) else weight
    int8 = quantization != "none" and stored is weight
    linear = PackedLinear(kernels, stored, bias, norm=norm, gated=True, int8=int8)
    widths = (inputs, outputs, outputs)
    chain = LinearChain(kernels, [ChainLink(linear, 0, 1, residual=2)], widths)
    for count in (*ROWS, 140):
        buffers = ChainBuffers(count, widths)
        plain = [random(count, inputs), torch.zeros(count, outputs).bfloat16(), random(count, outputs)]
        for index, tensor in enumerate(plain):
            buffers[index] = guards.put(tensor)
        scratch = guards.put(torch.zeros(-(-chain.allocate_scratch(count).numel() // 4)))
        chain(buffers, scratch)
        assert guards.intact()
        assert buffers[1].isfinite().all()
        assert torch.equal(buffers[0], plain[0]) and torch.equal(buffers[2], plain[2])


@pytest.mark.parametrize("rotary_dim", [20, 12, 2])
@pytest.mark.parametrize("with_norms", [False, True])
def test_heads_are_normalised_and_rotated_as_by_torch(
    kernels: KernelLibrary, rotary_dim: int, with_norms: bool
) -> None:
    weight, norms = random(140, 30), (RMSNorm(random(20), 1e-5), RMSNorm(random(20, seed=1), 1e-3))
    packed = [norm.packed if with_norms else None for norm in norms]
    rotary_heads = RotaryHeads(
        num_queries=3, num_keys=2, head_dim=20, rotary_dim=rotary_dim, query_norm=packed[0], key_norm=packed[1]
    )
    linear = PackedLinear(kernels, weight)
    rotated = LinearChain(kernels, [ChainLink(linear, 0, 1, rotary=rotary_heads)], (30, 140))
    rotary = RotaryEmbedding(RopeConfig("default", 1e4, rotary_dim, 512, 512), torch.bfloat16, torch.device("cpu"))
    for count in (1, 5, 40):
        angles = rotary.cos_sin(torch.arange(7, 7 + count))
        buffers = ChainBuffers(count, (30, 140))
        buffers[0] = random(count, 30)
        buffers.allocate(1)
        LinearChain(kernels, [ChainLink(linear, 0, 1)], (30, 140))(buffers, rotated.allocate_scratch(count))
        heads = buffers[1].view(count, 7, 20).clone()
        rotated(buffers, rotated.allocate_scratch(count), angles)
        queries, keys = heads[:, :3], heads[:, 3:5]
        if with_norms:
            queries, keys = norms[0](queries), norms[1](keys)
        expected = torch.cat((rotary.apply(torch.cat((queries, keys), dim=1), angles), heads[:, 5:]), dim=1)
        found = buffers[1].view(count, 7, 20)
        torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-2)
        assert torch.equal(found[:, 5:], heads[:, 5:])


def test_heads_beside_their_angles_and_norms_stay_untouched(kernels: KernelLibrary) -> None:
    guards, count = Guards(), 5
    norm = PackedNorm(guards.put(random(20)), 1e-5)
    rotary_heads = RotaryHeads(num_queries=3, num_keys=2, head_dim=20, rotary_dim=12, query_norm=norm, key_norm=norm)
    linear = PackedLinear(kernels, random(140, 30))
    chain = LinearChain(kernels, [ChainLink(linear, 0, 1, rotary=rotary_heads)], (30, 140))
    buffers = ChainBuffers(count, (30, 140))
    buffers[0], buffers[1] = guards.put(random(count, 30)), guards.put(random(count, 140))
    angles = tuple(guards.put(random(count, 1, 2, 6, seed=seed)) for seed in (1, 2))
    chain(buffers, chain.allocate_scratch(count), (angles[0], angles[1]))
    assert guards.intact() and buffers[1].isfinite().all()
    values = F.linear(buffers[0].float(), random(140, 30).float())[:, 100:]
    assert_near(buffers[1][:, 100:], values, 30**0.5)


@pytest.mark.parametrize("columns", [6, 7, 100])
def test_rows_that_are_looked_up_are_those_of_the_weight(kernels: KernelLibrary, columns: int) -> None:
    weight, ids = random(70, columns), torch.tensor([69, 0, 31, 32, 69])
    linear = PackedLinear(kernels, weight)
    assert torch.equal(linear.look_up_rows(ids), weight[ids])
    assert torch.equal(linear.look_up_rows(torch.arange(70)), weight)
    assert linear.look_up_rows(ids[:0]).shape == (0, columns)
    for missing in (-1, 70):
        with pytest.raises(ValueError, match=r"a row outside \[0, 70\)"):
            linear.look_up_rows(torch.tensor([0, missing]))
    for other in (PackedLinear(kernels, weight, int8=True), PackedLinear(kernels, weight, gated=True)):
        with pytest.raises(ValueError, match="does not hold the rows"):
            other.look_up_rows(ids)


def test_what_does_not_fit_a_kernel_is_refused(kernels: KernelLibrary) -> None:
    linear, layer = PackedLinear(kernels, random(8, 6)), FusedLinear(random(8, 6), form=WeightForm(kernels))
    with pytest.raises(ValueError, match=r"kernel takes dense torch.bfloat16 \[2, 6\]"):
        layer(random(2, 7))
    with pytest.raises(ValueError, match="dense"):
        layer(random(2, 6).float())
    with pytest.raises(ValueError, match="strides"):
        layer(random(6, 2).T)
    with pytest.raises(ValueError, match="buffer 2"):
        layer(random(2, 6), random(2, 9))
    with pytest.raises(ValueError, match="as many gates as ups"):
        PackedLinear(kernels, random(7, 6), gated=True)
    with pytest.raises(ValueError, match="bias"):
        PackedLinear(kernels, random(8, 6), random(7))
    narrow = PackedLinear(kernels, random(5, 6))
    with pytest.raises(ValueError, match="no link writes the columns from 5 on"):
        LinearChain(kernels, [ChainLink(narrow, 0, 1)], (6, 8))
    with pytest.raises(ValueError, match="no link writes the columns from 5 on"):
        LinearChain(kernels, [ChainLink(narrow, 0, 1, offset=3)], (6, 8))
    links: list[tuple[ChainLink, str]] = [
        (ChainLink(linear, 0, 2), "not 8 wide"),
        (ChainLink(linear, 1, 1), "not 6 wide"),
        (ChainLink(linear, 0, 1, residual=0), "not 8 wide"),
        (
            ChainLink(linear, 0, 1, rotary=RotaryHeads(num_queries=1, num_keys=1, head_dim=4, rotary_dim=4)),
            "heads fill 12",
        ),
        (ChainLink(narrow, 0, 1, offset=4), "5 outputs from column 4 on do not fit 8 columns"),
    ]
    for link, message in links:
        with pytest.raises(ValueError, match=message):
            LinearChain(kernels, [link], (6, 8))
    with pytest.raises(ValueError, match="at most 8 links, not 9"):
        LinearChain(kernels, [ChainLink(linear, 0, 1)] * 9, (6, 8))
    with pytest.raises(ValueError, match="cannot write"):
        LinearChain(kernels, [ChainLink(PackedLinear(kernels, random(6, 6)), 0, 0)], (6,))
    with pytest.raises(ValueError, match="must be even"):
        RotaryHeads(num_queries=1, num_keys=1, head_dim=4, rotary_dim=3)
    chain, buffers = LinearChain(kernels, [ChainLink(linear, 0, 1)], (6, 8)), ChainBuffers(3, (6, 8))
    buffers[0] = random(3, 6)
    with pytest.raises(ValueError, match="all to be filled"):
        chain(buffers, chain.allocate_scratch(3))
    buffers.allocate(1)
    with pytest.raises(ValueError, match="too few for 3 rows"):
        chain(buffers, chain.allocate_scratch(2))
    rotated = LinearChain(
        kernels, [ChainLink(PackedLinear(kernels, random(12, 6)), 0, 1, rotary=links[3][0].rotary)], (6, 12)
    )
    buffers = ChainBuffers(3, (6, 12))
    buffers.allocate(0, 1)
    with pytest.raises(ValueError, match="without angles"):
        rotated(buffers, rotated.allocate_scratch(3))
    with pytest.raises(ValueError, match="cosine"):
        rotated(buffers, rotated.allocate_scratch(3), (random(2, 1, 2, 2), random(3, 1, 2, 2)))


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match="HEADSTART_KERNELS=sse9 is not known"):
        load_kernels("sse9")
