"""TransformersModel: decoders outside the Llama family, run by Transformers' code with our attention over paged KV.

A step is one packed row [1, T] with absolute positions, no mask and no cache object: Transformers makes no mask for an
attention name that has no mask function. Every layer must therefore mix tokens only through that attention function,
and with the same mask as that function (see transformers_probe.py). Models with state-space, convolution, linear or
cross attention would mix the requests of a batch silently; they are refused. Code from a checkpoint
(`trust_remote_code`) is never run.
"""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from headstart.core.errors import ConfigError
from headstart.model.attention.base import AttentionFunction
from headstart.model.kernels.stack import HeadOutputs
from headstart.model.paged_kv import TokenKVShape
from headstart.model.step_inputs import StepInputs
from headstart.model.transformers_probe import probe_kv_shape
from headstart.model.weights.architectures import SUPPORTED, architecture_of
from headstart.model.weights.checkpoint import ModelCheckpoint
from headstart.model.weights.json_file import one_line_error, shorten_text

ATTENTION_NAME = "headstart"
LAYER_KINDS = {"full_attention", "sliding_attention"}
HARMLESS = {"position_ids", "use_cache", "return_dict", "cache_position"}
OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits"}  # disabled when the model is loaded
ELSEWHERE = ("transformers_weights", "extra_files")  # make Transformers read files that the fingerprint does not cover
SLACK = 2  # allowed ratio to the weights in the files; some models have fixed parameters that are not saved
MAX_BUFFER_BYTES = 1 << 30


class TransformersModel:
    """A model of Transformers as a LanguageModel. `load_transformers` creates and checks it."""

    state_size = 0

    def __init__(self, module: PreTrainedModel, kv_shape: TokenKVShape, max_model_len: int) -> None:
        config = module.config.get_text_config()
        self.module, self.kv_shape, self.max_model_len = module, kv_shape, max_model_len
        self.vocab_size: int = config.vocab_size
        self.weight_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        self._body: nn.Module = getattr(module, module.base_model_prefix)
        self._head = _head_only(module)

    def forward(self, step: StepInputs, attend: AttentionFunction, ahead: HeadOutputs | None = None) -> Tensor:
        """See LanguageModel."""
        return self.hidden_states(step.token_ids, step.positions, attend)

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor:
        """Return the final hidden states [T, hidden] of packed tokens."""
        output = self._body(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, headstart_attend=attend
        )
        return output.last_hidden_state[0]

    def logits_from_hidden(self, hidden: Tensor) -> Tensor:
        """See LanguageModel. Runs the model's own head, including its scaling or softcapping."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]


@dataclass
class _Final(BaseModelOutputWithPastAndCrossAttentions):
    """Final hidden states, and the other fields that some model's forward reads from the output of its body."""

    router_logits: tuple[Tensor, ...] | None = None


class _Echo(nn.Module):
    """Replacement of a model's body that returns its input, the final hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Final:
        return _Final(last_hidden_state=inputs_embeds)


def compute_layer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    headstart_attend: AttentionFunction | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer; Transformers calls this. Inputs are [1, H, T, D], outputs [1, T, Hq, D].

    Raises ConfigError for any option that the backends do not implement; no option is ignored.
    """
    asked = {name for name, given in keywords.items() if given is not None and not (name in OUTPUTS and not given)}
    unknown = sorted(asked - HARMLESS)
    if unknown:
        raise ConfigError(f"its attention uses {', '.join(unknown)}, which is not implemented")
    if headstart_attend is None or attention_mask is not None or dropout:
        raise ConfigError("it does not use the registered attention alone: no context, or a mask or dropout of its own")
    if is_causal is False or not getattr(module, "is_causal", True) or getattr(module, "is_cross_attention", False):
        raise ConfigError("it has attention that is not causal self-attention")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError("its attention layers carry no index")
    rows = [heads[0].transpose(0, 1) for heads in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = headstart_attend(layer, *rows, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out[None], None


def load_transformers(
    folder: Path, raw: dict[str, Any], dtype: torch.dtype, device: torch.device, checkpoint: ModelCheckpoint
) -> TransformersModel:
    """Load and probe a decoder. Raises ConfigError, which names the architecture, for a model that is not supported."""
    architecture = architecture_of(raw)
    config = _read_config(folder, raw, architecture)
    _refuse_config(architecture, config)
    max_model_len = _max_model_len(architecture, config.get_text_config())
    AttentionInterface.register(ATTENTION_NAME, compute_layer_attention)
    try:
        _check_size(config, checkpoint)
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # its stubs omit the pair that output_loading_info gives
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except ConfigError as error:
        raise ConfigError(f"{architecture}: {error}") from None
    except Exception as error:  # third-party code may raise any type
        raise ConfigError(f"{architecture} cannot be loaded: {one_line_error(error)}") from error
    module, info = loaded
    for what in ("missing_keys", "mismatched_keys"):
        if info.get(what):
            first = shorten_text(str(sorted(info[what])[0]), 200)
            raise ConfigError(f"{folder}: {len(info[what])} {what.replace('_', ' ')}, first {first}")
    model = TransformersModel(module.to(device).eval().requires_grad_(False), TokenKVShape(1, 1, 1), max_model_len)
    try:
        model.kv_shape = probe_kv_shape(model, compute_layer_attention, max_model_len)
    except ConfigError as error:
        raise ConfigError(f"{architecture} is not supported: {error}") from error
    except Exception as error:  # third-party code may raise any type
        raise ConfigError(f"{architecture} is not supported: it fails when probed: {one_line_error(error)}") from error
    return model


def _read_config(folder: Path, raw: dict[str, Any], architecture: str) -> PretrainedConfig:
    """Read Transformers' config object and disable all outputs but logits and hidden states. Raises ConfigError."""
    for key in ELSEWHERE:
        if raw.get(key):
            raise ConfigError(f"{architecture}: config.json names {key}; weights are read from the usual files only")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for part in (config, config.get_text_config()):
            for name in OUTPUTS:
                if getattr(part, name, False):
                    setattr(part, name, False)
            part.return_dict = True
    except Exception as error:  # third-party code may raise any type
        raise ConfigError(
            f"{architecture} is not known; supported are {SUPPORTED} ({one_line_error(error)})"
            if raw.get("model_type") not in CONFIG_MAPPING
            else f"{architecture}: Transformers refuses its config.json: {one_line_error(error)}"
        ) from error
    return config


def _check_size(config: PretrainedConfig, checkpoint: ModelCheckpoint) -> None:
    """Raise ConfigError, before any allocation, if `config` describes a far larger model than the files hold."""
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(num_layers, int) or not 0 < num_layers <= len(checkpoint.entries):
        raise ConfigError(
            f"config.json describes {num_layers!r} layers, but the files hold {len(checkpoint.entries)} tensors"
        )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    held = sum(math.prod(entry.shape) for entry in checkpoint.entries.values())
    described = sum(parameter.numel() for parameter in module.parameters())
    if described > SLACK * held:
        raise ConfigError(f"config.json describes {described:,} weights, but the files hold {held:,}")
    buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
    if buffer_bytes > MAX_BUFFER_BYTES + 4 * SLACK * held:
        raise ConfigError(f"config.json describes tables of {buffer_bytes:,} bytes beside {held:,} weights")


def _head_only(module: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares the weights, with the body replaced: its forward applies only the model's own head."""
    head = copy.copy(module)
    vars(head)["_modules"] = {**dict(module.named_children()), module.base_model_prefix: _Echo()}
    return head


def _refuse_config(architecture: str, config: PretrainedConfig) -> None:
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{architecture} is not supported: it is an encoder-decoder (supported: {SUPPORTED})")
    kinds = set(getattr(text, "layer_types", None) or ()) - LAYER_KINDS
    if kinds:
        raise ConfigError(f"{architecture} is not supported: it has {', '.join(sorted(kinds))} layers")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{architecture} is not supported: it is not a causal language model")
    if not getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_attention_backend", False):
        raise ConfigError(f"{architecture} is not supported: its attention cannot be replaced (supported: {SUPPORTED})")


def _max_model_len(architecture: str, text: PretrainedConfig) -> int:
    """Return the number of usable positions; if rotary scaling depends on the length, only those before it starts."""
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ConfigError(f"{architecture}: config.json does not say how long a sequence may be")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings") or positions
            if type(original) is not int or original < 1:
                raise ConfigError(
                    f"config.json: original_max_position_embeddings is {shorten_text(repr(original), 80)}; it must be "
                    f"a positive integer"
                )
            positions = min(positions, original)
    return positions
