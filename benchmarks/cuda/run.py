"""Everything that only a GPU can show, in one call: `python benchmarks/cuda/run.py OUT.json [PART ...]`.

Parts: bits, syncs, exact, tokens (or tokens:SHAPE), append, decodes, prefill, end, 7b, 0.6b, tune.
Without parts: all, in about eight minutes on an H100. Floors are measured in the same call. Each result is a line on
stdout and an entry of the JSON file, which is written after each part, so that a run that is cut short leaves what it
has.
"""

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2] / "tests/model/cuda")]

import numpy as np
import torch
import triton
from checks import attention_bits, exact_products, exact_runs, store_speed, syncs, tokens
from endtoend import end_to_end
from figures import Figures, Floor, ceilings, graph_seconds, seconds_of, sustained
from random_model import BLOCK, SMALL, make_engine, random_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headstart.model.cuda import triton_layers
from headstart.model.cuda.cuda_runner import CudaRunner
from headstart.model.cuda.step_plan import PackedStepChunks, StepPlanner
from headstart.model.cuda.triton_attention import (
    LayerScoring,
    TileShape,
    allocate_partial_results,
    launch_attention,
    merge_partial_results,
)
from headstart.model.cuda.triton_rotary import rotate_and_append_kv
from headstart.model.kernels.block_hashes import load_compiled_hash_chain
from headstart.model.layers.decoder import Decoder
from headstart.workload.synthetic import token_rotations

GPU = torch.device("cuda")
ROW_TILES = ((4, 1024, 4), (4, 2048, 4), (2, 1024, 4), (8, 512, 4), (2, 2048, 8), (1, 4096, 4), (8, 1024, 8))
PREFILL_SHAPES = (
    TileShape(128, 64, 8, 2),
    TileShape(128, 64, 8, 3),
    TileShape(128, 64, 4, 3),
    TileShape(128, 128, 8, 2),
    TileShape(64, 64, 4, 3),
)


class Log:
    """The results of a run."""

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, [dict[str, Any]()]
        self.entries[0] = {
            "gpu": torch.cuda.get_device_name(0),
            "driver": _driver(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cores": os.cpu_count(),
        }

    def record(self, **entry: Any) -> None:
        self.entries.append(entry)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in entry.items()}), flush=True)

    def attempt(self, call: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Go on after a failure: time on a GPU is short."""
        began = time.perf_counter()
        try:
            call(*arguments, **options)
        except Exception as error:
            traceback.print_exc(limit=-8)
            self.entries.append({"failed": call.__name__, "error": repr(error)[:300]})
        gc.collect()
        torch.cuda.empty_cache()
        print(f"  ({call.__name__}: {time.perf_counter() - began:.1f} s)", flush=True)
        self.path.write_text(json.dumps(self.entries, indent=1))


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def model(log: Log, shape: str, measured: tuple[float, float], *, parts: set[str]) -> None:
    """Record the figures of a model with random bfloat16 weights, in fast mode; with part exact the price of that."""
    loaded = random_model(shape, torch.bfloat16, GPU, max_model_len=70_000)
    decoder = loaded.model
    assert isinstance(decoder, Decoder)
    bandwidth, flops = measured
    linears = [decoder.head] + [
        linear for layer in decoder.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    weight_bytes = sum(linear.weight.nbytes for linear in linears if linear.weight is not None)
    floor = Floor(weight_bytes, loaded.kv_bytes_per_token, bandwidth, flops)
    for exact in (False, True) if "exact" in parts else (False,):
        runner = CudaRunner(replace(loaded, batch_invariant=exact), num_blocks=4500, block_size=BLOCK)
        if not exact and "tune" in parts:
            tune(log, runner, shape)
        began = time.perf_counter()
        runner.warm_up()
        torch.cuda.synchronize()
        graphs = len(runner.graphs.keys_to_capture())
        log.record(
            model=shape,
            figure="start: graphs and kernels",
            exact=exact,
            graphs=graphs,
            seconds=time.perf_counter() - began,
        )
        gc.collect()
        gc.freeze()  # as the engine process does: what is loaded is not walked again
        label = f"{shape} exact" if exact else shape
        figures = Figures(make_engine(runner, budget=4096, max_len=70_000), loaded.vocab_size, floor, label, log.record)
        log.attempt(figures.decode, 1, 1024, 16)
        log.attempt(figures.decode, 32, 1024, 16)
        log.attempt(figures.ttft)
        log.attempt(figures.twins)
        log.attempt(figures.rotations)
        if not exact:
            for budget in (4096, 144, 80):
                engine = make_engine(runner, budget=budget, max_len=16_384, max_seqs=64)
                beside = Figures(engine, loaded.vocab_size, floor, f"{shape}, {budget} tokens a step", log.record)
                log.attempt(beside.beside_prompts)
                del engine, beside
            log.attempt(figures.prompt, 4000)
            log.attempt(figures.decode, 32, 8192, 16)
            log.attempt(figures.decode, 1, 65_536, 16)
            log.attempt(figures.host)
            log.attempt(store_speed, runner, log.record)
            log.attempt(kernels, log, runner, figures)
            log.attempt(start, log, runner, shape)
        del figures, runner
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def start(log: Log, runner: CudaRunner, shape: str) -> None:
    """Record the time and the memory of capturing all graphs; kernels are compiled, as at a second start."""
    runner.graphs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    free, began = torch.cuda.mem_get_info()[0], time.perf_counter()
    runner.warm_up()
    torch.cuda.synchronize()
    log.record(
        model=shape, figure="start: graphs alone", graphs=len(runner.graphs.keys_to_capture()),
        seconds=time.perf_counter() - began, mb=(free - torch.cuda.mem_get_info()[0]) / 1e6,
    )  # fmt: skip


def tune(log: Log, runner: CudaRunner, shape: str) -> None:
    """Time the products of one row in each tiling, one after the other as in a step."""
    layers = runner.decoder.decoder.layers[:16]
    for name, linears in (
        ("qkv", [layer.qkv for layer in layers]),
        ("out", [layer.out for layer in layers]),
        ("gate_up", [layer.gate_up for layer in layers]),
        ("down", [layer.down for layer in layers]),
        ("head", [runner.decoder.decoder.head] * 2),
    ):
        weights = [linear.weight for linear in linears if linear.weight is not None]
        count, width = weights[0].shape
        x, onto = (torch.randn(1, size, device=GPU, dtype=torch.bfloat16) for size in (width, count))
        norm = None if linears[0].norm is None else (linears[0].norm.weight, 1e-5)
        options: dict[str, Any] = {"onto": onto} if name in ("out", "down") else {"norm": norm}
        options |= {"gated": True} if name == "gate_up" else {}
        seconds: dict[tuple[int, int, int], float] = {}
        for tiles in ROW_TILES:
            calls = [
                lambda w=w, tiles=tiles: triton_layers.matvec(x, w, tiles=tiles, pdl=True, **options)  # noqa: B023
                for w in weights
            ]
            seconds[tiles] = graph_seconds(calls) / len(calls)
        best = min(seconds, key=lambda tiles: seconds[tiles])
        rate = weights[0].nbytes / seconds[best] / 1e12
        shown = {str(tiles): round(value * 1e6, 2) for tiles, value in seconds.items()}
        log.record(model=shape, tiles=name, size=[count, width], best=best, tb_s=rate, us=shown)


def kernels(log: Log, runner: CudaRunner, figures: Figures) -> None:
    """Record the kernels of a step of 32 decodes, of one, and of a prompt, by their time on the GPU."""
    prefix = figures.tokens(1024)
    figures.run([prefix], 1)
    cases = {
        "1 stream": ([prefix + figures.tokens(16)], 12),
        "32 streams": ([prefix + figures.tokens(16) for _ in range(32)], 12),
        "a prompt of 4,096": ([figures.tokens(4096)], 1),
        "8 rotations cold": (token_rotations(figures.tokens(1025), 8), 1),
        "104 of 1,000": ([prefix[:896] + figures.tokens(104)], 1),
    }
    for name, (prompts, count) in cases.items():
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            figures.run(prompts, count)
        times: dict[str, list[float]] = {}
        for event in found.events():
            if event.device_type == DeviceType.CUDA:
                times.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
        top = sorted(times.items(), key=lambda item: -sum(item[1]))[:12]
        log.record(
            model=figures.label, profile=name, kernels=[[k, len(v), round(sum(v) / len(v), 2)] for k, v in top],
            total_us=round(sum(map(sum, times.values()))),
        )  # fmt: skip


def prefill(log: Log) -> None:
    """Record the rate of attention in a long prompt for each shape of tile."""
    for heads, kvs, length in (
        (32, 32, 4096),
        (32, 32, 2048),
        (32, 32, 1024),
        (32, 32, 512),
        (16, 8, 4096),
        (16, 8, 1024),
    ):
        dim = 128
        pages = length // BLOCK
        positions = np.arange(length, dtype=np.int32)
        blocks = np.random.default_rng(0).permutation(np.arange(1, pages + 1)).astype(np.int32)
        ends = np.array([0, length], np.int32), np.array([0, pages], np.int32)
        rows = PackedStepChunks(positions * 0, positions, positions, positions * 0 - 1, *ends, blocks)
        kv = torch.randn(pages + 1, 2, kvs, BLOCK, dim, device=GPU, dtype=torch.bfloat16)
        queries = torch.randn(length, heads * dim, device=GPU, dtype=torch.bfloat16)
        out = torch.empty(length, heads, dim, device=GPU, dtype=torch.bfloat16)
        parts = allocate_partial_results(1, heads, kvs, dim, GPU)
        for shape in PREFILL_SHAPES:
            planner = StepPlanner(
                page=BLOCK, group=heads // kvs, kv_heads=kvs, processors=132, max_parts=1, exact=False
            )
            memory, none = np.zeros(1 << 20, np.int32), np.zeros(0, np.int32)
            layout = planner.fill(memory, rows, padded=None, tile_rows=shape.tile_rows, selected=none, outputs=0)
            meta = torch.from_numpy(memory[: layout.total]).to(GPU)
            common = (
                queries,
                (kv[:, 0], kv[:, 1]),
                out,
                parts,
                meta,
                meta[layout.positions_offset :],
                meta[layout.singles_offset :],
            )
            programs = layout.num_tiles * kvs
            call = partial(launch_attention, *common, LayerScoring(dim**-0.5), shape, single=False, programs=programs)
            seconds = seconds_of(call, 10)
            rate = 4 * heads * dim * length * length / 2 / seconds / 1e12
            log.record(attention=f"prompt of {length}", heads=[heads, kvs], shape=shape, us=seconds * 1e6, tflop_s=rate)


def decodes(log: Log) -> None:
    """Record the time of attention and merge of full decodes for each form of the launch, beside the read of the KV."""
    for heads, kvs, count, length in ((32, 32, 48, 1025), (32, 32, 8, 1025), (32, 32, 1, 1025), (32, 8, 48, 1025),
                                      (16, 8, 48, 1025), (16, 8, 8, 1025), (32, 8, 32, 8192)):  # fmt: skip
        dim, pages = 128, -(-length // BLOCK)
        blocks = np.random.default_rng(0).permutation(np.arange(1, count * pages + 1)).astype(np.int32)
        ones = np.ones(count, np.int32)
        ends = np.arange(count + 1, dtype=np.int32), np.arange(count + 1, dtype=np.int32) * np.int32(pages)
        rows = PackedStepChunks(ones, ones * np.int32(length - 1), ones * 0 - 1, ones * 0 - 1, *ends, blocks)
        kv = torch.randn(count * pages + 1, 2, kvs, BLOCK, dim, device=GPU, dtype=torch.bfloat16)
        queries = torch.randn(count, heads * dim, device=GPU, dtype=torch.bfloat16)
        out = torch.empty(count, heads, dim, device=GPU, dtype=torch.bfloat16)
        planner = StepPlanner(
            page=BLOCK, group=heads // kvs, kv_heads=kvs, processors=132, max_parts=32768, exact=False
        )
        memory, none = np.zeros(1 << 20, np.int32), np.zeros(0, np.int32)
        layout = planner.fill(memory, rows, padded=None, tile_rows=64, selected=none, outputs=0)
        parts = allocate_partial_results(layout.num_parts, heads, kvs, dim, GPU)
        meta = torch.from_numpy(memory[: layout.total]).to(GPU)
        common = (
            queries,
            (kv[:, 0], kv[:, 1]),
            out,
            parts,
            meta,
            meta[layout.positions_offset :],
            meta[layout.singles_offset :],
        )
        merged = meta[layout.merged_tokens_offset :][: layout.merged], meta[layout.first_part_indices_offset :]
        shown: dict[str, float] = {}

        def once(shape: TileShape, programs: int, common: Any = common, merged: Any = merged) -> None:
            launch_attention(*common, LayerScoring(128**-0.5), shape, single=True, programs=programs * 132, pdl=True)
            merge_partial_results(common[3], common[2], *merged, pdl=True)

        for keys, stages, programs in ((64, 2, 4), (64, 2, 8), (64, 2, 16), (64, 2, 32), (64, 3, 16), (32, 3, 16)):
            calls = [partial(once, TileShape(16, keys, 4, stages), programs)] * 8
            shown[f"{keys} keys, {stages} stages, {programs} programs"] = round(graph_seconds(calls) / 8 * 1e6, 2)
        read = 4.0 * count * length * kvs * dim / ceilings()[0] * 1e6
        log.record(decodes=[count, length], heads=[heads, kvs], us=shown, read_us=read)


def append(log: Log) -> None:
    """Record the time of appending KV token by token and page by page (vLLM #19878)."""
    for heads, kvs in ((32, 32), (16, 8)):
        for count, offset in ((2048, 0), (2048, 5), (64, 0), (64, 5)):
            qkv = torch.randn(count, (heads + 2 * kvs) * 128, device=GPU, dtype=torch.bfloat16)
            queries = torch.empty(count, heads, 128, device=GPU, dtype=torch.bfloat16)
            kv = torch.zeros(2, 400, kvs, BLOCK, 128, device=GPU, dtype=torch.bfloat16)
            positions = torch.arange(count, device=GPU, dtype=torch.int32)
            slots = positions + BLOCK + offset
            angles = (torch.rand(4096, 64, device=GPU), torch.rand(4096, 64, device=GPU))
            call = partial(rotate_and_append_kv, qkv, queries, positions, slots, angles, None, (kv[0], kv[1]), 1e-5)
            us = {tokens: 1e6 * seconds_of(partial(call, tokens=tokens), 20) for tokens in (1, 2, 4, 16)}
            log.record(append_us=us, heads=[heads, kvs], tokens=count, first_slot_of_page=offset)


def main() -> None:
    """Run the parts that are named."""
    load_compiled_hash_chain()  # hashes are compiled, as in the product, if there is a compiler
    os.environ.setdefault("HEADSTART_KERNELS", "none")
    path, parts = Path(sys.argv[1]), set(sys.argv[2:])
    parts = parts or {"bits", "tokens", "exact", "syncs", "7b", "0.6b", "tune", "append", "decodes", "prefill", "end"}
    log = Log(path)
    began = time.perf_counter()
    if "bits" in parts:
        log.attempt(attention_bits, log.record)
    if "syncs" in parts:
        log.attempt(syncs, log.record)
    if "exact" in parts:
        log.attempt(exact_products, log.record)
        log.attempt(exact_runs, "small-llama", log.record)
        log.attempt(exact_runs, "small-qwen3", log.record)
    for shape in (shape for shape in SMALL if parts & {"tokens", f"tokens:{shape}"}):
        log.attempt(tokens, shape, log.record)
    if "append" in parts:
        log.attempt(append, log)
    if "decodes" in parts:
        log.attempt(decodes, log)
    if "prefill" in parts:
        log.attempt(prefill, log)
    if "end" in parts:
        log.attempt(end_to_end, log.record)
    measured = ceilings()
    log.record(copy_tb_s=measured[0] / 1e12, product_tflop_s=measured[1] / 1e12, sustained_tflop_s=sustained() / 1e12)
    if "7b" in parts:
        log.attempt(model, log, "llama-2-7b", measured, parts=parts)
    if "0.6b" in parts:
        log.attempt(model, log, "qwen3-0.6b", measured, parts=parts)
    log.record(seconds=time.perf_counter() - began)
    log.path.write_text(json.dumps(log.entries, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
