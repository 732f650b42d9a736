"""Models with random weights in a real shape, created on the device, and engines over them."""

from pathlib import Path

import torch
from torch import Tensor

from headstart.core.engine import Engine
from headstart.core.executor import Executor
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.model.kernels.block_hashes import load_compiled_hash_chain
from headstart.model.layers.decoder import Decoder, load_decoder
from headstart.model.paged_kv import TokenKVShape
from headstart.model.weights.model_config import ModelConfig, parse_config
from headstart.model.weights.model_loader import LoadedModel
from headstart.model.weights.shapes import SHAPES, DecoderShape

BLOCK = 16
SMALL = {
    "small-llama": DecoderShape("Llama", 256, 4, 4, 2, 768, 512, 4096, head_dim=64),
    "small-mha": DecoderShape("Llama", 256, 2, 4, 4, 768, 512, 4096, head_dim=64),
    "small-qwen3": DecoderShape("Qwen3", 256, 3, 4, 2, 512, 512, 4096, head_dim=128),
    "small-qwen2": DecoderShape("Qwen2", 192, 3, 6, 1, 512, 512, 4096, head_dim=32, tie_word_embeddings=True),
}


class RandomCheckpoint:
    """A checkpoint whose tensors are drawn on the device when they are taken; norms are ones."""

    def __init__(self, device: torch.device, *, std: float, seed: int = 0, tied: bool = False) -> None:
        self._device, self._std, self._tied = device, std, tied
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return not (self._tied and name == "lm_head.weight")

    def are_tensors_equal(self, first: str, second: str) -> bool:
        return self._tied

    def load_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        tensor = torch.empty(shape, dtype=torch.float32 if dtype == torch.float32 else dtype, device=self._device)
        return tensor.normal_(0.0, self._std, generator=self._generator)

    def load_packed_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        return None


def random_model(
    shape: str, dtype: torch.dtype, device: torch.device, *, std: float = 0.02, drawn_on: torch.device | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:  # fmt: skip
    """Return a loaded model. `drawn_on`: the device of the random numbers, so that two devices have equal weights."""
    form = (SMALL | SHAPES)[shape]
    name = str(dtype).removeprefix("torch.")
    config: ModelConfig = parse_config(form.config(dtype=name, bos_token_id=1, eos_token_id=2, std=std))
    checkpoint = RandomCheckpoint(drawn_on or device, std=std, tied=form.tie_word_embeddings)
    model: Decoder = load_decoder(config, checkpoint, dtype, device)
    return LoadedModel(
        folder=Path(),
        architecture=config.architecture,
        model=model,
        dtype=dtype,
        device=device,
        kv_shape=TokenKVShape(config.num_layers, config.num_kv_heads, config.head_dim),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or config.max_model_len,
        eos_token_ids=(),
        weight_bytes=model.weight_bytes,
        fingerprint=b"",
        attention_backend="reference",
    )


def make_engine(
    executor: Executor, *, budget: int, max_len: int = 4096, max_seqs: int = 256, caching: bool = True
) -> Engine:
    limits = Limits(max_batched_tokens=budget, max_seqs=max_seqs, max_model_len=max_len)
    config = SchedulerConfig(
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        limits=limits,
        enable_prefix_caching=caching,
        policy="lpm",
    )
    return Engine(Scheduler(config, chain=load_compiled_hash_chain()), executor)
