"""Models with random weights on one variant of the kernels, and their steps without a scheduler."""

import importlib
import os
import sys
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor


class Absent(ModuleType):
    """Stands for a package that only loading from files needs, where it is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for package in ("xxhash", "rich", "rich.console", "rich.progress", "safetensors", "transformers"):
    try:
        importlib.import_module(package)
    except ImportError:
        sys.modules[package] = Absent(package)

from headstart.core.batch import Batch, Chunk  # noqa: E402
from headstart.core.request import SamplingParams  # noqa: E402
from headstart.model.attention.cpu import CPUAttention  # noqa: E402
from headstart.model.kernels.library import VARIABLE, load_kernels  # noqa: E402
from headstart.model.layers.decoder import Decoder, load_decoder  # noqa: E402
from headstart.model.layers.linear import WeightForm  # noqa: E402
from headstart.model.layers.rotary import RopeConfig  # noqa: E402
from headstart.model.paged_kv import TokenKVShape  # noqa: E402
from headstart.model.step_inputs import StepInputBounds, build_step_inputs  # noqa: E402
from headstart.model.weights.model_config import ModelConfig  # noqa: E402
from headstart.model.weights.shapes import DecoderShape  # noqa: E402

BLOCK, CPU = 16, torch.device("cpu")
Rows = list[tuple[list[int], int, int]]  # tokens of a chunk, position of the first, number of the sequence


def torch_form() -> WeightForm:
    """Return the form of weights that torch multiplies, in oneDNN's packed form."""
    return WeightForm()


def config_of(shape: DecoderShape) -> ModelConfig:
    """Return the settings of a shape of the Llama architecture, without Transformers, which reads config.json."""
    positions = shape.max_position_embeddings
    return ModelConfig(
        architecture=f"{shape.architecture}ForCausalLM",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_hidden_layers,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        windows=(None,) * shape.num_hidden_layers,
        rope=RopeConfig("default", shape.rope_theta, shape.head_dim, positions, positions),
        max_model_len=positions,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        fused_weights=False,
    )


class RandomCheckpoint:
    """A checkpoint whose tensors are drawn when they are taken; norms are ones."""

    def __init__(self, std: float) -> None:
        self._std, self._generator = std, torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return True

    def are_tensors_equal(self, first: str, second: str) -> bool:
        return False

    def load_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype)
        return torch.empty(shape, dtype=dtype).normal_(0.0, self._std, generator=self._generator)

    def load_packed_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        return None


class Model:
    """A decoder, its attention and its KV of 4,096 shared tokens, and of 16 own ones of each of 64 sequences."""

    def __init__(self, shape: DecoderShape, variant: str, *, std: float, form: WeightForm | None = None) -> None:
        os.environ[VARIABLE] = variant  # the attention takes it from there
        config = config_of(shape)
        checkpoint: Any = RandomCheckpoint(std)
        form = WeightForm(load_kernels(variant).kernels) if form is None else form
        self.decoder: Decoder = load_decoder(config, checkpoint, torch.bfloat16, CPU, form)
        self._shared, self._vocab = 4096 // BLOCK, shape.vocab_size
        self._kv = TokenKVShape(config.num_layers, config.num_kv_heads, config.head_dim)
        self._heads = config.num_heads
        num_blocks = 1 + self._shared + 64 * 8
        self._attention = CPUAttention(
            self._kv, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.bfloat16, device=CPU
        )
        self._bounds = StepInputBounds(num_blocks, BLOCK, shape.vocab_size, config.max_model_len)

    @classmethod
    def random(cls, variant: str, *, layers: int = 12, form: WeightForm | None = None) -> Self:
        """Return llama-100m, or its first layers."""
        vocab = 32_000 if layers == 12 else 512
        return cls(
            DecoderShape("Llama", 768, layers, 12, 4, 2048, vocab, 4096, head_dim=64), variant, std=0.02, form=form
        )

    @classmethod
    def small(cls, variant: str) -> Self:
        """Return a model whose logits depend clearly on every token before them."""
        return cls(DecoderShape("Llama", 256, 2, 6, 2, 320, 512, 4096, head_dim=80), variant, std=0.2)

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Return random tokens."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(0, self._vocab, (count,), generator=random).tolist()

    @torch.inference_mode()
    def run(self, rows: Rows, shared: int = 0) -> Tensor:
        """Compute one step and return the logits of each chunk's last token.

        Sequence s has the blocks of its first `shared` tokens in common with all, and 8 blocks of its own behind them;
        without `shared`, all have the common blocks.
        """
        batch = Batch(tuple(self._chunk(*row, index, shared) for index, row in enumerate(rows)))
        step, kept, errors = build_step_inputs(batch, self._bounds, CPU)
        assert step is not None and len(kept) == len(rows), errors
        hidden = self.decoder.forward(step, self._attention.begin_step(step))
        return self.decoder.logits_from_hidden(
            hidden.index_select(0, torch.from_numpy(step.qo_indptr[1:].astype("int64") - 1))
        )

    def attention(self, length: int, sharpness: float = 1.0) -> Callable[[], Tensor]:
        """Return a call that computes one layer's attention of a new prompt, with scores times `sharpness`."""
        batch = Batch((self._chunk(self.tokens(length), 0, 0, 0, 0),))
        step = build_step_inputs(batch, self._bounds, CPU)[0]
        assert step is not None
        begun = self._attention.begin_step(step)
        heads, kv_heads, dim = self._heads, self._kv.num_kv_heads, self._kv.head_dim
        queries, keys, values = (torch.randn(length, count, dim).bfloat16() for count in (heads, kv_heads, kv_heads))
        queries = queries * sharpness
        return lambda: begun(0, queries, keys, values, scale=dim**-0.5)

    def _chunk(self, tokens: list[int], start: int, sequence: int, index: int, shared: int) -> Chunk:
        own = range(1 + self._shared + index * 8, 1 + self._shared + (index + 1) * 8)
        blocks = [*range(1, 1 + shared // BLOCK), *own] if shared else list(range(1, 1 + self._shared))
        history = array("i", [0] * start + tokens)
        return Chunk(
            request_id=str(sequence),
            token_ids=array("i", tokens),
            start=start,
            block_ids=blocks[: -(-len(history) // BLOCK)],
            write_from=start,
            num_logits=1,
            sampling=SamplingParams(max_tokens=1),
            num_prompt_tokens=len(history),
            history=history,
        )
