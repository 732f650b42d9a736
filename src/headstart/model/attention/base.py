"""The attention seam: what a backend is given, what it gives, and the table of those there are.

A backend owns the KV tensors and their layout. Per step `begin` returns the function that every layer calls: it stores
the new keys and values at their slots, then lets each row see its whole prefix. The reference is the oracle of others.
"""

from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.kv import KVShape, PagedKV
from headstart.model.step import StepInputs


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
    ) -> Tensor:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] -> [T, Hq, D]; writes this layer's KV.

        `window` w: position i sees (i - w, i]. `softcap` c: scores become c * tanh(score / c).
        """
        ...


class AttentionBackend(Protocol):
    """Attention over the KV it owns."""

    kv: PagedKV

    def begin(self, step: StepInputs) -> Attend:
        """The attention of one step; valid until the next call of `begin`."""
        ...


class BackendFactory(Protocol):
    """Makes a backend with zeroed KV of `num_blocks` blocks."""

    def __call__(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionBackend: ...


BACKENDS = {"reference": "headstart.model.attention.reference:ReferenceAttention"}


def resolve_backend(name: str) -> str:
    """The backend that `name` (or "auto") stands for. Raises ConfigError for an unknown one."""
    if name == "auto":
        return "reference"
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend {name!r} is not known; choose auto or {', '.join(BACKENDS)}")
    return name


def backend_factory(name: str) -> BackendFactory:
    """The class behind a resolved name; imported only now."""
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(import_module(module), attribute)
