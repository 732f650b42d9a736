"""Probes of a Transformers model: they check that it mixes tokens only through our attention, with the same mask.

Two short forward passes are compared with the behaviour in serving. In the first, attention mixes no tokens, so a
changed token may change only its own row. In the second, Transformers builds its masks: the mask of each layer must
allow exactly the keys that our attention allows (causal, within the requested window), at every position that may be
served. Transformers' cache must not drop keys and values that a layer still attends to. Any other model is refused
with an error that names the problem.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from headstart.core.errors import ConfigError
from headstart.model.attention.base import AttentionFunction
from headstart.model.paged_kv import TokenKVShape
from headstart.model.weights.json_file import one_line_error

PROBE_TOKENS = 8
PROBE_NAME = "headstart_probe"
FORWARD = "its forward pass needs more than tokens and positions, or fails on them"
HEAD = "its head cannot run apart from its body"
_RULE = "headstart_rule"  # attribute of a mask: the function of positions from which it was built

Rule = Callable[[int, int, Tensor, Tensor], Tensor]  # batch, head, query positions, key positions -> is allowed


class ProbedModel(Protocol):
    """A model in the form in which it is served."""

    module: PreTrainedModel

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor: ...

    def logits_from_hidden(self, hidden: Tensor) -> Tensor: ...


class RecordingAttention:
    """An Attend that mixes no tokens: each row gets its own value. Records the options each layer passes."""

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
                f"queries {list(queries.shape)}, keys {list(keys.shape)} and values {list(values.shape)} of its "
                "attention differ in size, which the KV cache has no room for"
            )
        for name, bound in (("window", window), ("softcap", softcap)):
            if bound is not None and not bound > 0:
                raise ConfigError(f"the attention of layer {layer} has a {name} of {bound}; it must be positive")
        if not all(bool(rows.isfinite().all()) for rows in (queries, keys, values)):
            raise ConfigError(f"queries, keys or values of layer {layer} are not finite numbers")
        self.windows[layer] = window
        self.shapes.add((keys.shape[1], keys.shape[2]))
        self.num_calls += 1
        return values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)


@torch.inference_mode()
def probe_kv_shape(model: ProbedModel, attention: Callable[..., Any], max_positions: int) -> TokenKVShape:
    """Return the KV shape of one token. Raises ConfigError for a model that would give wrong results.

    `attention` is the function registered for serving, `max_positions` the number of positions that are served.
    """
    module, recorder = model.module, RecordingAttention()
    text = module.config.get_text_config()
    positions = torch.arange(PROBE_TOKENS, device=module.device)
    token_ids = positions % text.vocab_size
    hidden = _run(FORWARD, lambda: model.hidden_states(token_ids, positions, recorder))
    shape = _layers_handed_over(recorder, text.num_hidden_layers)
    if not bool(hidden.isfinite().all()):
        raise ConfigError("its hidden states are not finite numbers")
    changed = token_ids.clone()
    changed[PROBE_TOKENS // 2] = text.vocab_size - 1
    moved = (model.hidden_states(changed, positions, recorder) - hidden).abs().amax(-1)
    moved[PROBE_TOKENS // 2] = 0
    if moved.max() > 1e-2 * hidden.abs().max():
        raise ConfigError("it mixes tokens outside its attention (convolution, state space or recurrence)")
    whole = module(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, headstart_attend=recorder
    ).logits[0]
    logits = _run(HEAD, lambda: model.logits_from_hidden(hidden))
    if not torch.allclose(logits.float(), whole.float(), rtol=1e-2, atol=1e-3):
        raise ConfigError("its head needs more than the final hidden states")
    if not bool(logits.isfinite().all()):
        raise ConfigError("its logits are not finite numbers")
    _check_masks(model, attention, recorder, token_ids, positions, max_positions)
    _check_cache(module, recorder.windows, max_positions)
    return shape


def find_non_causal_mask_pair(rule: Rule, window: int | None, max_positions: int) -> tuple[int, int] | None:
    """Return a query and a key position at which `rule` is not causal within `window`, or None.

    Both are below `max_positions`. Checks whole rows near powers of two and near one and two windows, where masks
    change, and the last row.
    """
    edges = {1 << bit for bit in range(max_positions.bit_length())} | {0, max_positions - 1}
    if window is not None:
        edges |= {window, 2 * window}
    rows = sorted({edge + step for edge in edges for step in (-1, 0, 1) if 0 <= edge + step < max_positions})
    for row in rows:
        first = max(0, row - 2 * _ROW_KEYS)  # checks all keys, but in very long rows only those at both ends
        keys = torch.cat((torch.arange(min(first, _ROW_KEYS)), torch.arange(first, min(row + 65, max_positions))))
        query = torch.tensor([row])
        seen = torch.as_tensor(rule(0, 0, query[:, None], keys[None])).expand(1, len(keys))[0]
        expected = (keys <= row) & (keys > row - window if window is not None else True)
        wrong = (seen != expected).nonzero()
        if len(wrong):
            return row, int(keys[wrong[0]])
    return None


_ROW_KEYS = 1 << 17


def _run(complaint: str, call: Callable[[], Tensor]) -> Tensor:
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # third-party code may raise any type
        raise ConfigError(f"{complaint} ({one_line_error(error)})") from error


def _layers_handed_over(recorder: RecordingAttention, num_layers: int) -> TokenKVShape:
    if recorder.num_calls != num_layers or set(recorder.windows) != set(range(num_layers)):
        raise ConfigError(
            f"our attention was called {recorder.num_calls} times by {len(recorder.windows)} layers; expected one call "
            f"from each of its {num_layers} layers"
        )
    if len(recorder.shapes) != 1:
        raise ConfigError(f"its layers differ in key heads and head size: {sorted(recorder.shapes)}")
    ((num_kv_heads, head_dim),) = recorder.shapes
    return TokenKVShape(num_layers, num_kv_heads, head_dim)


def _check_masks(
    model: ProbedModel,
    attention: Callable[..., Any],
    recorder: RecordingAttention,
    token_ids: Tensor,
    positions: Tensor,
    max_positions: int,
) -> None:
    """Raise ConfigError if the mask that Transformers builds for a layer differs from the one our attention applies."""
    rules: dict[int, Rule | None] = {}

    def probing(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
    ) -> Any:
        rules[module.layer_idx] = getattr(attention_mask, _RULE, None)  # pyrefly: ignore[unsupported-operation]
        return attention(module, query, key, value, None, **asked)

    AttentionInterface.register(PROBE_NAME, probing)
    AttentionMaskInterface.register(PROBE_NAME, _mask)
    with _attention(model.module, PROBE_NAME):
        _run(FORWARD, lambda: model.hidden_states(token_ids, positions, recorder))
    found: dict[tuple[int, int | None], tuple[int, int] | None] = {}
    for layer, rule in sorted(rules.items()):
        if rule is None:
            raise ConfigError(f"layer {layer} is given no causal mask, or one that does not depend on positions alone")
        window = recorder.windows[layer]
        if (id(rule), window) not in found:
            found[id(rule), window] = find_non_causal_mask_pair(rule, window, max_positions)
        at = found[id(rule), window]
        if at is not None:
            kind = "a causal mask" if window is None else f"a window of {window} tokens"
            raise ConfigError(
                f"the attention of layer {layer} has {kind}, but Transformers' mask for it differs at query {at[0]}, "
                f"key {at[1]}"
            )


def _mask(*, batch_size: int, q_length: int, kv_length: int, mask_function: Rule, **_: Any) -> Tensor:
    """Return an additive mask for Transformers' eager attention, with the rule it was built from as an attribute."""
    queries, keys = torch.arange(q_length)[:, None], torch.arange(kv_length)[None]
    seen = torch.as_tensor(mask_function(0, 0, queries, keys)).expand(q_length, kv_length)
    mask = torch.zeros(batch_size, 1, q_length, kv_length).masked_fill(~seen, torch.finfo(torch.float32).min)
    setattr(mask, _RULE, mask_function)
    return mask


@contextmanager
def _attention(module: PreTrainedModel, name: str) -> Generator[None]:
    """Make `module` use the attention function `name` within the context."""
    configs: list[Any] = [child.config for child in module.modules() if hasattr(child, "config")]
    unique = {id(config): config for config in configs}.values()
    before = [(config, config._attn_implementation) for config in unique]
    try:
        for config in unique:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _check_cache(module: PreTrainedModel, windows: dict[int, int | None], max_positions: int) -> None:
    """Raise ConfigError if the cache of `generate` drops keys and values that a layer still attends to.

    Also if it keeps more for one layer than for another layer with the same window: Transformers uses one mask for both
    and fails.
    """
    try:
        layers: list[Any] = DynamicCache(config=module.config.get_text_config(decoder=True)).layers
    except Exception as error:  # third-party code may raise any type
        raise ConfigError(f"Transformers makes no cache for it: {one_line_error(error)}") from error
    lengths: dict[int | None, tuple[int, int | None]] = {}  # by window: the first layer, and the length kept for it
    for index, layer in enumerate(layers):
        if not isinstance(layer, DynamicLayer):
            raise ConfigError(f"Transformers keeps no keys and values for layer {index} ({type(layer).__name__})")
        kept, window = getattr(layer, "sliding_window", None), windows.get(index)
        if kept is not None and kept < max(2, min(max_positions, window or max_positions)):
            raise ConfigError(
                f"layer {index} sees {window or 'all'} tokens in a forward pass, but the cache of Transformers keeps "
                f"only the last {kept} (sliding_window)"
            )
        first, kept_there = lengths.setdefault(window, (index, kept))
        if kept != kept_there:
            raise ConfigError(
                f"layers {first} and {index} see equally far, but Transformers' cache keeps {kept_there or 'all'} "
                f"tokens for one and {kept or 'all'} for the other (layer_types)"
            )
