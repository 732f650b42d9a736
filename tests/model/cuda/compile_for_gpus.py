"""Compiles the kernels of Triton attention as they are launched, for GPUs that need not be there; prints their sizes.

A program of its own: the tests beside it run in Triton's interpreter.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headstart.model.cuda import triton_attention, triton_rotary
from headstart.model.cuda.triton_attention import LayerScoring, allocate_partial_results, tile_shapes

GPUS = {80: 166_912, 86: 101_376, 90: 232_448}  # compute capability, without its point: shared memory of a program
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
META = torch.device("meta")


class Compiling:
    """In place of a kernel: compiles it for the arguments that it is launched with."""

    def __init__(self, kernel: Any, capability: int, found: list[int]) -> None:
        self.kernel, self.capability, self.found = kernel, capability, found

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *values: Any, num_warps: int, num_stages: int = 3, **options: Any) -> None:
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for index, (parameter, value) in enumerate(zip(self.kernel.params, values, strict=True)):
            if parameter.is_constexpr:
                signature[parameter.name], constants[index,] = "constexpr", value
                continue
            kind = TYPES[value.dtype] if isinstance(value, Tensor) else "i32" if isinstance(value, int) else "fp32"
            signature[parameter.name] = kind
            if kind != "fp32":
                attributes[index,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        options |= {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        self.found.append(compiled.metadata.shared)


def compile_all(capability: int, dim: int, dtype: torch.dtype) -> list[int]:
    """Return the shared memory of a program of each launch of a layer."""
    found: list[int] = []
    kernels = {"_attend": triton_attention, "_merge": triton_attention, "_append": triton_rotary}
    before = {name: getattr(module, name) for name, module in kernels.items()}
    for name, module in kernels.items():
        setattr(module, name, Compiling(before[name], capability, found))
    pdl = capability >= 90
    kv = tuple(torch.empty(9, 2, 16, dim, dtype=dtype, device=META) for _ in range(2))
    rows, out = (torch.empty(5, heads, dim, dtype=dtype, device=META) for heads in (2, 8))
    parts, ints = allocate_partial_results(9, 8, 2, dim, META), torch.empty(99, dtype=torch.int32, device=META)
    scoring = LayerScoring(1.0, 128, 30.0, torch.empty(8, device=META))
    common = (out, kv, out, parts, ints, ints, ints, scoring)
    single, tile = tile_shapes(dim, dtype, GPUS[capability])
    triton_rotary.append_kv(rows, rows, ints, kv, pdl=pdl)
    triton_attention.launch_attention(*common, single, single=True, programs=4, pdl=pdl)
    triton_attention.launch_attention(*common, tile, single=False, programs=4, pdl=pdl)
    triton_attention.merge_partial_results(parts, out, ints, ints, scoring.sinks, pdl=pdl)
    for name, module in kernels.items():
        setattr(module, name, before[name])
    return found


if __name__ == "__main__":
    print(json.dumps([
        {"capability": capability, "dim": dim, "dtype": str(dtype), "limit": limit,
         "shared": compile_all(capability, dim, dtype)}
        for capability, limit in GPUS.items()
        for dim, dtype in ((80, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32))
    ]))  # fmt: skip
