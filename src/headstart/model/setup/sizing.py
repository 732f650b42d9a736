"""Memory sizing: the available memory, whether the weights fit, and the size of the KV pool.

On a CPU the pool takes at most 40 % of the memory left after the weights. On a GPU weights, buffers and pool together
take at most a share of the card's memory, 0.9 by default. A pool is never larger than `max_num_seqs` (at least 16)
sequences of full length can fill, which limits the pool of tiny models. A configuration that cannot work is refused
before any allocation, with the numbers and the remedy.
"""

import math
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from headstart.core.errors import ConfigError
from headstart.model.setup.cgroup import SYSTEM
from headstart.model.setup.sizes import GPU_UTILIZATION, MemoryInfo, cpu_memory, format_bytes, parse_bytes
from headstart.model.weights.checkpoint import ModelCheckpoint
from headstart.model.weights.gguf.block_formats import FORMATS

KV_SHARE = 0.4  # of the memory left after the weights
GPU_CONTEXT_BYTES = 2**29  # the most that CUDA's context of a process takes; it is there before anything is loaded
_MIN_FULL_SEQUENCES = 16  # so that the limit for tiny models leaves space for cached prefixes if max_num_seqs is small
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # others: 1
_DTYPE_BYTES = {"auto": 0, "bfloat16": 2, "float16": 2, "float32": 4}  # 0: as stored
_QUANTISED_BYTES = {"int8": 1, "int4": 20 / 32}  # of a weight; int4: a block of Q4_1
_BLOCKS_OVERHEAD = 1.03  # of weights packed for the kernels, at most
_OUT_OF_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED")  # of errors that torch gives no class
_MORE, _MORE_ON_GPU = "give the pool more with --kv-cache-memory", "raise --gpu-memory-utilization"
_FLOATS = ("F64", "F32", "F16", "BF16")


class KVPoolPlan(NamedTuple):
    """The size of the KV pool. `num_blocks` includes the unused block 0; `text` is the line to show at start."""

    num_blocks: int
    kv_bytes: int
    text: str


def device_memory(device: str = "cpu", root: Path = SYSTEM) -> MemoryInfo:
    """Return the memory of `device`: a GPU's own, or for the CPU the lowest of all cgroup limits and the machine's."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # what an earlier engine of this process has left
        free, total = torch.cuda.mem_get_info(torch.device(device))
        return MemoryInfo(total, free, "GPU")
    return cpu_memory(root)


def measure_torch_gpu_bytes(device: str) -> int:
    """Return the bytes of a GPU that torch holds in this process, after what it keeps unused is given back."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(torch.device(device))


def measure_gpu_peak_increase(run: Callable[[], object], device: str) -> int:
    """Run something and return the most bytes of a GPU that torch held meanwhile, beyond those held before."""
    before, gpu = measure_torch_gpu_bytes(device), torch.device(device)
    torch.cuda.reset_peak_memory_stats(gpu)
    run()
    return torch.cuda.max_memory_reserved(gpu) - before


def gpu_budget(
    found: MemoryInfo, utilization: float | None = None, *, limit: int | None = None, is_sized: bool = False
) -> int:
    """Return the bytes for weights, buffers and KV pool on a GPU: its share of the total, less the process's context.

    `found` is the memory before anything is loaded; what is held then beyond a context belongs to other processes, or
    to other engines of this one. Raises ConfigError if they leave less than the share, unless `utilization` is None
    (GPU_UTILIZATION) and a `limit` or the size of the pool (`is_sized`) is given: then what is free counts.
    """
    share = GPU_UTILIZATION if utilization is None else utilization
    own = min(found.limit - found.available, GPU_CONTEXT_BYTES)
    budget = max(int(found.limit * share) - own, 0)
    if limit is not None:
        budget = min(budget, limit)
    if budget <= found.available:
        return budget
    if utilization is None and (limit is not None or is_sized):
        return found.available
    fits = math.floor((found.available + own) / found.limit * 100) / 100
    lower = f", or set --gpu-memory-utilization to {fits:g} or less" if fits > 0 else ""
    raise ConfigError(
        f"--gpu-memory-utilization {share:g} is {format_bytes(found.limit * share)} of the GPU's "
        f"{format_bytes(found.limit)}, but {format_bytes(found.limit - found.available - own)} is in use already and "
        f"{format_bytes(found.available)} is free: end other processes (nvidia-smi lists them){lower}"
    )


@contextmanager
def oom_as_config_error(doing: str, remedy: str, found: MemoryInfo | None = None) -> Generator[None]:
    """Raise ConfigError in place of torch's error that a GPU has no memory left; `found` was there at the start."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        tried = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        numbers = [f"{tried[1]} more was needed"] if tried else []
        if found is not None:
            free = f"{format_bytes(found.available)} of {format_bytes(found.limit)} was free at the start"
            numbers.insert(0, free)
        shown = f"{' and '.join(numbers)}; " if numbers else ""
        raise ConfigError(f"out of GPU memory while {doing}: {shown}{remedy}") from error


def apply_threads(threads: int) -> None:
    """Make torch compute with `threads` threads (the result of `threads.prepare_threads`)."""
    torch.set_num_threads(threads)


def loaded_weight_bytes(folder: Path, *, dtype: str = "auto", quantization: str = "none", blocks: bool = False) -> int:
    """Return the bytes of the weights of a model once loaded as `dtype` ("auto": as stored; blocks as bfloat16).

    With `quantization`, every matrix but the embedding takes fewer; with `blocks`, those stored in blocks keep them.
    Reads only the headers of the files.
    """
    element = _DTYPE_BYTES.get(dtype)
    if element is None:
        raise ConfigError(f"dtype {dtype!r} is not known; choose one of {', '.join(_DTYPE_BYTES)}")
    total = 0.0
    for name, tensor in ModelCheckpoint(folder).entries.items():
        stored = _ELEMENT_BYTES.get(tensor.dtype, 1)
        convert = element if tensor.dtype in _FLOATS else 0
        matrix = len(tensor.shape) == 2 and "embed_tokens" not in name
        if tensor.dtype in FORMATS and FORMATS[tensor.dtype].block_size > 1:
            form = FORMATS[tensor.dtype]
            convert = element or _DTYPE_BYTES["bfloat16"]  # unpacked at load
            if blocks and len(tensor.shape) == 2:
                convert = form.block_bytes / form.block_size * _BLOCKS_OVERHEAD
        elif quantization != "none" and matrix:
            convert = _QUANTISED_BYTES["int8" if "lm_head" in name else quantization]
        total += math.prod(tensor.shape) * (convert or stored)
    return int(total)


def check_weights_fit(weight_bytes: int, available_bytes: int, *, replicas: int = 1, on_gpu: bool = False) -> None:
    """Raise ConfigError if the weights of all replicas fill or exceed the memory. Call it before loading."""
    need = weight_bytes * replicas
    if need < available_bytes:
        return
    times = f" in each of {replicas} replicas" if replicas > 1 else ""
    raise ConfigError(
        f"the weights take {format_bytes(weight_bytes)}{times}, but only {format_bytes(available_bytes)} of memory is "
        f"available: use a smaller model, dtype bfloat16 instead of float32, or a machine (or memory limit) with more"
        + (f", or {_MORE_ON_GPU}" if on_gpu else "")
    )


def plan_kv_pool(
    *,
    kv_bytes_per_token: int,
    block_size: int,
    weight_bytes: int,
    max_model_len: int,
    available_bytes: int,
    kv_cache_memory: str | int | None = None,
    num_blocks_override: int | None = None,
    max_num_seqs: int = 256,
    gpu_profile_bytes: int | None = None,
) -> KVPoolPlan:
    """Return the size of the pool. `available_bytes` is `memory().available` from *before* the weights were loaded.

    On a GPU `available_bytes` is `gpu_budget(...)`, and `gpu_profile_bytes` are those of activations, buffers and
    graphs beside weights and pool.

    `num_blocks_override` counts usable and reserved blocks, and may be smaller than one sequence of `max_model_len`
    (requests that do not fit are then refused one by one). Raises ConfigError for a pool that cannot fit.
    """
    left = available_bytes - weight_bytes - (gpu_profile_bytes or 0)
    block_bytes = kv_bytes_per_token * block_size
    part, taken, lower, more = KV_SHARE, f"{format_bytes(weight_bytes)} of weights", "lower {}", _MORE
    if gpu_profile_bytes is not None:
        part, taken = 1.0, f"{taken} and {format_bytes(gpu_profile_bytes)} of buffers"
        lower, more = f"lower {{}} or {_MORE_ON_GPU}", _MORE_ON_GPU
    if num_blocks_override is not None:
        if num_blocks_override < 2:
            raise ConfigError(f"num_blocks is {num_blocks_override}; it must be at least 2, since block 0 is reserved")
        blocks = num_blocks_override
        _check_left(blocks * block_bytes, left, taken, f"{blocks} KV blocks", lower.format("--num-blocks"))
    elif kv_cache_memory is not None:
        asked = parse_bytes(kv_cache_memory)
        _check_left(asked, left, taken, "a KV pool", lower.format("--kv-cache-memory"))
        blocks = asked // block_bytes
        _check_one_sequence(blocks, max_model_len, block_size, block_bytes, f"of {format_bytes(asked)}: {_MORE}")
    else:
        share = max(int(left * part), 0)
        blocks = share // block_bytes
        pool = f"of {format_bytes(share)} ({part:.0%} of the {format_bytes(max(left, 0))} left after {taken})"
        _check_one_sequence(blocks, max_model_len, block_size, block_bytes, f"{pool}: {more}")
        full_sequences = max(max_num_seqs, _MIN_FULL_SEQUENCES)
        blocks = min(blocks, full_sequences * _sequence_blocks(max_model_len, block_size) + 1)
    return KVPoolPlan(blocks, blocks * block_bytes, _line(blocks, block_bytes, block_size, max_model_len))


def _check_left(asked: int, left: int, taken: str, what: str, remedy: str) -> None:
    if asked > left:
        raise ConfigError(
            f"{what} of {format_bytes(asked)} does not fit: {format_bytes(max(left, 0))} of memory is left after "
            f"{taken}; {remedy}"
        )


def _check_one_sequence(blocks: int, max_model_len: int, block_size: int, block_bytes: int, pool: str) -> None:
    """Raise ConfigError for a pool without room for one sequence; `pool` is its size and a remedy."""
    need = _sequence_blocks(max_model_len, block_size) + 1
    if blocks >= need:
        return
    fits = (blocks - 1) * block_size
    lower = f", or set --max-model-len to {fits} or less" if fits > 0 else ""
    raise ConfigError(
        f"one request of max_model_len {max_model_len} tokens needs {format_bytes(need * block_bytes)} of KV, more "
        f"than the pool {pool}{lower}"
    )


def _sequence_blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _line(blocks: int, block_bytes: int, block_size: int, max_model_len: int) -> str:
    tokens = (blocks - 1) * block_size
    times = tokens / max_model_len
    rounded = f"{times:.0f}" if times >= 10 else f"{times:.1f}"
    return f"KV {format_bytes(blocks * block_bytes)} = {tokens:,} tokens = {rounded} x max_model_len"
