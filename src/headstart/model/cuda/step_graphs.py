"""CUDA graphs of passes, by kind of step and rounded number of tokens.

Graphs are captured at start, longest first so that they share memory. A capture fails if another thread copies
meanwhile (vLLM #48053), so the lock of the KV is held. A step without a graph runs eagerly.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.model.cuda.cuda_kv import CudaKV
from headstart.model.cuda.decoder_pass import DECODES, GROUPS, MIXED, PassResult

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256)  # rows
CHUNK_SIZES = (  # tokens of steps with chunks of prompts; padding is computed too
    16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072,
    3584, 4096,
)  # fmt: skip
LAUNCH_SECONDS = 70e-6  # of the host, for one launch outside a graph: 24 ms for 352 launches, seen on an H200's host
DEVICE_FLOPS = 6e14  # of such a GPU in the products of a prompt
OUTPUTS = 64  # selected rows of such a step


class GraphKey(NamedTuple):
    """A pass: its kind, its tokens and its selected rows (0: all rows are)."""

    kind: str
    rows: int
    outputs: int


class StepGraphs:
    """The captured passes of one runner. Without a GPU a stand-in runs the pass again, so that padding is tested."""

    def __init__(self, kv: CudaKV, *, max_rows: int, max_tokens: int) -> None:
        """`max_rows` of a step of decodes, `max_tokens` of one with chunks; longer ones keep the GPU busy anyway."""
        self._kv, self._on_gpu = kv, kv.device.type == "cuda"
        self._captured: dict[GraphKey, tuple[torch.cuda.CUDAGraph | None, PassResult]] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._decodes = [size for size in DECODE_SIZES if size < max_rows] + [max_rows]
        self._chunks = [size for size in CHUNK_SIZES if size <= max_tokens]

    def keys_to_capture(self) -> list[GraphKey]:
        """Return the passes to capture, longest first."""
        chunks = [GraphKey(MIXED, size, min(OUTPUTS, size)) for size in reversed(self._chunks)]
        return chunks + [GraphKey(kind, size, 0) for size in reversed(self._decodes) for kind in (DECODES, GROUPS)]

    def find_padded_key(self, kind: str, rows: int, outputs: int) -> GraphKey | None:
        """Return the captured pass with room for a step, or None if there is none."""
        sizes = self._chunks if kind == MIXED else self._decodes
        size = next((size for size in sizes if size >= rows), None)
        if size is None or (kind == MIXED and outputs > min(OUTPUTS, size)):
            return None
        key = GraphKey(kind, size, min(OUTPUTS, size) if kind == MIXED else 0)
        return key if key in self._captured else None

    def capture_graph(self, key: GraphKey, run: Callable[[], PassResult]) -> None:
        """Capture a pass; it is run twice before, which compiles kernels."""
        if not self._on_gpu:
            self._captured[key] = (None, run())
            return
        with self._kv.lock:
            stream = torch.cuda.Stream(self._kv.device)
            stream.wait_stream(torch.cuda.current_stream(self._kv.device))
            with torch.cuda.stream(stream):
                run()
                run()
            torch.cuda.current_stream(self._kv.device).wait_stream(stream)
            torch.cuda.synchronize(self._kv.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                result = run()
            self._captured[key] = (graph, result)

    def replay(self, key: GraphKey, run: Callable[[], PassResult]) -> PassResult:
        """Compute a captured pass; the result is valid until the next one. Without a GPU, `run` stands in."""
        graph, result = self._captured[key]
        if graph is not None:
            graph.replay()
            return result
        for kept, found in zip(result, run(), strict=True):
            if isinstance(kept, Tensor) and isinstance(found, Tensor):
                kept.copy_(found)
        return result

    def clear(self) -> None:
        """Drop all graphs, and the memory that they share."""
        self._captured.clear()
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None


def longest_graph_tokens(num_layers: int, num_weights: int) -> int:
    """Return the longest step of chunks worth a graph; longer ones keep the device busy while they are launched.

    `num_weights` are those that every token is multiplied by. 1,280 for a model of 7B, 4,096 for one of 1B.
    """
    host = 11 * num_layers * LAUNCH_SECONDS
    tokens = host * DEVICE_FLOPS / (2 * num_weights)
    return next((size for size in CHUNK_SIZES if size >= max(tokens, 256)), CHUNK_SIZES[-1])
