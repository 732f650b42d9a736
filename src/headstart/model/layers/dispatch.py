"""Measured dispatch: whether our kernels or torch multiply the bfloat16 weights of a model on this processor.

The products of a layer are timed in both forms at some numbers of rows, which takes a few hundred milliseconds, and the
result is kept in the cache folder. There is one choice for a model, not one per number of rows: the forms round at the
same places but add in another order, and a row's outputs must not depend on how many rows its step has.
"""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.model.kernels.library import Kernels, cpu_model, threads
from headstart.model.layers.linear import Form, Linear
from headstart.model.source_digest import source_digest

CHOICES = ("auto", "kernels", "torch")
ROWS = (1, 16, 128)
MOST_OUTPUTS = 2048  # of a product that is timed: time is proportional to the outputs
LEAST_WEIGHTS = 1 << 22  # of a layer; products of smaller models fit a cache, and are not timed
ADVANTAGE = 1.1  # torch is chosen if it is faster by this factor: a choice must not follow noise
ATTEMPTS, SECONDS = 3, 0.02  # of one product and form: the least of at least so many runs, for at least this time
PREFIX = "dispatch-"

Size = tuple[int, int]  # outputs, inputs


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one product of `rows` rows, in both forms."""

    outputs: int
    inputs: int
    rows: int
    kernels: float
    torch: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The timings of the products of one model's layers on one processor."""

    cpu: str
    variant: str
    threads: int
    timings: tuple[Timing, ...]

    @property
    def ratio(self) -> float:
        """The geometric mean of torch's time over that of our kernels, over all products and numbers of rows."""
        return math.exp(sum(math.log(t.torch / t.kernels) for t in self.timings) / len(self.timings))

    @property
    def prefers_kernels(self) -> bool:
        """Whether our kernels are chosen."""
        return self.ratio * ADVANTAGE >= 1


def chosen_kernels(kernels: Kernels, choice: str, sizes: Sequence[Size], cache: Path) -> Kernels | None:
    """Return `kernels` if they are to multiply weights of these sizes, or None for torch; `choice`: see CHOICES."""
    assert choice in CHOICES, choice
    if choice == "torch":
        return None
    if choice == "kernels" or sum(outputs * inputs for outputs, inputs in sizes) < LEAST_WEIGHTS:
        return kernels
    return kernels if measured(kernels, sizes, cache).prefers_kernels else None


def measured(kernels: Kernels, sizes: Sequence[Size], cache: Path) -> Measured:
    """Return the timings for these sizes: from `cache` if the same code was timed on the same processor before."""
    cut = sorted({(min(outputs, MOST_OUTPUTS), inputs) for outputs, inputs in sizes})
    parts = [cpu_model(), kernels.variant, source_digest().hex(), str(torch.__version__), threads(), cut]
    path = cache / f"{PREFIX}{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]}.json"
    found = _read(path)
    if found is None:
        timings = tuple(timing for size in cut for timing in _time(kernels, size))
        found = Measured(cpu_model(), kernels.variant, threads(), timings)
        with suppress(OSError):  # a cache that cannot be written: the next start measures again
            _write(path, found)
    return found


def all_measured(cache: Path) -> list[Measured]:
    """Return what is kept in `cache`, in the order of the file names."""
    return [found for path in sorted(cache.glob(f"{PREFIX}*.json")) if (found := _read(path)) is not None]


def _time(kernels: Kernels, size: Size) -> list[Timing]:
    outputs, inputs = size
    forms = {
        name: Linear(torch.full((outputs, inputs), 0.01, dtype=torch.bfloat16), form=Form(found))
        for name, found in (("kernels", kernels), ("torch", None))
    }
    timings: list[Timing] = []
    for rows in ROWS:
        x = torch.ones(rows, inputs, dtype=torch.bfloat16)
        least = _least_times({name: lambda layer=layer, x=x: layer(x) for name, layer in forms.items()})
        timings.append(Timing(outputs, inputs, rows, least["kernels"], least["torch"]))
    return timings


def _least_times(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least seconds of each run, taken by turns."""
    least = dict.fromkeys(runs, math.inf)
    attempts, end = 0, time.perf_counter() + SECONDS * len(runs)
    while attempts < ATTEMPTS or time.perf_counter() < end:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - began)
        attempts += 1
    return least


def _read(path: Path) -> Measured | None:
    """Return the content of a file; None if there is none, or if it is not one of ours."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        timings = tuple(Timing(**timing) for timing in stored.pop("timings"))
        found = Measured(**stored, timings=timings)
        return found if math.isfinite(found.ratio) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None


def _write(path: Path, found: Measured) -> None:
    """Write a file; it appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(found), file)
    Path(name).replace(path)
