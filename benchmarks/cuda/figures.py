"""Times of whole engine steps and runs on a GPU, each with its floor: bytes or operations over measured ceilings."""

from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from headstart.core.engine import Engine
from headstart.core.request import SamplingParams
from headstart.measurement.inprocess import RunResult, requests_from_prompts, run_requests
from headstart.model.cuda.cuda_runner import CudaRunner
from headstart.workload.synthetic import random_tokens, token_rotations


@dataclass
class Floor:
    """Bytes and operations that a step cannot avoid, over measured ceilings (bytes/s of a copy, FLOP/s)."""

    weight_bytes: int  # without the embedding
    kv_bytes: int  # of one token
    bandwidth: float
    flops: float

    def read(self, tokens: float) -> float:
        return (self.weight_bytes + tokens * self.kv_bytes) / self.bandwidth

    def compute(self, tokens: float) -> float:
        return self.weight_bytes * tokens / self.flops  # 2 FLOP for each weight of 2 bytes


class Figures:
    """All figures of one engine; `record` gets each as a dict with times in ms."""

    def __init__(self, engine: Engine, vocab_size: int, floor: Floor, label: str, record: Callable[..., None]) -> None:
        self.engine, self.vocab, self.floor, self.label = engine, vocab_size, floor, label
        self.random, self.number, self._record = Random(7), 0, record

    def run(self, prompts: "Sequence[array[int]]", count: int) -> RunResult:
        self.number += 1
        result = run_requests(self.engine, requests_from_prompts(prompts, _greedy(count), f"r{self.number}"))
        assert not result.errors, result.errors[:1]
        return result

    def note(self, name: str, seconds: Sequence[float], floor: float, **more: Any) -> None:
        """Record the median and the extremes of `seconds`."""
        middle = median(seconds)
        self._record(
            model=self.label, figure=name, ms=middle * 1e3, least_ms=min(seconds) * 1e3, most_ms=max(seconds) * 1e3,
            floor_ms=floor * 1e3, ratio=middle / floor, **more,
        )  # fmt: skip

    def tokens(self, length: int) -> "array[int]":
        return random_tokens(length, self.vocab, self.random)

    def rotations(self, *, cold: int = 2, warm: int = 5, count: int = 48, length: int = 1025) -> None:
        """vLLM #3402: the same tokens, each prompt rotated by one more."""
        prompts = token_rotations(self.tokens(length), count)
        colds, warms = [], []
        for _ in range(cold):
            self.engine.reset_prefix_cache()
            colds.append(self.run(prompts, 1))
        for _ in range(warm):
            warms.append(self.run(prompts, 1))
        last = warms[-1]
        differing = sum(a != b for a, b in zip(colds[-1].outputs, last.outputs, strict=True))
        self.note("rotations cold", [r.seconds for r in colds], self.floor.compute(count * length))
        self.note(
            "rotations warm", [r.seconds for r in warms], self.floor.read(count * length), steps=len(last.steps),
            executor_ms=median(sum(s.executor_seconds for s in run.steps) for run in warms) * 1e3,
            differing_first_tokens=differing,
        )  # fmt: skip

    def host(self, count: int = 48, length: int = 1025, repeats: int = 4) -> None:
        """Record what the host does in warm rotations and for a first token: seconds inside each part, calls nested."""
        prompts = token_rotations(self.tokens(length), count)
        prefix = self.tokens(900)
        for cached in (prompts, [prefix + self.tokens(1)]):
            self.run(cached, 1)
        cases: dict[str, tuple[Callable[[], Sequence[array[int]]], int]] = {
            "rotations warm": (lambda: prompts, 1),
            "first token, 900 of 1000 cached": (lambda: [prefix + self.tokens(100)], 1),
            "twins": (lambda: [fresh + self.tokens(32) for fresh in [self.tokens(2048)] for _ in range(32)], 1),
            "64 tokens of 1 stream": (lambda: [self.tokens(64)], 64),
            "64 tokens of 32 streams": (lambda: [prefix + self.tokens(16) for _ in range(32)], 64),
        }
        for name, (made, tokens) in cases.items():
            runs: list[dict[str, float]] = []
            for _ in range(repeats):
                asked = made()
                with timed(*_host_parts(self.engine)) as spent:
                    result = self.run(asked, tokens)
                runs.append({part: seconds * 1e3 for part, seconds in spent.items()} | {"run": result.seconds * 1e3})
            middle = {part: round(median(one.get(part, 0.0) for one in runs), 3) for part in runs[-1]}
            self._record(model=self.label, host=name, ms=middle)

    def decode(self, streams: int, shared: int, own: int, steps: int = 32) -> None:
        prefix = self.tokens(shared)
        self.run([prefix], 1)
        run = self.run([prefix + self.tokens(own) for _ in range(streams)], steps + 1)
        times = [s.seconds for s in run.steps if s.computed_tokens == streams][2:-1]
        tokens = shared + streams * (own + steps / 2)  # the shared prefix is read once
        weights = self.floor.weight_bytes / self.floor.bandwidth
        self.note(
            f"decode {streams} x ({shared} + {own})",
            times,
            self.floor.read(tokens),
            times_weights=median(times) / weights,
        )

    def ttft(self, cached: int = 900, total: int = 1000, repeats: int = 12) -> None:
        prefix = self.tokens(cached)
        self.run([prefix + self.tokens(1)], 1)
        runs = [self.run([prefix + self.tokens(total - cached)], 1) for _ in range(repeats)]
        computed = runs[-1].computed_tokens
        floor = max(self.floor.read(cached), self.floor.compute(computed))
        self.note(f"first token, {cached} of {total} cached", [r.seconds for r in runs[2:]], floor, computed=computed)

    def twins(self, streams: int = 32, shared: int = 2048, own: int = 32, steps: int = 16, repeats: int = 3) -> None:
        """Prompts that share a new prefix, all at once."""
        prefills: list[float] = []
        for _ in range(repeats + 1):  # the first compiles
            prefix = self.tokens(shared)
            run = self.run([prefix + self.tokens(own) for _ in range(streams)], steps + 1)
            prefills.append(run.seconds - sum(s.seconds for s in run.steps if s.computed_tokens == streams))
        decodes = [s.seconds for s in run.steps if s.computed_tokens == streams][2:-1]
        self.note(
            f"twins {streams} x ({shared} + {own}): prefill", prefills[1:], self.floor.compute(shared + streams * own),
            computed=run.computed_tokens, due=shared + streams * (own + steps),
            steps=[(s.computed_tokens, round(s.seconds * 1e3, 2)) for s in run.steps[:4]],
        )  # fmt: skip
        self.note("twins: a decode step", decodes, self.floor.read(shared + streams * (own + steps / 2)))

    def prompt(self, length: int, repeats: int = 3) -> None:
        runs = [self.run([self.tokens(length)], 1) for _ in range(repeats + 1)]
        self.note(f"prompt of {length}", [r.seconds for r in runs[1:]], self.floor.compute(length))

    def beside_prompts(self, streams: int = 16, length: int = 4000, late: int = 4) -> None:
        """Time between tokens of decodes, alone and with long prompts arriving one after the other."""
        prompts = [self.tokens(64) for _ in range(streams)]
        gaps: list[list[float]] = []
        for count in (0, late):
            self.number += 1
            requests = requests_from_prompts(prompts, _greedy(160), f"b{self.number}")
            requests += requests_from_prompts(
                [self.tokens(length) for _ in range(count)], _greedy(1), f"late{self.number}"
            )
            due = [0.0] * streams + [0.1 + 0.2 * index for index in range(count)]
            result = run_requests(self.engine, requests, due=due)
            assert not result.errors, result.errors[:1]
            gaps.append([step.seconds for step in result.steps[12:-1]])  # all streams decode
        self.note(
            f"decode {streams} beside prompts of {length}: p99", [_p99(gaps[1])], self.floor.read(64 * streams),
            alone_p99_ms=_p99(gaps[0]) * 1e3, steps=len(gaps[1]),
        )  # fmt: skip


def _host_parts(engine: Engine) -> list[tuple[object, str]]:
    runner = engine.executor
    assert isinstance(runner, CudaRunner)
    return [
        (engine, "add_request"), (engine.scheduler, "schedule"), (engine.scheduler, "update"), (engine, "step"),
        (runner, "submit"), (runner, "collect"), (runner, "_launch_pass"), (runner.planner, "fill"),
        (runner.sampler, "stage"), (runner.graphs, "replay"), (runner, "_queue_answer"), (runner, "_finish"),
    ]  # fmt: skip


@contextmanager
def timed(*methods: tuple[object, str]) -> Generator[dict[str, float]]:
    """Add up the seconds inside methods of these objects' classes, by name; nested ones count in both."""
    spent: dict[str, float] = {}
    originals = [(type(owner), name, getattr(type(owner), name)) for owner, name in methods]
    for kind, name, original in originals:

        def call(*arguments: Any, _original: Any = original, _name: str = name, **options: Any) -> Any:
            began = perf_counter()
            try:
                return _original(*arguments, **options)
            finally:
                spent[_name] = spent.get(_name, 0.0) + perf_counter() - began

        setattr(kind, name, call)
    try:
        yield spent
    finally:
        for kind, name, original in originals:
            setattr(kind, name, original)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


def ceilings() -> tuple[float, float]:
    """Return bytes/s of a device copy (read + written) and FLOP/s of an 8192^3 bf16 product, as measured."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), 10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = seconds_of(lambda: a @ b, 20)
    torch.cuda.empty_cache()
    return (2 << 32) / copy, 2 * 8192**3 / product


def sustained(seconds: float = 1.5) -> float:
    """Return FLOP/s of products [4096, 4096] x [22016, 4096] over so long that the card's power limit counts."""
    rows, weight = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) for n in (4096, 22016))
    one = seconds_of(lambda: rows @ weight.t(), 5)
    return 2 * 4096**2 * 22016 / seconds_of(lambda: rows @ weight.t(), int(seconds / one))


def seconds_of(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call on the device, the mean of `repeats` after three."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats / 1e3


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 10) -> float:
    """Return the seconds of one pass over `calls`, replayed as a graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return seconds_of(graph.replay, repeats)
