"""vLLM beside Headstart on one GPU: `python benchmarks/cuda/beside.py OUT.json SHAPE ...`.

Both load the same folder (random weights in a real shape, drawn on the GPU), each in a process of its own with its own
defaults and the same bytes of KV, and stay loaded; every figure is measured in turns, A B A B, through `LLM.generate`
with lists of token ids. PEER_PYTHON and PEER_PATH: interpreter and folder of vllm, if not those of this process.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

ENGINES = ("headstart", "vllm")
ROUNDS = 5
KV_BYTES = 10 << 30
MAX_LEN = 40_960
SOURCES = str(Path(__file__).parents[2] / "src")
Prompts = list[list[int]]


class Answer(NamedTuple):
    """One call of generate."""

    seconds: float
    tokens: list[list[int]]


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        ours = name == "headstart"
        python = sys.executable if ours else os.environ.get("PEER_PYTHON", sys.executable)
        usual = os.environ.get("PYTHONPATH", "")
        place = f"{SOURCES}{os.pathsep}{usual}" if ours else os.environ.get("PEER_PATH", usual)
        self.name, self._began = name, time.perf_counter()
        self.process = subprocess.Popen(
            [python, __file__, "worker", name, str(folder)], env=os.environ | {"PYTHONPATH": place},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
        )  # fmt: skip

    def wait(self) -> dict[str, Any]:
        """Return what the engine says of itself when it has started."""
        return self._read() | {"start_s": time.perf_counter() - self._began}

    def generate(self, prompts: Prompts, count: int) -> Answer:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
        self.process.stdin.flush()
        return Answer(**self._read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended with {self.process.wait()}"
        return json.loads(line)


class Beside:
    """All figures of two engines that are loaded."""

    def __init__(self, workers: Sequence[Worker], vocab_size: int, label: str, record: Callable[..., None]) -> None:
        self.workers, self.vocab, self.label, self._record = workers, vocab_size, label, record
        self.random = Random(11)

    def tokens(self, length: int) -> list[int]:
        return [self.random.randrange(3, self.vocab) for _ in range(length)]

    def measure(
        self, name: str, call: Callable[[Worker], Answer], prepare: Callable[[], None],
        rounds: int = ROUNDS,
    ) -> None:  # fmt: skip
        """Record medians and extremes in ms; the first round warms up. `prepare` draws what all engines get."""
        times: dict[str, list[float]] = {worker.name: [] for worker in self.workers}
        same = total = 0
        for number in range(rounds + 1):
            prepare()
            outputs: list[list[list[int]]] = []
            for worker in self.workers if number % 2 else reversed(self.workers):
                seconds, found = call(worker)
                outputs.append(found)
                if number:
                    times[worker.name].append(seconds * 1e3)
            if len(outputs) > 1:
                total += len(outputs[0])
                same += sum(a[0] == b[0] for a, b in zip(*outputs, strict=True))
        shown = {
            engine: {"ms": median(values), "least": min(values), "most": max(values)}
            for engine, values in times.items()
        }
        ours, peer = (median(times[engine]) if engine in times else float("nan") for engine in ENGINES)
        self._record(
            model=self.label, beside=name, rounds=rounds, engines=shown, peer_over_ours=peer / ours,
            equal_first_tokens=same / total if total else None,
        )  # fmt: skip

    def once(self, name: str, draw: Callable[[], Prompts], count: int = 1, rounds: int = ROUNDS) -> None:
        """Record the time of one call with new prompts."""
        kept: list[Prompts] = []
        self.measure(
            name, lambda worker: worker.generate(kept[-1], count), lambda: kept.append(draw()), rounds
        )  # fmt: skip

    def decode(self, streams: int, shared: int, own: int, steps: int = 128, rounds: int = 3) -> None:
        """Record the time of a step: of a call with many tokens, less one with one token, both with cached prompts."""
        prompts: list[Prompts] = []

        def draw() -> None:
            prefix = self.tokens(shared)
            prompts.append([prefix + self.tokens(own) for _ in range(streams)])

        def call(worker: Worker) -> Answer:
            worker.generate([prompts[-1][0]], 1)
            worker.generate(prompts[-1], 1)
            one = worker.generate(prompts[-1], 1)
            many = worker.generate(prompts[-1], steps + 1)
            return Answer((many.seconds - one.seconds) / steps, many.tokens)

        self.measure(f"decode {streams} x ({shared} + {own})", call, draw, rounds)

    def all(self) -> None:
        tokens = self.tokens
        base: list[list[int]] = []

        def turned() -> Prompts:
            return [base[-1][at:] + base[-1][:at] for at in range(48)]

        def fresh() -> Prompts:
            base.append(tokens(1025))
            return turned()

        self.once("48 rotations of 1,025, cold", fresh, rounds=3)
        self.once("48 rotations of 1,025, warm", turned)
        prefix = tokens(900)
        for worker in self.workers:
            worker.generate([prefix + tokens(1)], 1)
        self.once("first token, 900 of 1,000 cached", lambda: [prefix + tokens(100)], rounds=12)
        self.once("prompt of 4,000", lambda: [tokens(4000)])
        self.once("32 x (2,048 + 32), new prefix", lambda: [p + tokens(32) for p in [tokens(2048)] for _ in range(32)])
        self.decode(1, 1024, 16)
        self.decode(32, 1024, 16)
        self.decode(32, 8192, 16)
        self.decode(128, 1024, 16, rounds=2)
        self.decode(1, 32_768, 16, rounds=2)
        document = tokens(2048)
        asked = self.once
        asked("128 x (2,048 + 256) behind one document, 64 tokens",
              lambda: [document + tokens(256) for _ in range(128)], 64, rounds=2)  # fmt: skip
        asked("48 x 1,500 without reuse, 64 tokens", lambda: [tokens(1500) for _ in range(48)], 64, rounds=2)


def work(name: str, folder: str) -> None:
    """Load an engine and answer lines of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(name)
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.45}
    memory |= {"kv_cache_memory_bytes": KV_BYTES} if name == "vllm" else {"kv_cache_memory": str(KV_BYTES)}
    llm = module.LLM(model=folder, max_model_len=MAX_LEN, **memory)

    def answer(**entry: Any) -> None:
        answers.write(json.dumps(entry) + "\n")
        answers.flush()

    answer(engine=name, version="sources" if name == "headstart" else module.__version__)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = module.SamplingParams(temperature=0.0, max_tokens=asked["count"], ignore_eos=True)
        prompts = asked["prompts"]
        if name == "vllm":
            prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        found = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [list((one.outputs[0] if name == "vllm" else one).token_ids) for one in found]
        assert all(len(one) == asked["count"] for one in tokens), "an answer is too short"
        answer(seconds=seconds, tokens=tokens)


def random_folder(shape: str, folder: Path) -> int:
    """Write a model with random weights, drawn on the GPU; return its vocabulary's size."""
    sys.path.insert(0, SOURCES)
    import torch

    from headstart.model.weights import init_model
    from headstart.model.weights.shapes import SHAPES

    def draw(name: str, size: tuple[int, ...], *, std: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, dtype=dtype)
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.empty(size, dtype=dtype, device="cuda").normal_(0.0, std, generator=generator).cpu()

    init_model._random = draw  # the CPU takes a minute for 8B
    init_model.write_random_model(shape, folder, std=0.05)
    return SHAPES[shape].vocab_size


def main() -> None:
    """Measure all shapes that are named."""
    path, shapes = Path(sys.argv[1]), sys.argv[2:]
    entries: list[dict[str, Any]] = []

    def record(**entry: Any) -> None:
        entries.append(entry)
        path.write_text(json.dumps(entries, indent=1))
        print(json.dumps(entry), flush=True)

    for shape in shapes:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            folder = Path(place) / shape
            began = time.perf_counter()
            written = subprocess.run(
                [sys.executable, __file__, "write", shape, str(folder)], check=True, stdout=subprocess.PIPE, text=True
            )
            record(model=shape, written_s=time.perf_counter() - began)
            workers = [Worker(name, folder, path.with_name(f"{name}-{shape}.log")) for name in ENGINES]
            try:
                for worker in workers:
                    record(model=shape, **worker.wait())
                Beside(workers, int(written.stdout.splitlines()[-1]), shape, record).all()
            finally:
                for worker in workers:
                    worker.close()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(*sys.argv[2:])
    elif sys.argv[1] == "write":
        print(random_folder(sys.argv[2], Path(sys.argv[3])))
    else:
        main()
