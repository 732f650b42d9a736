"""RowSampler: the sampling kernel, from logits to tokens and log-probabilities. sampler.py does the same with torch.

One call computes all rows of a step. Each row is computed by one thread, so its result does not depend on the other
rows or on the number of threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core.batch import TokenLogprob
from headstart.model.kernels.library import KernelLibrary, num_kernel_threads
from headstart.model.sampling.logit_edits import RowEdits

# `Edits` and `RowResult` of sample.h
_EDITS = np.dtype(
    [
        *(
            (name, np.uint64)
            for name in ("repeated", "penalised", "penalties", "biased", "biases", "banned", "allowed")
        ),
        *((name, np.int64) for name in ("num_repeated", "num_penalised", "num_biased", "num_banned")),
        ("repetition", np.float32),
    ],
    align=True,
)
_ROW = np.dtype(
    [
        ("uniform", np.float64),
        ("top_k", np.int64),
        *((name, np.uint64) for name in ("edits", "top_ids", "top_logprobs")),
        ("token", np.int64),
        *((name, np.float32) for name in ("temperature", "top_p", "min_p", "best", "logprob")),
        *((name, np.int32) for name in ("num_top", "is_given")),
    ],
    align=True,
)
_DTYPES = (torch.bfloat16, torch.float32)
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(slots=True)
class RowSamplingParams:
    """Sampling parameters of one row. `temperature` 0: the best token; the filters and `uniform` are then ignored.

    `num_top` is the number of alternatives to return with the token's log-probability (None: neither). If `token` is
    given, no token is chosen and only its log-probability is computed. All log-probabilities are of unedited logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0  # in [0, 1)
    edits: RowEdits | None = None
    num_top: int | None = None
    token: int | None = None


@dataclass(slots=True)
class SampledRows:
    """Results per row: the token, the greatest unedited logit, and log-probabilities if requested.

    If the greatest logit of a row is not finite, the other results of that row are undefined.
    """

    tokens: list[int]
    best: list[float]
    logprobs: list[TokenLogprob | None]


class RowSampler:
    """Sampler of rows of logits. Reuses scratch memory for its threads, so it is not safe for concurrent callers."""

    def __init__(self, kernels: KernelLibrary, vocab_size: int) -> None:
        self._library = kernels.library
        self._vocab_size = vocab_size
        self._bytes = kernels.library.headstart_sample_scratch(vocab_size)  # per thread
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def can_read(self, logits: Tensor) -> bool:
        """Return whether the kernel can read these logits."""
        return logits.device.type == "cpu" and logits.is_contiguous() and logits.dtype in _DTYPES

    def __call__(self, logits: Tensor, tasks: Sequence[RowSamplingParams]) -> SampledRows:
        """Sample `logits` [R, V], one task per row. Changes nothing.

        Raises ValueError for logits of another shape or dtype, and for ids outside the vocabulary.
        """
        if not self.can_read(logits) or logits.shape != (len(tasks), self._vocab_size) or not self._vocab_size:
            raise ValueError(f"{logits.dtype} logits {tuple(logits.shape)} for {len(tasks)} x {self._vocab_size}")
        for bad in [task.token for task in tasks if not 0 <= (task.token or 0) < self._vocab_size]:
            raise ValueError(f"token {bad} lies outside the vocabulary of {self._vocab_size}")
        rows, edits = _rows(tasks), _edits(tasks)
        rows["edits"] = [edits.ctypes.data + at * _EDITS.itemsize if at >= 0 else 0 for at in _places(tasks)]
        widths = [-1 if task.num_top is None else min(task.num_top, self._vocab_size) for task in tasks]
        top = _Tops(widths)
        rows["num_top"], rows["top_ids"], rows["top_logprobs"] = widths, *top.addresses
        self._run(logits, rows)
        tokens: list[int] = rows["token"].tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(tasks)
        if top.is_asked:
            own: list[float] = rows["logprob"].tolist()
            for index, width in enumerate(widths):
                if width >= 0:
                    logprobs[index] = TokenLogprob(tokens[index], own[index], top.of(index))
        return SampledRows(tokens, rows["best"].tolist(), logprobs)

    def _run(self, logits: Tensor, rows: NDArray[np.void]) -> None:
        count = num_kernel_threads()
        if len(self._scratch) < count * self._bytes:
            self._scratch = torch.empty(count * self._bytes, dtype=torch.uint8)
        is_bf16, scratch = int(logits.dtype == torch.bfloat16), self._scratch.data_ptr()
        self._library.headstart_sample(
            logits.data_ptr(), is_bf16, len(rows), self._vocab_size, rows.ctypes.data, scratch, count
        )


class _Tops:
    """Memory for the alternatives of rows, `widths` of them per row; -1: the row needs no log-probability."""

    def __init__(self, widths: list[int]) -> None:
        self.is_asked = max(widths, default=-1) >= 0
        self._ends = np.cumsum([0, *(max(width, 0) for width in widths)])
        self._ids = np.empty(self._ends[-1], np.int64)
        self._logprobs = np.empty(self._ends[-1], np.float32)

    @property
    def addresses(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The addresses of the ids and of the log-probabilities of each row."""
        begins = self._ends[:-1]
        return self._ids.ctypes.data + 8 * begins, self._logprobs.ctypes.data + 4 * begins

    def of(self, index: int) -> tuple[tuple[int, float], ...]:
        """Return the alternatives of one row, most likely first; equal ones by ascending id."""
        own = slice(self._ends[index], self._ends[index + 1])
        pairs: list[tuple[int, float]] = list(zip(self._ids[own].tolist(), self._logprobs[own].tolist(), strict=True))
        return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _rows(tasks: Sequence[RowSamplingParams]) -> NDArray[np.void]:
    """Return one `RowResult` per task, without addresses."""
    values = [
        (
            task.uniform,
            task.top_k,
            *(0, 0, 0),
            task.token or 0,
            min(task.temperature, _FLOAT32_MAX),
            task.top_p,
            task.min_p,
            *(0, 0, -1),
            task.token is not None,
        )
        for task in tasks
    ]
    return np.array(values, _ROW)


def _edits(tasks: Sequence[RowSamplingParams]) -> NDArray[np.void]:
    """Return the `Edits` of the tasks that have any, in order. Holds the addresses of arrays that the tasks own."""
    values = [
        (
            *(ids.ctypes.data for ids in (e.repeated, e.penalised, e.penalties, e.biased, e.biases, e.banned)),
            0 if e.allowed is None else e.allowed.ctypes.data,
            *(len(e.repeated), len(e.penalised), len(e.biased), len(e.banned)),
            e.repetition,
        )
        for task in tasks
        if (e := task.edits) is not None
    ]
    return np.array(values, _EDITS)


def _places(tasks: Sequence[RowSamplingParams]) -> Iterator[int]:
    """Yield for each task the index of its edits in the result of `_edits`; -1 if it has none."""
    at = 0
    for task in tasks:
        yield -1 if task.edits is None else at
        at += task.edits is not None
