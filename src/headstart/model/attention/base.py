"""The attention seam: what a backend is given, what it gives, and the table of those there are.

A backend owns the KV and its layout; blocks leave it in one canonical form, whatever the layout. Per step `begin`
returns the function that every layer calls: it stores the new keys and values at their slots, then lets each row see
its whole prefix. The reference is the oracle of others.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from headstart.core.cache.block_store import Data
from headstart.core.errors import ConfigError
from headstart.model.kernels.attention import MAX_DIMS
from headstart.model.kernels.library import find
from headstart.model.paged_kv import KVShape
from headstart.model.step_inputs import StepInputs


class Attend(Protocol):
    """Attention of one step, called once per layer with packed rows."""

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] -> [T, Hq, D]; writes this layer's KV.

        `window` w: position i sees (i - w, i]. `softcap` c: scores become c * tanh(score / c). `sinks` [Hq]: a score of
        each head, as is, that counts in the softmax of all its rows and has no value.
        """
        ...


class KVBlocks(Protocol):
    """The KV of a backend, block by block; see PagedKV."""

    block_bytes: int  # of one block in canonical form

    def read_block(self, block_id: int) -> Data:
        """A copy of one block: for each layer keys, then values, [block_size, kv heads, head_dim]; from any thread."""
        ...

    def write_block(self, block_id: int, data: Data) -> None:
        """Takes a block in that form, between two steps. Raises ValueError for a wrong length."""
        ...

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clears blocks whose content may not be finite."""
        ...


class AttentionBackend(Protocol):
    """Attention over the KV it owns."""

    @property
    def kv(self) -> KVBlocks: ...

    def begin(self, step: StepInputs) -> Attend:
        """The attention of one step; valid until the next call of `begin`."""
        ...


class BackendFactory(Protocol):
    """Makes a backend with zeroed KV of `num_blocks` blocks."""

    def __call__(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionBackend: ...


BACKENDS = {
    "cpu": "headstart.model.attention.cpu:CPUAttention",
    "reference": "headstart.model.attention.reference:ReferenceAttention",
}


def resolve_backend(name: str, device: str | torch.device = "cpu", head_dim: int = 0) -> str:
    """The backend that `name` stands for; "auto" is cpu on a CPU that has its kernels for `head_dim`, else reference.

    Raises ConfigError for an unknown one.
    """
    if name == "auto":
        fits = torch.device(device).type == "cpu" and head_dim <= MAX_DIMS
        return "cpu" if fits and find().kernels is not None else "reference"
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend {name!r} is not known; choose auto, {' or '.join(BACKENDS)}")
    return name


def backend_factory(name: str) -> BackendFactory:
    """The class behind a resolved name; imported only now."""
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(import_module(module), attribute)
