"""The parts of run.py: tests of bits first, then figures, each by turns with what it is compared with."""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from models import Model, torch_form
from torch import Tensor

from headstart.model.kernels.library import KernelLibrary, load_kernels, runnable_variants
from headstart.model.kernels.packed import BLOCKS
from headstart.model.layers.linear import FusedLinear, WeightForm
from headstart.model.layers.quantise import quantise_weight
from headstart.model.weights.gguf.block_formats import FORMATS, PackedTensor, row_bytes

TWIN = "amx_twin"
OTHER = next(name for name in runnable_variants() if name not in ("amx", TWIN))  # what is taken without tiles
ROWS = (1, 4, 16, 32, 128, 512, 2048)
COPIES_BYTES = 160 << 20  # of each weight, used one after the other, so that it comes from memory as in a model
# N, K, gated: llama-100m, its head, Qwen3-0.6B, and K above 2,048
SHAPES = (
    (1280, 768, False),
    (768, 768, False),
    (4096, 768, True),
    (768, 2048, False),
    (32000, 768, False),
    (6144, 1024, True),
    (1024, 3072, False),
    (2048, 6144, False),
)
# The same of quantised weights, beside those of bf16 on tiles.
SHAPES_OF_FEW_BITS = ((4096, 768, True), (768, 2048, False), (6144, 1024, True), (2048, 6144, False))
ROWS_OF_FEW_BITS = (1, 2, 4, 8, 16, 32, 128, 512)
# name -> exponents of a, of b, of c, part of infinities and NaNs
NUMBERS = {
    "usual": ((120, 130), (115, 125), (110, 130), 0.0),
    "all exponents": ((0, 254), (0, 254), (0, 254), 0.0),
    "denormal inputs": ((0, 2), (120, 254), (0, 130), 0.0),
    "products about 2^-126": ((55, 70), (55, 70), (0, 4), 0.0),
    "sums about 2^-126": ((60, 66), (60, 66), (0, 1), 0.0),
    "overflow": ((180, 200), (180, 200), (250, 254), 0.0),
    "infinite and NaN": ((100, 150), (100, 150), (100, 150), 0.003),
}


class Machine(NamedTuple):
    """The variant that is measured, and the numbers of threads."""

    variant: str
    threads: list[int]

    def kernels(self, variant: str = "") -> KernelLibrary:
        found = load_kernels(variant or self.variant)
        assert found.kernels is not None, found.note
        return found.kernels


class Part(NamedTuple):
    run: Callable[[Machine], Any]
    is_test: bool = False


# ---- bits ------------------------------------------------------------------------------------------------------------


def operations(machine: Machine, count: int = 2000) -> dict[str, str]:
    """Return, for each kind of numbers, how many outputs of a tile operation differ from the twin's."""
    random, found = np.random.default_rng(1), dict[str, str]()
    for name, (of_a, of_b, of_c, special) in NUMBERS.items():
        a, b = bits(random, count * 512, of_a, special), bits(random, count * 512, of_b, special)
        c = bits(random, count * 256, of_c, special).astype(np.uint32) << 16
        c = (c | random.integers(0, 1 << 16, len(c), dtype=np.uint32)).view(np.float32)
        c[::3] = 0
        tiles, twin = (dots(machine.kernels(variant), a, b, c) for variant in (machine.variant, TWIN))
        unlike = (tiles.view(np.uint32) != twin.view(np.uint32)) & ~(np.isnan(tiles) & np.isnan(twin))
        found[name] = f"{int(unlike.sum())} of {len(c)}"
    for byte_bits, kind in ((7, np.int8), (8, np.uint8)):
        a, b = (random.integers(0, 256, count * 1024, np.uint8).view(of) for of in (kind, np.int8))
        c = random.integers(-(1 << 30), 1 << 30, count * 256, np.int32)
        tiles, twin = (dots(machine.kernels(variant), a, b, c, byte_bits) for variant in (machine.variant, TWIN))
        found[f"bytes, {np.dtype(kind)}"] = f"{int((tiles != twin).sum())} of {len(c)}"
    return found


def bits(random: np.random.Generator, count: int, exponents: tuple[int, int], special: float) -> np.ndarray:
    """Return bf16 as bits, with biased exponents in this range; `special`: the part that are infinite or NaN."""
    exponent = random.integers(exponents[0], exponents[1] + 1, count)
    exponent = np.where(random.random(count) < special, 255, exponent)
    fraction = np.where((exponent == 255) & (random.random(count) < 0.5), 0, random.integers(0, 128, count))
    return (random.integers(0, 2, count) << 15 | exponent << 7 | fraction).astype(np.uint16)


def dots(kernels: KernelLibrary, a: np.ndarray, b: np.ndarray, c: np.ndarray, byte_bits: int = 0) -> np.ndarray:
    out = c.copy()
    kernels.library.headstart_tile_dot(a.ctypes.data, b.ctypes.data, out.ctypes.data, len(out) // 256, byte_bits)
    return out


def exact_rows(machine: Machine, quantization: str = "none") -> dict[str, Any]:
    """Return how many rows in batches have other bits than alone, and than the twin's; errors beside float64.

    Rows of quantised weights are compared with those of the variant without tiles too: their sums are integers.
    """
    beside = (TWIN,) if quantization == "none" else (TWIN, OTHER)
    forms = {name: WeightForm(machine.kernels(name), quantization) for name in (machine.variant, *beside)}
    compared = differing = 0
    unlike, errors = dict.fromkeys(beside, 0), list[float]()
    most = 200 if machine.variant == TWIN else 2100
    for outputs, inputs, gated in ((96, 768, False), (64, 2048, True), (70, 200, False), (40, 6144, False)):
        torch.manual_seed(outputs)
        weight, x = torch.randn(outputs, inputs).bfloat16() / inputs**0.5, torch.randn(most, inputs).bfloat16()
        linears = {name: FusedLinear(weight.clone(), gated=gated, form=form) for name, form in forms.items()}
        linear, alone = linears[machine.variant], torch.empty(0)
        for threads in machine.threads:
            torch.set_num_threads(threads)
            alone = torch.cat([linear(x[i : i + 1]) for i in range(most)])
            for name in beside:
                unlike[name] += int((linears[name](x[:40]) != alone[:40]).any(1).sum())
            for count in (2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128, 250, 512, 700, 1030, 2100):
                for first in {0, most - count} if count <= most else ():
                    got = linear(x[first : first + count])
                    compared += count
                    differing += int((got != alone[first : first + count]).any(1).sum())
        if not gated:
            due = x.double() @ weight.double().T
            errors.append(float((alone.double() - due).norm() / due.norm()))
    others = {f"of 40 rows differ from {name}": number for name, number in unlike.items()}
    return {"rows compared": compared, "differ": differing, **others, "errors": errors}


def exact_blocks(machine: Machine) -> dict[str, Any]:
    """Return how many rows of weights in GGUF's blocks have other bits than in the twin and in registers."""
    random, found = np.random.default_rng(1), dict[str, Any]()
    x = torch.randn(330, 2304).bfloat16()
    for kind, bits in ((kind, bits) for kind in BLOCKS for bits in (8, 16)):
        form = FORMATS[kind]
        data = random.integers(0, 256, (96, row_bytes(kind, x.shape[1])), dtype=np.uint8)
        for at in {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2)):  # factors in fp16
            halves = (random.standard_normal((96, x.shape[1] // form.block_size, 1)) / 100).astype(np.float16)
            data.reshape(96, -1, form.block_bytes)[:, :, at : at + 2] = halves.view(np.uint8)
        weight = PackedTensor("weight", kind, (96, x.shape[1]), data)
        own, *others = (
            FusedLinear(weight, form=WeightForm(machine.kernels(name), activation_bits=bits))
            for name in (machine.variant, TWIN, OTHER)
        )
        unlike = [0, 0]
        for count in (1, 7, 8, 9, 16, 17, 31, 32, 100, 257, 330):
            got = own(x[:count])
            for i, other in enumerate(others):
                unlike[i] += int((other(x[:count]) != got).any(1).sum())
        found[f"{kind}, rows of {bits} bits"] = dict(zip((TWIN, OTHER), unlike, strict=True))
    return found


def exact_steps(machine: Machine) -> dict[str, Any]:
    """Return whether prompts in one step, in chunks, and after a shared prefix give the same logits, bit by bit."""
    length, model = 150 if machine.variant == TWIN else 1500, Model.small(machine.variant)
    found: dict[str, Any] = {}
    for threads in machine.threads:
        torch.set_num_threads(threads)
        tokens = model.tokens(length)
        whole = model.run([(tokens, 0, 0)])
        for size in (1, 7, 16, 33, 100, 512):
            if size > 1 or length < 500:
                logits = whole
                for start in range(0, length, size):
                    logits = model.run([(tokens[start : start + size], start, 1)])
                found[f"chunks of {size}, {threads} threads"] = bool(torch.equal(logits, whole))
        prefix = length // 16 * 16 - 16
        many = [(tokens[prefix:], prefix, 0)] * 40  # each on the blocks of the first run, then on its own
        rows = model.run(many, shared=prefix)
        found[f"40 behind one prefix, {threads} threads"] = all(torch.equal(row[None], whole) for row in rows)
    return found


# ---- figures ---------------------------------------------------------------------------------------------------------


def turns(forms: dict[str, Callable[[], Any]], seconds: float, least: int = 2, most: int = 200) -> dict[str, float]:
    """Return the median seconds of each form, taken by turns for about `seconds` in all."""
    for form in forms.values():
        form()
    times: dict[str, list[float]] = {name: [] for name in forms}
    end = time.perf_counter() + seconds
    while len(times[next(iter(times))]) < least or time.perf_counter() < end:
        for name, form in forms.items():
            began = time.perf_counter()
            form()
            times[name].append(time.perf_counter() - began)
        if len(times[next(iter(times))]) >= most:
            break
    return {name: median(own) for name, own in times.items()}


def bandwidth(machine: Machine) -> dict[str, float]:
    """Return GB/s of reads of 1 GiB, by threads."""
    data, found = torch.ones(1 << 27, dtype=torch.int64), dict[str, float]()
    for threads in machine.threads:
        read = machine.kernels().library.headstart_read
        seconds = turns({"read": lambda r=read, n=threads: r(data.data_ptr(), data.nbytes, n)}, 0.3)["read"]
        found[str(threads)] = round(data.nbytes / seconds / 1e9, 1)
    return found


class Copies:
    """Copies of one weight, multiplied one after the other."""

    def __init__(self, weight: Tensor | PackedTensor, form: WeightForm, *, gated: bool) -> None:
        def packed() -> FusedLinear:
            return FusedLinear(weight.clone() if isinstance(weight, Tensor) else weight, gated=gated, form=form)

        first = packed()
        count = max(2, COPIES_BYTES // first.weight_bytes)
        self._linears = [first, *(packed() for _ in range(count - 1))]
        self._next = 0

    def __call__(self, x: Tensor) -> Tensor:
        self._next = (self._next + 1) % len(self._linears)
        return self._linears[self._next](x)


def products(machine: Machine, quantization: str = "none", seconds: float = 0.12) -> dict[str, Any]:
    """Return, per shape, threads and rows, us of amx, and the other forms' times over it."""
    plain = quantization == "none"
    table: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {}
    for outputs, inputs, gated in SHAPES if plain else SHAPES_OF_FEW_BITS:
        torch.set_num_threads(max(machine.threads))
        weight = torch.randn(outputs, inputs).bfloat16() * 0.02
        is_int4 = quantization == "int4"
        stored = quantise_weight(weight, machine.kernels()) if is_int4 else weight  # once for all copies
        forms = {
            name: Copies(stored, WeightForm(machine.kernels(name), "none" if is_int4 else quantization), gated=gated)
            for name in (machine.variant, OTHER)
        }
        if plain:
            forms["torch"] = Copies(weight, torch_form(), gated=gated)
        else:
            forms["bf16"] = Copies(weight, WeightForm(machine.kernels()), gated=gated)
        for threads in machine.threads:
            torch.set_num_threads(threads)
            for count in ROWS if plain else ROWS_OF_FEW_BITS:
                if count > 512 and outputs > 8192:
                    continue
                x = torch.randn(count, inputs).bfloat16()
                found = turns({name: lambda f=form, x=x: f(x) for name, form in forms.items()}, seconds)
                own = found.pop(machine.variant)
                row: dict[str, float] = {
                    "us": round(own * 1e6),
                    "GFLOP/s": round(2e-9 * outputs * inputs * count / own),
                }
                for name, other in found.items():
                    row[f"x {name}"] = round(other / own, 2)
                    ratios.setdefault(f"x {name}, {threads} threads, {count} rows", []).append(other / own)
                name = f"{outputs} x {inputs}, {threads} threads, {count} rows"
                table[name] = row
                print(f"  {name}: {row}", file=sys.stderr, flush=True)
    summary = {name: f"{geometric_mean(own):.2f} ({min(own):.2f}..{max(own):.2f})" for name, own in ratios.items()}
    return {"geomean (least..most)": summary, "cells": table}


def attention(machine: Machine) -> dict[str, Any]:
    """Return ms and GFLOP/s of one layer's attention of a new prompt, llama-100m's heads, all variants by turns.

    In the last row most weights are far below the smallest number that is not denormal.
    """
    models = {variant: Model.random(variant, layers=1) for variant in runnable_variants() if variant != TWIN}
    found: dict[str, Any] = {}
    for threads in machine.threads:
        torch.set_num_threads(threads)
        for length, sharpness in (*((length, 1.0) for length in (128, 512, 1000, 2000, 4000)), (4000, 60.0)):
            calls = {variant: model.attention(length, sharpness) for variant, model in models.items()}
            times = turns(calls, 0.4)
            flops = 2 * length**2 * 768  # scores and values of half of all pairs
            found[f"{length} tokens{', sharp' if sharpness > 1 else ''}, {threads} threads"] = {
                variant: {"ms": round(own * 1e3, 3), "GFLOP/s": round(flops / own / 1e9)}
                for variant, own in times.items()
            }
    return found


def steps(machine: Machine) -> dict[str, Any]:
    """Return ms of whole steps of llama-100m, by turns, and whether the greedy tokens were the same."""
    models = {variant: Model.random(variant) for variant in (machine.variant, OTHER)}
    models["torch"] = Model.random(OTHER, form=torch_form())

    def same_tokens(calls: dict[str, Callable[[], Tensor]]) -> dict[str, bool]:
        first, *others = (call().argmax(-1) for call in calls.values())
        return {"same tokens": all(torch.equal(own, first) for own in others)}

    return _step_times(machine, models, 1.0, same_tokens)


def steps_few_bits(machine: Machine) -> dict[str, Any]:
    """Return ms of whole steps of llama-100m with quantised weights, with tiles and without, by turns with bf16."""
    models = {machine.variant: Model.random(machine.variant)}
    for variant, quantization in product((machine.variant, OTHER), ("int8", "int4")):
        form = WeightForm(load_kernels(variant).kernels, quantization)
        models[f"{variant}, {quantization}"] = Model.random(variant, form=form)
    return _step_times(machine, models, 0.6, lambda _: {})


def _step_times(
    machine: Machine,
    models: dict[str, Model],
    seconds: float,
    checks: Callable[[dict[str, Callable[[], Tensor]]], dict[str, bool]],
) -> dict[str, Any]:
    """Return ms of all kinds of steps by model, each measured for `seconds`, and what `checks` finds of the calls."""
    found: dict[str, Any] = {}
    for threads in machine.threads:
        torch.set_num_threads(threads)
        for name, work in WORK.items():
            calls = {form: work(model) for form, model in models.items()}
            checked = checks(calls)
            row = {form: round(own * 1e3, 2) for form, own in turns(calls, seconds).items()} | checked
            found[f"{name}, {threads} threads"] = row
            print(f"  {name}, {threads} threads: {row}", file=sys.stderr, flush=True)
    return found


def _decode(count: int) -> Callable[[Model], Callable[[], Tensor]]:
    def work(model: Model) -> Callable[[], Tensor]:
        tokens = model.tokens(1008)
        model.run([(tokens, 0, 0)])
        rows = [(model.tokens(1, seed=i), 1008, i) for i in range(count)]
        return lambda: model.run(rows, shared=1008)

    return work


def _prompt(length: int, cached: int = 0) -> Callable[[Model], Callable[[], Tensor]]:
    def work(model: Model) -> Callable[[], Tensor]:
        tokens = model.tokens(length)
        if cached:
            model.run([(tokens, 0, 0)])
        return lambda: model.run([(tokens[cached:], cached, 0)])

    return work


WORK = {
    "one stream": _decode(1),
    "32 rows behind one prefix": _decode(32),
    "last 100 of 1,000": _prompt(1000, cached=900),
    **{f"prompt of {length}": _prompt(length) for length in (128, 512, 1000, 4000)},
}
PARTS = {
    "operations": Part(operations, is_test=True),
    "rows": Part(exact_rows, is_test=True),
    "bits": Part(exact_steps, is_test=True),
    "read": Part(bandwidth),
    "steps": Part(steps),
    "steps_few_bits": Part(steps_few_bits),
    "attention": Part(attention),
    "products": Part(products),
    "rows_blocks": Part(exact_blocks, is_test=True),
    **{f"rows_{kind}": Part(partial(exact_rows, quantization=kind), is_test=True) for kind in ("int8", "int4")},
    **{f"products_{kind}": Part(partial(products, quantization=kind, seconds=0.08)) for kind in ("int8", "int4")},
}
