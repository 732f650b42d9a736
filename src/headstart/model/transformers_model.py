"""TransformersModel: other decoders, run by Transformers' own code with our attention over our paged KV.

One packed row [1, T] with absolute positions, no mask and no cache object: Transformers makes no mask for an attention
name that has no mask function. So every layer must do its mixing of tokens through that one attention function; models
with state-space, convolution, linear or cross attention would mix the requests of a batch silently, and are refused.
Code from a checkpoint (`trust_remote_code`) is never run.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from headstart.core.errors import ConfigError
from headstart.model.attention.base import Attend
from headstart.model.config import NATIVE_ARCHITECTURES, architecture_of
from headstart.model.kv import KVShape
from headstart.model.step import StepInputs

ATTENTION_NAME = "headstart"
LAYER_KINDS = {"full_attention", "sliding_attention"}
HARMLESS = {"position_ids", "use_cache", "return_dict", "cache_position"}
OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits"}  # harmless unless switched on
PROBE_TOKENS = 8
SUPPORTED = f"{', '.join(NATIVE_ARCHITECTURES)}, and decoders of Transformers with full or sliding attention layers"


class TransformersModel:
    """A model of Transformers as a LanguageModel; `load_transformers` makes and checks it."""

    def __init__(self, module: PreTrainedModel, kv_shape: KVShape, max_model_len: int) -> None:
        config = module.config.get_text_config()
        self.module, self.kv_shape, self.max_model_len = module, kv_shape, max_model_len
        self.vocab_size: int = config.vocab_size
        self.weight_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        self._body: nn.Module = getattr(module, module.base_model_prefix)
        self._head = _head_only(module)

    def forward(self, step: StepInputs, attend: Attend) -> Tensor:
        """See LanguageModel."""
        return self.hidden(step.token_ids, step.positions, attend)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden] of packed tokens."""
        output = self._body(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, headstart_attend=attend
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See LanguageModel. Runs the model's own head, with whatever scaling or softcapping it applies."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]


@dataclass
class _Final(BaseModelOutputWithPastAndCrossAttentions):
    """Final hidden states, and all else that some model's forward reads of its body's output."""

    router_logits: tuple[Tensor, ...] | None = None


class _Echo(nn.Module):
    """Stands for a model's body where the final hidden states are known already."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Final:
        return _Final(last_hidden_state=inputs_embeds)


class _Recorder:
    """An Attend that mixes nothing: each row gets its own value. Notes what every layer asked for."""

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}
        self.shapes: set[tuple[int, int]] = set()
        self.num_calls = 0

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
        if keys.shape != values.shape or keys.shape[-1] != queries.shape[-1] or queries.shape[1] % keys.shape[1]:
            raise ConfigError(
                f"queries {list(queries.shape)}, keys {list(keys.shape)} and values {list(values.shape)} differ"
            )
        self.windows[layer] = window
        self.shapes.add((keys.shape[1], keys.shape[2]))
        self.num_calls += 1
        return values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)


def attention_function(
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
    headstart_attend: Attend | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in each layer: [1, H, T, D] in, [1, T, Hq, D] out.

    Raises ConfigError for any request that the backends do not implement; nothing is ignored.
    """
    asked = {name for name, given in keywords.items() if given is not None and not (name in OUTPUTS and not given)}
    unknown = sorted(asked - HARMLESS)
    if unknown:
        raise ConfigError(f"its attention asks for {', '.join(unknown)}, which is not implemented")
    if headstart_attend is None or attention_mask is not None or dropout:
        raise ConfigError("it does not hand its attention over: no context, or a mask or dropout of its own")
    if not getattr(module, "is_causal", True) or getattr(module, "is_cross_attention", False):
        raise ConfigError("it has attention that is not causal self-attention")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError("its attention layers carry no index")
    rows = [heads[0].transpose(0, 1) for heads in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = headstart_attend(layer, *rows, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out[None], None


def load_transformers(folder: Path, raw: dict[str, Any], dtype: torch.dtype, device: torch.device) -> TransformersModel:
    """Loads and probes a decoder. Raises ConfigError, naming the architecture, for what would not be right here."""
    architecture = architecture_of(raw)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{architecture} is not known; supported are {SUPPORTED} ({error})") from None
    _refuse_config(architecture, config)
    AttentionInterface.register(ATTENTION_NAME, attention_function)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # its stubs do not know output_loading_info's pair
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        module, info = loaded
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise ConfigError(f"{architecture} cannot be loaded: {error}") from None
    for what in ("missing_keys", "mismatched_keys"):
        if info.get(what):
            raise ConfigError(f"{folder}: {len(info[what])} {what.replace('_', ' ')}, first {sorted(info[what])[0]}")
    module = module.to(device).eval().requires_grad_(False)
    try:
        shape = _probe(module)
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{architecture} is not supported: {error}") from None
    return TransformersModel(module, shape, _max_model_len(architecture, config.get_text_config()))


def _head_only(module: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares the weights, with the body replaced: its forward applies the model's own head alone."""
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
    """Positions that may be used; if rotary scaling depends on the sequence's length, only those before it starts."""
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ConfigError(f"{architecture}: config.json does not say how long a sequence may be")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            positions = min(positions, parameters.get("original_max_position_embeddings") or positions)
    return positions


@torch.inference_mode()
def _probe(module: PreTrainedModel) -> KVShape:
    """Checks, by running it, that a model mixes tokens through our attention only, once in each layer.

    With an attention that mixes nothing, changing one token may change that token's row alone.
    """
    text = module.config.get_text_config()
    model, recorder = TransformersModel(module, KVShape(1, 1, 1), 1), _Recorder()
    positions = torch.arange(PROBE_TOKENS, device=module.device)
    token_ids = positions % text.vocab_size
    hidden = model.hidden(token_ids, positions, recorder)
    num_layers = text.num_hidden_layers
    if recorder.num_calls != num_layers or set(recorder.windows) != set(range(num_layers)):
        raise ConfigError(
            f"{recorder.num_calls} attentions of {len(recorder.windows)} layers were handed over; expected one from "
            f"each of its {num_layers} layers"
        )
    if len(recorder.shapes) != 1:
        raise ConfigError(f"its layers differ in key heads and head size: {sorted(recorder.shapes)}")
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if (kind == "sliding_attention") and recorder.windows[layer] is None:
            raise ConfigError(f"layer {layer} is {kind}, but asks for no window")
    changed = token_ids.clone()
    changed[PROBE_TOKENS // 2] = text.vocab_size - 1
    moved = (model.hidden(changed, positions, recorder) - hidden).abs().amax(-1)
    moved[PROBE_TOKENS // 2] = 0
    if moved.max() > 1e-2 * hidden.abs().max():
        raise ConfigError("it mixes tokens outside its attention (convolution, state space or recurrence)")
    whole = module(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, headstart_attend=recorder
    ).logits[0]
    if not torch.allclose(model.logits(hidden).float(), whole.float(), rtol=1e-2, atol=1e-3):
        raise ConfigError("its head needs more than the final hidden states")
    ((num_kv_heads, head_dim),) = recorder.shapes
    return KVShape(num_layers, num_kv_heads, head_dim)
