"""Models with random weights in a real architecture's shape, with a tokenizer: `headstart init-model`.

Tensors are generated and written shard by shard, so a model may be larger than the memory. Each tensor has its own
seed: the same (shape, seed, std, dtype) gives the same bytes with the same version of torch.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.weights.shapes import SHAPES, WEIGHT_DTYPES, DecoderShape, check_random_weights
from headstart.model.weights.synthetic_tokenizer import BOS_ID, EOS_ID, PAD_ID, write_tokenizer

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in WEIGHT_DTYPES}
_SHARD_BYTES = 2_000_000_000

Sizes = list[tuple[str, tuple[int, ...]]]


def write_random_model(
    shape: str,
    out: Path,
    *,
    std: float = 0.02,
    seed: int = 0,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    progress: bool = True,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Write the folder `out` and return it.

    `std` is the standard deviation of the weights. 0.02 is the initial value of real models and gives nearly uniform
    distributions over the next token; at 0.2, outputs depend clearly on every token before them, as tests of
    correctness need. Raises ConfigError for an unknown shape or dtype, or if `out` is not empty (unless `overwrite` is
    set and `out` holds a model).
    """
    check_random_weights(shape, std=std, dtype=dtype)
    _make_room(out, SHAPES[shape], _DTYPES[dtype].itemsize, overwrite=overwrite)
    table = SHAPES[shape]
    _write_json(out / "config.json", table.config(dtype=dtype, bos_token_id=BOS_ID, eos_token_id=EOS_ID, std=std))
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(out / "generation_config.json", {"do_sample": False, **ids})
    write_tokenizer(out, table.vocab_size, max_length=table.max_position_embeddings)
    _write_weights(table, out, std=std, seed=seed, dtype=_DTYPES[dtype], progress=progress, shard_bytes=shard_bytes)
    return out


def _make_room(out: Path, table: DecoderShape, element_bytes: int, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ConfigError(f"{out} exists and is not empty; name another folder, or ask to overwrite it")
        if not (out / "config.json").is_file():
            raise ConfigError(f"{out} holds something that is not a model; it is not overwritten")
        for weights in (*out.glob("model*.safetensors"), *out.glob("model.safetensors.index.json")):
            weights.unlink()  # file names depend on the number of shards; every other file is overwritten
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out}: {error.strerror}") from error
    need, free = table.num_parameters * element_bytes, shutil.disk_usage(out).free
    if need > free:
        raise ConfigError(f"{out} needs {need / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free")


def _write_weights(
    table: DecoderShape, out: Path, *, std: float, seed: int, dtype: torch.dtype, progress: bool, shard_bytes: int
) -> None:
    shards = list(_shards(table, dtype.itemsize, shard_bytes))
    where: dict[str, str] = {}
    number = 0
    with _progress_bar(visible=progress) as bar:
        task = bar.add_task("random weights", total=table.num_parameters * dtype.itemsize)
        for index, shard in enumerate(shards, 1):
            file = f"model-{index:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, Tensor] = {}
            for name, size in shard:
                tensors[name] = _random(name, size, std=std, seed=seed * 1_000_003 + number, dtype=dtype)
                where[name] = file
                number += 1
                bar.advance(task, tensors[name].nbytes)
            save_file(tensors, out / file, metadata={"format": "pt"})
            (out / file).chmod((out / "config.json").stat().st_mode)  # safetensors makes it readable by the owner only
    if len(shards) > 1:
        total = {"total_size": table.num_parameters * dtype.itemsize}
        _write_json(out / "model.safetensors.index.json", {"metadata": total, "weight_map": where})


def _shards(table: DecoderShape, element_bytes: int, shard_bytes: int) -> Iterator[Sizes]:
    """Split the tensors, in order, into files of at most `shard_bytes` (or of one tensor)."""
    shard: Sizes = []
    filled = 0
    for name, size in table.tensors():
        nbytes = element_bytes * torch.Size(size).numel()
        if shard and filled + nbytes > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append((name, size))
        filled += nbytes
    yield shard


def _random(name: str, size: tuple[int, ...], *, std: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Return a random tensor: ones for norms, as in every untrained model, otherwise a normal distribution."""
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=dtype)
    return torch.empty(size, dtype=dtype).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def _progress_bar(*, visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), disable=not visible)


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
