"""Products on AMX tiles have one order of sums: on any machine by the twin of the tile operation, with AMX by both.

test_linear.py, test_cpu_attention.py and test_exactness.py run all their cases on the twin too.
"""

from typing import Any

import numpy as np
import pytest
import torch
from model.test_blocks_linear import BLOCKS, blocks
from numpy.typing import NDArray

from headstart.core.errors import ConfigError
from headstart.model.kernels import library
from headstart.model.kernels.build import TWIN, BuildError
from headstart.model.kernels.library import NEEDED, KernelLibrary, KernelSearchResult, load_kernels, runnable_variants
from headstart.model.layers.linear import FusedLinear, WeightForm

Words, Floats = NDArray[np.uint16], NDArray[np.float32]
TILES = [name for name in ("amx", TWIN) if name in runnable_variants()]
WITHOUT = next(name for name in runnable_variants() if name not in TILES)
LEAST = 2.0**-126  # the smallest number that is not denormal
# name -> exponents of a, of b, of c, part of infinities and NaNs
NUMBERS = {
    "usual": ((120, 130), (115, 125), (110, 130), 0.0),
    "all exponents": ((0, 254), (0, 254), (0, 254), 0.0),
    "denormal inputs": ((0, 2), (120, 254), (0, 130), 0.0),
    "products about 2^-126": ((55, 70), (55, 70), (0, 4), 0.0),
    "overflow": ((180, 200), (180, 200), (250, 254), 0.0),
    "infinite and NaN": ((100, 150), (100, 150), (100, 150), 0.003),
}


def tiles(variant: str) -> KernelLibrary:
    found = load_kernels(variant)
    if found.kernels is None:
        pytest.skip(found.note)
    return found.kernels


def dot(kernels: KernelLibrary, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], byte_bits: int = 0) -> NDArray[Any]:
    """Return c [count, 16, 16] plus a [count, 16, 32] times b [count, 16 pairs, 16, 2]; of bytes, twice as many."""
    out = c.copy()
    assert kernels.library.headstart_tile_dot(a.ctypes.data, b.ctypes.data, out.ctypes.data, len(out), byte_bits)
    return out


def drawn(name: str, count: int) -> tuple[Words, Words, Floats]:
    random = np.random.default_rng(1)
    of_a, of_b, of_c, special = NUMBERS[name]

    def words(size: int, exponents: tuple[int, int]) -> Words:
        exponent = random.integers(exponents[0], exponents[1] + 1, size)
        exponent = np.where(random.random(size) < special, 255, exponent)
        fraction = np.where((exponent == 255) & (random.random(size) < 0.5), 0, random.integers(0, 128, size))
        return (random.integers(0, 2, size) << 15 | exponent << 7 | fraction).astype(np.uint16)

    c = words(count * 256, of_c).astype(np.uint32) << 16 | random.integers(0, 1 << 16, count * 256, dtype=np.uint32)
    sums = c.view(np.float32).reshape(count, 16, 16)
    return words(count * 512, of_a).reshape(count, 16, 32), words(count * 512, of_b).reshape(count, 16, 16, 2), sums


def float_of(words: Words) -> NDArray[np.float64]:
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def in_order(x: NDArray[np.float64], w: NDArray[np.float64], sums: Floats) -> Floats:
    """Return sums [.., M, N] plus x [.., M, K] times w [.., N, K] in the order of amx.h; K in whole steps of 32.

    A product of two bf16 is exact in float64, and so is its sum with a float32 of a similar size.
    """
    for step in range(0, x.shape[-1], 32):
        even, odd = (np.zeros_like(sums) for _ in range(2))
        for pair in range(step, step + 32, 2):
            even = (x[..., :, None, pair] * w[..., None, :, pair] + even).astype(np.float32)
            odd = (x[..., :, None, pair + 1] * w[..., None, :, pair + 1] + odd).astype(np.float32)
        sums = (sums + (even + odd)).astype(np.float32)
    return sums


def same(a: Floats, b: Floats) -> bool:
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("variant", TILES)
def test_an_operation_adds_even_and_odd_products_apart_then_both_to_the_sum(variant: str) -> None:
    a, b, c = drawn("usual", 60)
    w = float_of(b).swapaxes(1, 2).reshape(-1, 16, 32)
    found = dot(tiles(variant), a, b, c)
    assert same(found, in_order(float_of(a), w, c))
    in_one_chain = (c + float_of(a) @ w.swapaxes(1, 2)).astype(np.float32)
    assert not same(found, in_one_chain) and np.allclose(found, in_one_chain, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_results_below_the_least_normal_number_are_zeros_if_they_round_to_less(variant: str, sign: float) -> None:
    """The hardware decides after rounding with an unlimited exponent: 2^-126 - 2^-152 is 2^-126, - 2^-150 is 0."""
    for less, due in ((2.0**-152, LEAST), (2.0**-150, 0.0), (2.0**-133, 0.0), (0.0, LEAST)):
        a, b, c = np.zeros((1, 16, 32)), np.zeros((1, 16, 16, 2)), np.zeros((1, 16, 16), np.float32)
        a[0, :, 0], b[0, 0, :, 0] = sign * 2.0**-63, 2.0**-63  # even inputs of the first two pairs
        a[0, :, 2], b[0, 1, :, 0] = -sign * less * 2.0**60, 2.0**-60
        words = [(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
        found = dot(tiles(variant), words[0], words[1], c)
        assert (found == sign * due).all(), (less, found[0, 0, 0])


@pytest.mark.parametrize("variant", TILES)
def test_denormals_are_read_as_zeros(variant: str) -> None:
    a, b = np.full((1, 16, 32), 0x0040, np.uint16), np.full((1, 16, 16, 2), 0x7E00, np.uint16)
    c = np.full((1, 16, 16), 2.0**-130, np.float32)
    assert (dot(tiles(variant), a, b, c) == 0).all()


@pytest.mark.skipif("amx" not in TILES, reason="no AMX here")
@pytest.mark.parametrize("name", NUMBERS)
def test_tiles_and_their_twin_give_the_same_bits(name: str) -> None:
    a, b, c = drawn(name, 500)
    assert same(dot(tiles("amx"), a, b, c), dot(tiles(TWIN), a, b, c))


@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize("byte_bits", [7, 8])
def test_an_operation_on_bytes_adds_exact_integers(variant: str, byte_bits: int) -> None:
    random, kind = np.random.default_rng(byte_bits), np.int8 if byte_bits == 7 else np.uint8
    a, b = (random.integers(np.iinfo(t).min, np.iinfo(t).max, shape, t, endpoint=True)
            for t, shape in ((kind, (50, 16, 64)), (np.int8, (50, 16, 16, 4))))  # fmt: skip
    c = random.integers(-(1 << 30), 1 << 30, (50, 16, 16), np.int32)
    due = c + a.astype(np.int64) @ b.swapaxes(1, 2).reshape(50, 16, 64).astype(np.int64).swapaxes(1, 2)
    assert (dot(tiles(variant), a, b, c, byte_bits) == due).all()


def test_a_variant_without_tiles_says_so() -> None:
    for variant in runnable_variants():
        a, b, c = drawn("usual", 1)
        done = tiles(variant).library.headstart_tile_dot(a.ctypes.data, b.ctypes.data, c.ctypes.data, 1, 0)
        assert bool(done) == (variant in TILES)


@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 31), (70, 200), (64, 2100), (20, 4160)])
def test_a_product_has_one_order_for_every_number_of_rows(variant: str, outputs: int, inputs: int) -> None:
    """2,100 inputs and more are multiplied in pieces; 512 rows and more on two threads in blocks of their own."""
    torch.manual_seed(outputs)
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(700, inputs).bfloat16()
    linear, padding = FusedLinear(weight.clone(), form=WeightForm(tiles(variant))), (0, -inputs % 32)
    first, second = (torch.nn.functional.pad(rows, padding).double().numpy() for rows in (x[:40], weight))
    due = in_order(first, second, np.zeros((40, outputs), np.float32))
    together = linear(x)
    assert torch.equal(together[:40], torch.from_numpy(due).bfloat16())
    torch.testing.assert_close(together.double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-2 * inputs**0.5)
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 100, 257, 600):
        for first in (0, 700 - count):
            assert torch.equal(linear(x[first : first + count]), together[first : first + count]), (count, first)


def in_registers(on_tiles: FusedLinear, plain: FusedLinear, x: torch.Tensor) -> torch.Tensor:
    """Return the products of each row alone, after comparing them with those of the variant without tiles.

    Between variants NaN has no sign, in which processors differ, and subnormal numbers are zero: the instruction that
    rounds to bfloat16 makes them zero, and not every variant has it.
    """
    alone = torch.cat([on_tiles(row) for row in x.split(1)])
    found, due = (torch.where(rows.isnan(), torch.nan, rows) for rows in (alone, plain(x)))
    tiny = torch.finfo(torch.bfloat16).tiny
    found, due = (torch.where(rows.abs() < tiny, 0, rows).view(torch.int16) for rows in (found, due))
    assert torch.equal(found, due)
    return alone


@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(33, 1), (70, 63), (64, 513), (40, 1030), (70, 2100), (20, 4160), (32, 4867)]
)
def test_int8_on_tiles_gives_the_bits_of_products_in_registers(variant: str, outputs: int, inputs: int) -> None:
    """513 inputs and more are summed in pieces, 2,049 and more by pieces of rows; fewer than 16 rows in registers."""
    torch.manual_seed(outputs)
    weight, x = torch.randn(2 * outputs, inputs).bfloat16(), torch.randn(700, inputs).bfloat16()
    x[3] *= 1e30
    for gated in (False, True):
        on_tiles, plain = (
            FusedLinear(weight.clone(), gated=gated, form=WeightForm(tiles(name), "int8"))
            for name in (variant, WITHOUT)
        )
        due = in_registers(on_tiles, plain, x)
        for count in (2, 5, 13, 15, 16, 17, 31, 33, 48, 100, 257, 700):
            for first in (0, 700 - count):
                assert torch.equal(on_tiles(x[first : first + count]), due[first : first + count]), (count, first)


@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("bits", [8, 16])
def test_blocks_on_tiles_give_the_bits_of_products_in_registers(variant: str, kind: str, bits: int) -> None:
    """Fewer than 16 rows are multiplied in registers, and more than 256 in blocks; 5,120 inputs by pieces of rows."""
    for outputs, inputs in ((70, 768), (33, 5120)):
        x = torch.randn(330, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
        x[5, ::3] *= 1e-2  # less than 1/128 of the largest number is rounded
        x[6, 40], x[7], x[8], x[9] = torch.nan, 0, -3e38, 1e-38
        weight = blocks(kind, 2 * outputs, inputs)
        on_tiles, plain = (
            FusedLinear(weight, gated=inputs == 768, form=WeightForm(tiles(name), activation_bits=bits))
            for name in (variant, WITHOUT)
        )
        due = in_registers(on_tiles, plain, x)
        for count in (8, 15, 16, 17, 31, 100, 257, 330):
            for first in (0, 330 - count):
                found, expected = on_tiles(x[first : first + count]), due[first : first + count]
                assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), (count, first)


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor with AMX whose kernels are named and not compiled."""
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(NEEDED["amx"]))
    monkeypatch.setattr(library, "request_amx_tiles", lambda: True)
    monkeypatch.setattr(library, "cpuinfo_field", lambda name: "AuthenticAMD")
    monkeypatch.setattr(library, "packaged_library", lambda variant: variant)
    monkeypatch.setattr(library, "KernelLibrary", lambda variant, path: variant)
    return monkeypatch


def test_tiles_are_the_first_choice_if_the_system_grants_them(processor: pytest.MonkeyPatch) -> None:
    assert load_kernels.__wrapped__("").note == "amx" and load_kernels.__wrapped__("avx512_bf16").note == "avx512_bf16"
    processor.setattr(library, "request_amx_tiles", lambda: False)
    assert load_kernels.__wrapped__("").note == "avx512_bf16"
    choices = "avx512_bf16, avx512_vnni, avx512, avx2, amx_twin, none"
    with pytest.raises(ConfigError, match=f"cannot run it; choose {choices}"):
        load_kernels.__wrapped__("amx")


def test_intels_processors_do_without_dot_products_of_bf16(processor: pytest.MonkeyPatch) -> None:
    processor.setattr(library, "cpuinfo_field", lambda name: {"vendor_id": "GenuineIntel"}[name])
    processor.setattr(library, "request_amx_tiles", lambda: False)
    assert (
        load_kernels.__wrapped__("").note == "avx512_vnni"
        and load_kernels.__wrapped__("avx512_bf16").note == "avx512_bf16"
    )


def test_the_twin_is_never_chosen_but_may_be_asked_for(processor: pytest.MonkeyPatch) -> None:
    assert load_kernels.__wrapped__(TWIN).note == TWIN
    processor.setattr(library, "_packaged", lambda variant: variant == TWIN and KernelSearchResult(None, TWIN))

    def fails(*arguments: object, **settings: object) -> None:
        raise BuildError("no compiler")

    processor.setattr(library, "compile_kernels", fails)
    assert load_kernels.__wrapped__("") == KernelSearchResult(None, "none: no compiler")


def test_a_compiler_without_amx_or_bf16_leaves_the_next_variant(processor: pytest.MonkeyPatch) -> None:
    processor.setattr(library, "packaged_library", lambda variant: None)
    without = ["amx"]

    def build(variant: str, *rest: object, **settings: object) -> str:
        if variant in without:
            raise BuildError("g++ failed: unrecognised option")
        return variant

    processor.setattr(library, "compile_kernels", build)
    assert load_kernels.__wrapped__("").note == "avx512_bf16"
    without.append("avx512_bf16")
    assert load_kernels.__wrapped__("").note == "avx512_vnni"
