"""load_model: loads a folder in Hugging Face's layout, or a GGUF file, with the facts that a front end needs about it.

The Llama family runs in the compact decoder, other decoders in Transformers. A model that cannot be served correctly is
refused with a ConfigError that names the reason.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from headstart import __version__
from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import has_gguf_suffix
from headstart.model.attention.base import resolve_backend
from headstart.model.kernels.library import find_kernels, kernel_library_in_use
from headstart.model.kernels.packed import ACTIVATION_BITS
from headstart.model.layers.decoder import Decoder, LanguageModel, load_decoder
from headstart.model.layers.dispatch import CHOICES, linear_kernels_of_option
from headstart.model.layers.hybrid_decoder import HybridDecoder
from headstart.model.layers.hybrid_weights import load_hybrid
from headstart.model.layers.linear import WeightForm
from headstart.model.paged_kv import TokenKVShape
from headstart.model.source_digest import source_digest
from headstart.model.weights.architectures import NATIVE_ARCHITECTURES, architecture_of, refuse_quantised
from headstart.model.weights.checkpoint import LoadingBar, ModelCheckpoint
from headstart.model.weights.config_bounds import check_config_sizes
from headstart.model.weights.config_keys import NotNativeError
from headstart.model.weights.gguf.block_formats import FORMATS
from headstart.model.weights.hybrid_config import language_model_config
from headstart.model.weights.model_config import ModelConfig, eos_token_ids, parse_config
from headstart.model.weights.model_files import read_config

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
QUANTIZATIONS = ("none", "int8", "int4")
TRANSFORMERS_MODEL = "headstart.model.transformers_model"  # imported where it is needed: brings torch's compiler


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run, and its properties: sizes in bytes, lengths in tokens."""

    folder: Path
    architecture: str
    model: LanguageModel
    dtype: torch.dtype
    device: torch.device
    kv_shape: TokenKVShape
    vocab_size: int  # rows of the logits
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    fingerprint: bytes  # of the weights and all else that determines KV: equal exactly if KV may be shared
    attention_backend: str
    exceptions: tuple[str, ...] = ()  # from invariant 15 (docs/invariants.md), by name; empty: reuse is exact
    batch_invariant: bool = False  # asked for: on a GPU the one form of products and attention that is exact

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of the keys and values of one token in the pool."""
        return self.kv_shape.token_bytes(self.dtype)

    @property
    def state_bytes(self) -> int:
        """The bytes of the recurrent state of one sequence; 0 for a model without."""
        return 4 * self.model.state_size


def load_model(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention_backend: str = "auto",
    quantization: str = "none",
    linear_dispatch: str = "auto",
    activation_bits: int = 16,
    batch_invariant: bool = False,
) -> LoadedModel:
    """Load the model of a folder or GGUF file, with progress on stderr. Raises ConfigError if it cannot be served.

    `quantization` int8 keeps every matrix but the embedding as int8 with one scale per output; int4 those of the layers
    in blocks of Q4_1, with a scale and a minimum per 32 inputs of an output, and the output head as int8.
    `linear_dispatch` says what multiplies weights on a CPU: our kernels where they exist (auto, kernels), or torch, for
    weights that are neither quantised nor in blocks.
    `activation_bits` are those of the rows that weights in blocks are multiplied by, 16 or 8. `batch_invariant`: on a
    GPU, the bits of a row do not depend on the other rows of a step, nor on how a prompt is cut; see docs/cuda.md.
    """
    raw = language_model_config(read_config(folder))
    architecture = architecture_of(raw)
    refuse_quantised(raw)
    chosen_dtype, chosen_device = resolve_dtype(dtype, raw), resolve_device(device)
    resolve_backend(attention_backend, chosen_device)
    check_config_sizes(raw)
    native, why = _native_config(raw, architecture)
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization {quantization!r} is not known; choose {', '.join(QUANTIZATIONS)}")
    if linear_dispatch not in CHOICES:
        raise ConfigError(f"linear_dispatch {linear_dispatch!r} is not known; choose {', '.join(CHOICES)}")
    if activation_bits not in ACTIVATION_BITS:
        raise ConfigError(f"activation_bits is {activation_bits}; choose {' or '.join(map(str, ACTIVATION_BITS))}")
    if quantization != "none" and native is None:
        raise ConfigError(
            f"quantization {quantization} is not supported for {architecture}, which Transformers runs{why}; "
            f"leave it out, or use one of {', '.join(NATIVE_ARCHITECTURES)}"
        )
    if native is None and has_gguf_suffix(folder):
        raise ConfigError(f"{folder.name} is not supported in GGUF{why}; the model's folder of safetensors may be")
    checkpoint, bits, compiled = ModelCheckpoint(folder), 16, None
    if native is None:
        transformers_model: Any = import_module(TRANSFORMERS_MODEL)
        try:
            model = breadth = transformers_model.load_transformers(folder, raw, chosen_dtype, chosen_device, checkpoint)
        except ConfigError as error:
            raise ConfigError(f"{error}{why}") from error
        shape, vocab_size, max_model_len = breadth.kv_shape, breadth.vocab_size, breadth.max_model_len
    else:
        with LoadingBar(checkpoint.num_bytes, f"Loading {folder.name}") as bar, checkpoint.reading(bar.advance):
            compiled = kernel_library_in_use() if chosen_device.type == "cpu" else None
            kinds = {entry.dtype for entry in checkpoint.entries.values()} & FORMATS.keys()
            blocks = any(FORMATS[kind].block_size > 1 for kind in kinds)  # in bfloat16 only our kernels multiply them
            if quantization == "none" and (chosen_dtype == torch.float32 or not blocks):
                compiled = linear_kernels_of_option(compiled, linear_dispatch)
            if (
                chosen_dtype == torch.bfloat16
                and compiled
                and (quantization == "int4" or (quantization == "none" and blocks))
            ):
                bits = activation_bits
            form = WeightForm(compiled, quantization, chosen_dtype, chosen_device, bits)
            load = load_decoder if native.hybrid is None else load_hybrid
            model = load(native, checkpoint, chosen_dtype, chosen_device, form)
        shape = TokenKVShape(native.num_attention_layers, native.num_kv_heads, native.head_dim)
        vocab_size, max_model_len = native.vocab_size, native.max_model_len
    resolved = resolve_backend(attention_backend, chosen_device, shape.head_dim)
    products = "torch" if compiled is None else compiled.variant
    exact = batch_invariant and uses_cuda_executor(model, chosen_device, resolved)
    exceptions = () if exact else tuple(_exceptions(model, chosen_device, products, resolved))
    if batch_invariant and exceptions:
        raise ConfigError(
            f"--batch-invariant: {architecture} on {chosen_device} is not ({', '.join(exceptions)}; see "
            "docs/invariants.md, 15): leave it out, or use a model of Headstart's own decoder in bfloat16 or float32"
        )
    computed_by = _computed_by(
        chosen_dtype,
        chosen_device,
        f"{resolved} batch-invariant" if exact else resolved,
        f"{quantization}-{bits}-{products}",
        native is None,
    )
    return LoadedModel(
        folder=folder,
        architecture=architecture,
        model=model,
        dtype=chosen_dtype,
        device=chosen_device,
        kv_shape=shape,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(folder, raw),
        weight_bytes=model.weight_bytes,
        fingerprint=checkpoint.fingerprint(json.dumps(raw, sort_keys=True).encode(), computed_by),
        attention_backend=resolved,
        exceptions=exceptions,
        batch_invariant=exact,
    )


def uses_cuda_executor(model: LanguageModel, device: torch.device, backend: str) -> bool:
    """Return whether the executor of model/cuda/ runs this model: a decoder of ours with plain weights on a GPU."""
    return device.type == "cuda" and backend == "triton" and isinstance(model, Decoder) and model.has_plain_weights


def _exceptions(model: LanguageModel, device: torch.device, products: str, backend: str) -> Iterator[str]:
    """Yield what keeps this model from invariant 15; docs/invariants.md explains the names."""
    if device.type != "cpu":
        yield device.type
    if not isinstance(model, Decoder | HybridDecoder):
        yield "transformers"
    elif products == "torch" and device.type == "cpu":
        yield "torch-products"
    elif device.type == "cpu" and not model.is_batch_invariant():
        yield "row-test"
    if backend == "reference":
        yield "torch-attention"


def _native_config(raw: dict[str, Any], architecture: str) -> tuple[ModelConfig | None, str]:
    """Return the compact decoder's config, or None and the reason, as a suffix for a message, if it cannot run this."""
    if architecture not in NATIVE_ARCHITECTURES:
        return None, ""
    try:
        return parse_config(raw), ""
    except NotNativeError as error:
        return None, f" (Headstart's own decoder does not take it: {error})"


def _computed_by(
    dtype: torch.dtype, device: torch.device, backend: str, quantization: str, by_transformers: bool
) -> bytes:
    """Return all inputs besides weights and config that affect the KV in a block, as part of the fingerprint.

    These are the dtype, the quantisation of weights and activations with what multiplies them, the kind of device, the
    attention backend, the instruction set of the kernels, the releases of Headstart, torch and (if it runs the model)
    Transformers, and the digest of the code of models and kernels, which may change between two releases: stored KV
    outlives the process, and another build must not load KV that it would compute differently. The number of threads is
    not included: it changes no bit of our kernels' results.
    """
    releases = {"headstart": __version__, "torch": str(torch.__version__), "code": source_digest().hex()}
    if by_transformers:
        releases["transformers"] = transformers.__version__
    variant = find_kernels().note if backend == "cpu" else ""
    return json.dumps([str(dtype), quantization, device.type, backend, variant, releases], sort_keys=True).encode()


def resolve_dtype(dtype: str, config: dict[str, Any]) -> torch.dtype:
    """Return the compute dtype; "auto" is the checkpoint's, or bfloat16 for float16 (same size, no overflow)."""
    if dtype == "auto":
        stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return torch.float32 if stored == "float32" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; choose auto, {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_device(device: str) -> torch.device:
    """Return the device to run on; "auto" is cuda if available. Raises ConfigError if the device does not exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {device!r} is not known; choose auto, cpu or cuda[:N]") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; choose auto, cpu or cuda[:N]")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return chosen
