"""The attention interface: the protocols of a backend, and the table of backends.

A backend owns the KV and its layout; `read_block` and `write_block` use one canonical form for every layout. For each
step, `begin` returns the function that every layer calls: it stores the new keys and values at their slots, then
computes the attention of each row over its whole prefix. Tests compare every backend with the reference backend.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from headstart.core.cache.block_store import Data
from headstart.core.errors import ConfigError
from headstart.model.kernels.attention import MAX_DIMS
from headstart.model.kernels.library import find_kernels
from headstart.model.paged_kv import TokenKVShape
from headstart.model.step_inputs import StepInputs


class AttentionFunction(Protocol):
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
        """Write this layer's KV and return the attention outputs [T, Hq, D].

        Queries are [T, Hq, D], keys and values [T, Hkv, D]. `window` w: position i sees (i - w, i]. `softcap` c: scores
        become c * tanh(score / c). `sinks` [Hq]: one unscaled score per head, which enters the softmax of all rows of
        that head and has no value.
        """
        ...


class KVBlockIO(Protocol):
    """Access to the KV of a backend by block; see PagedKV."""

    block_bytes: int  # of one block in canonical form

    def read_block(self, block_id: int) -> Data:
        """Copy one block: for each layer keys, then values, [block_size, kv heads, head_dim]. Safe from any thread."""
        ...

    def write_block(self, block_id: int, data: Data) -> None:
        """Store a block given in that form. Call it between two steps. Raises ValueError for a wrong length."""
        ...

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set blocks to zero whose content may not be finite."""
        ...


class AttentionBackend(Protocol):
    """Attention over KV that the backend owns."""

    @property
    def kv(self) -> KVBlockIO: ...

    def begin_step(self, step: StepInputs) -> AttentionFunction:
        """Return the attention function of one step; valid until the next call of `begin`."""
        ...


class BackendFactory(Protocol):
    """Constructor of a backend with zeroed KV of `num_blocks` blocks."""

    def __call__(
        self, shape: TokenKVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionBackend: ...


BACKENDS = {
    "cpu": "headstart.model.attention.cpu:CPUAttention",
    "reference": "headstart.model.attention.reference:ReferenceAttention",
    "triton": "headstart.model.cuda.triton_backend:TritonAttention",
}
LEAST_CAPABILITY = (8, 0)  # of a GPU that Triton attention runs on: has bfloat16


def resolve_backend(name: str, device: str | torch.device = "cpu", head_dim: int = 0) -> str:
    """Return the backend for `name`; "auto" is triton or cpu where it runs, else reference.

    The cpu kernels must be compiled and support `head_dim`. Raises ConfigError for an unknown name, and for triton on a
    device that cannot run it.
    """
    where = torch.device(device)
    if name == "auto":
        if where.type == "cuda" and triton_problem(where) is None:
            return "triton"
        fits = where.type == "cpu" and head_dim <= MAX_DIMS
        return "cpu" if fits and find_kernels().kernels is not None else "reference"
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend {name!r} is not known; choose {', '.join(('auto', *BACKENDS))}")
    if name == "triton" and (problem := triton_problem(where)):
        raise ConfigError(f"attention_backend triton {problem}: choose auto or reference")
    return name


def triton_problem(device: torch.device) -> str | None:
    """Return why Triton attention does not run on `device`, None if it does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"runs on GPUs, not on {device}"
    if find_spec("triton") is None:
        return "needs Triton, which is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, there = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"needs compute capability {needed}, and {device} has {there}"
    return None


def backend_factory(name: str) -> BackendFactory:
    """Return the class for a resolved name. Imports its module at this call."""
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(import_module(module), attribute)
