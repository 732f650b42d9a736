"""Checks on a GPU of what only a GPU shows: bits, tokens against the CPU, syncs, graphs, copies of blocks."""

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from attention_cases import Case, make_case, run_case  # tests/model/cuda
from random_model import BLOCK, make_engine, random_model

from headstart.core.request import Request, SamplingParams
from headstart.measurement.inprocess import run_requests
from headstart.model.cuda.cuda_runner import CudaRunner
from headstart.model.cuda.step_graphs import GraphKey
from headstart.model.cuda.triton_layers import batch_invariant_matmul
from headstart.model.model_runner import ModelRunner
from headstart.workload.synthetic import random_tokens, token_rotations

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Record = Callable[..., None]


def tokens(shape: str, record: Record, count: int = 500, *, exact: bool = False) -> None:
    """Run mixed requests in float32 here and on the CPU, in long and short steps; count the answers that differ."""
    found: list[list[Any]] = []
    for budget in (0, 2048, 256):
        device = GPU if budget else CPU
        loaded = random_model(shape, torch.float32, device, std=0.2, drawn_on=CPU)
        runner: Any = (
            CudaRunner(replace(loaded, batch_invariant=exact), num_blocks=1500, block_size=BLOCK)
            if budget
            else ModelRunner(loaded, num_blocks=1500, block_size=BLOCK)
        )
        if budget == 256:  # the other run has no graphs
            runner.warm_up([GraphKey(k, n, 0) for k in ("decodes", "groups") for n in (1, 16, 40)])
            runner.warm_up([GraphKey("mixed", n, min(n, 64)) for n in (64, 256)])
        run = run_requests(
            make_engine(runner, budget=budget or 2048), requests(loaded.vocab_size, count), concurrency=40
        )
        assert not run.errors, run.errors[:2]
        found.append(run.outputs)
    wrong = [sum(a != b for a, b in zip(found[0], other, strict=True)) for other in found[1:]]
    record(check="tokens in float32", model=shape, requests=count, exact=exact, differ_from_cpu=wrong)


def requests(vocab_size: int, count: int) -> list[Request]:
    """Prompts with and without shared beginnings; greedy, drawn, edited, and with log-probabilities."""
    random = Random(11)
    bases = [random_tokens(1500, vocab_size, random) for _ in range(3)]
    made: list[Request] = []
    for index in range(count):
        base = random.choice(bases)[: random.choice((0, 10, 300, 528, 700, 1400))]
        prompt = base + random_tokens(random.choice((1, 2, 17, 60, 200)), vocab_size, random)
        kind, sampling = random.random(), SamplingParams(max_tokens=random.choice((1, 4, 12)), temperature=0.0)
        if kind > 0.9:
            sampling = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=index)
        elif kind > 0.85:
            sampling = SamplingParams(max_tokens=6, temperature=1.0, top_k=9, min_p=0.01, seed=index)
        elif kind > 0.8:
            sampling = SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=1.2, logprobs=2)
        made.append(Request(f"q{index}", prompt, sampling))
    return made


def exact_products(record: Record) -> None:
    """Compare rows of exact products in batches of all sizes with the row in a batch of one; errors beside float64."""
    for count, width in ((256, 256), (12288, 4096), (4096, 11008), (1536, 1024)):
        rows = torch.randn(700, width, device=GPU, dtype=torch.bfloat16)
        weight = torch.randn(count, width, device=GPU, dtype=torch.bfloat16) * 0.02
        alone = torch.cat([batch_invariant_matmul(rows[i : i + 1], weight) for i in range(0, 700, 7)])
        differing = 0
        for size in (2, 3, 16, 31, 48, 64, 65, 100, 128, 129, 256, 300, 512, 700):
            together = batch_invariant_matmul(rows[:size], weight)[::7]
            differing += int((together != alone[: len(together)]).any(1).sum())
        expected = rows[:8].double() @ weight.double().T
        error = float((batch_invariant_matmul(rows, weight)[:8].double() - expected).norm() / expected.norm())
        record(check="exact products", shape=[count, width], rows_that_differ=differing, error=error)


def exact_runs(shape: str, record: Record, count: int = 48, length: int = 600) -> None:
    """Compare tokens and log-probabilities by bits: cold, warm, restored from copies, alone, in short chunks."""
    loaded = random_model(shape, torch.bfloat16, GPU, std=0.05, drawn_on=GPU)
    prompts = token_rotations(random_tokens(length, loaded.vocab_size, Random(3)), count)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3)

    def run(runner: CudaRunner, budget: int, concurrency: int = 0, reset: bool = True) -> list[Any]:
        engine = engines.setdefault(budget, make_engine(runner, budget=budget))
        if reset:
            engine.reset_prefix_cache()
        entries: dict[str, list[Any]] = {}
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(f"{budget} {index}", prompt, sampling))
            entries[f"{budget} {index}"] = []
            while concurrency and engine.has_work:
                _take(engine, entries)
        while engine.has_work:
            _take(engine, entries)
        return list(entries.values())

    for exact in (True, False):
        engines: dict[int, Any] = {}
        runner = CudaRunner(replace(loaded, batch_invariant=exact), num_blocks=3000, block_size=BLOCK)
        runner.warm_up([GraphKey(kind, 48, 0) for kind in ("decodes", "groups")])
        cold = run(runner, 4096)
        found = {"warm": run(runner, 4096, reset=False)}
        blocks = {block: bytes(runner.read_block(block)) for block in range(1, 3000, 7)}
        runner.zero_blocks(list(blocks))
        for block, data in blocks.items():
            runner.write_block(block, data)
        found["restored"] = run(runner, 4096, reset=False)
        found["chunks of 300"] = run(runner, 300)
        found["alone"] = run(runner, 2048, concurrency=1)
        differing = {name: sum(a != b for a, b in zip(cold, other, strict=True)) for name, other in found.items()}
        record(check="bits of a run in bfloat16", model=shape, exact=exact, requests=count, differ_from_cold=differing)


def _take(engine: Any, entries: dict[str, list[Any]]) -> None:
    for output in engine.step():
        assert output.error is None, output.error
        entries[output.request_id] += [output.token_ids, output.logprobs]


def syncs(record: Record) -> None:
    """Run steps of every kind while a host sync is an error; `collect` waits for its event only."""
    loaded = random_model("small-llama", torch.bfloat16, GPU, drawn_on=GPU)
    runner = CudaRunner(loaded, num_blocks=600, block_size=BLOCK)
    runner.warm_up([GraphKey("decodes", 8, 0), GraphKey("groups", 8, 0), GraphKey("mixed", 64, 64)])
    made = [r for r in requests(loaded.vocab_size, 60) if r.sampling.logprobs is None]
    run_requests(make_engine(runner, budget=512), made[:10], concurrency=8)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run = run_requests(make_engine(runner, budget=512), made[10:], concurrency=8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record(check="no host sync in a step", steps=len(run.steps), errors=len(run.errors))


def store_speed(runner: CudaRunner, record: Record, count: int = 100) -> None:
    """Time block reads and writes of a runner beside a plain copy of pinned memory."""
    size = runner.block_bytes
    runner.kv.pool[1 : count + 1].normal_()
    before = [bytes(runner.read_block(block)) for block in range(1, 9)]
    began = time.perf_counter()
    for block in range(1, count + 1):
        data = runner.read_block(block)
    read = count * size / (time.perf_counter() - began)
    began = time.perf_counter()
    for block in range(1, count + 1):
        runner.write_block(block, data)
    torch.cuda.synchronize()
    written = count * size / (time.perf_counter() - began)
    for block, held in enumerate(before, 1):
        runner.write_block(block, held)
    intact = [bytes(runner.read_block(block)) for block in range(1, 9)] == before
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device=GPU)
    rates: list[float] = []
    for call in (lambda: pinned.copy_(device, non_blocking=True), lambda: device.copy_(pinned, non_blocking=True)):
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        rates.append(5 * (1 << 28) / (time.perf_counter() - began))
    record(
        check="blocks out and in", block_mb=size / 1e6, intact=intact, read_gb_s=read / 1e9, write_gb_s=written / 1e9,
        pinned_read_gb_s=rates[0] / 1e9, pinned_write_gb_s=rates[1] / 1e9,
    )  # fmt: skip


def attention_bits(record: Record) -> None:
    """Compare rows of bfloat16 attention alone and behind a shared prefix, by bits, and with float64."""
    for queries, kvs, options in ((8, 8, {}), (8, 2, {}), (8, 2, {"window": 300}), (8, 2, {"softcap": 5.0}),
                                  (8, 2, {"sinks": True})):  # fmt: skip
        shared = {row: (0, 40) for row in range(1, 12)}
        chunks = [(900 + row, 1) for row in range(12)]
        case = make_case(
            chunks, shared=shared, queries=queries, kvs=kvs, dim=128, dtype=torch.bfloat16, device="cuda", **options
        )
        shape = {"tile_rows": 64, "split": 256, "tile_keys": 64, "programs": 264}
        together, rows = run_case(case, **shape)[1], case.rows
        alone: list[torch.Tensor] = []
        for row in range(12):
            table = rows.blocks[rows.table_ptr[row] : rows.table_ptr[row + 1]]
            ends = np.array([0, 1], np.int32), np.array([0, len(table)], np.int32)
            one = rows._replace(
                tokens=rows.tokens[:1], positions=rows.positions[row : row + 1], slots=rows.slots[:1],
                previous=rows.previous[:1], indptr=ends[0], table_ptr=ends[1], blocks=table,
            )  # fmt: skip
            own = Case(one, case.queries[row : row + 1], case.kv, queries, case.scoring, case.expected[:1])
            alone.append(run_case(own, **shape)[1])
        error = float((together.double() - case.expected).norm() / case.expected.norm())
        apart = torch.cat(alone)
        far = float((together.float() - apart.float()).abs().max())
        record(
            check="attention of decodes", heads=[queries, kvs], **options, error=error, numbers=apart.numel(),
            equal_bits=bool(torch.equal(together, apart)), differ=int((together != apart).sum()), furthest=far,
        )  # fmt: skip
    for dim in (64, 80, 96, 128, 256):
        case = make_case(
            [(900, 1), (130, 70), (0, 200)], queries=4, kvs=2, dim=dim, dtype=torch.bfloat16, device="cuda"
        )
        out = run_case(case, tile_rows=128, split=256, tile_keys=64, programs=264)[1]
        error = float((out.double() - case.expected).norm() / case.expected.norm())
        record(check="attention of prompts", dim=dim, error=error)
