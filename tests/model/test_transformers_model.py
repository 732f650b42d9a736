"""The breadth path: what it refuses, by name, and that nothing a model asks of its attention is ignored."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model.paged import load_tiny
from model.tiny import COMMON, FAMILIES, NATIVE, make_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from headstart.core.errors import ConfigError
from headstart.model.transformers_model import TransformersModel, compute_layer_attention
from headstart.model.weights.model_loader import load_model, resolve_device, resolve_dtype

# config class, its settings, and what the refusal must say beside the architecture
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "Lfm2MoeConfig",
        {"layer_types": ["conv", "full_attention"], "moe_intermediate_size": 32, "num_experts": 4},
        "Lfm2MoeForCausalLM is not supported: it has conv layers",
    ),
    ("MambaConfig", {"state_size": 4}, "MambaForCausalLM is not supported: it has linear_attention layers"),
    ("BloomConfig", {}, "BloomForCausalLM is not supported: its attention cannot be replaced"),
    (
        "DiffLlamaConfig",
        {},
        "DiffLlamaForCausalLM is not supported: our attention was called 4 times by 2 layers",
    ),
    ("Llama4TextConfig", {"head_dim": 16}, "Llama4ForCausalLM is not supported: it has chunked_attention layers"),
]


# family of tiny.py, a key of its config.json, its value, and what the refusal must say
CHANGED: list[tuple[str, str, Any, str]] = [
    ("gemma2", "attn_logit_softcapping", 0.0, "a softcap of 0.0; it must be positive"),
    ("granite", "logits_scaling", 0.0, "its logits are not finite"),
    ("starcoder2", "layer_types", ["sliding_attention", "full_attention"], "keeps 12 tokens for one and all for"),
]


@pytest.mark.parametrize(("family", "key", "value", "message"), CHANGED, ids=[key for _, key, _, _ in CHANGED])
def test_what_the_walk_of_all_keys_found_is_refused(
    family: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    config = json.loads((make_checkpoint(family, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_models_that_would_be_wrong_are_refused_by_name(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = getattr(transformers, name)(**{**COMMON, **settings})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_an_unknown_architecture_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NovelForCausalLM"], "model_type": "novel"}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match=r"NovelForCausalLM is not known; supported are LlamaForCausalLM, Mistral"):
        load_model(tmp_path, device="cpu")


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    load_tiny("olmo2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 missing keys, first model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, dtype="float32", device="cpu")


class Mixing(nn.Module):
    """Adds the previous token's state, as a convolution would."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, dims=1)


def test_a_model_that_mixes_tokens_beside_its_attention_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    load_tiny("olmo2", tmp_path)
    original = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda self, x: Mixing()(original(self, x)))
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM is not supported: it mixes tokens outside its attention"):
        load_model(tmp_path, dtype="float32", device="cpu")


def call(**keywords: Any) -> dict[str, object]:
    """Return the arguments that a backend gets when Transformers asks for `keywords`."""
    module = keywords.pop("module", None) or nn.Module()
    module.layer_idx = 0
    heads = torch.zeros(1, 2, 3, 4)

    asked: dict[str, object] = {}

    def attend(layer: int, queries: torch.Tensor, *_: object, **form: object) -> torch.Tensor:
        asked.update(form)
        return queries

    compute_layer_attention(
        module, heads, heads, heads, keywords.pop("mask", None), headstart_attend=attend, **keywords
    )
    return asked


def test_attention_keywords_are_implemented_or_refused_never_ignored() -> None:
    sinks = torch.ones(2)
    given = call(
        scaling=0.5, sliding_window=3, softcap=2.0, position_ids=torch.zeros(1, 3), output_attentions=False, s_aux=sinks
    )
    assert given == {"scale": 0.5, "window": 3, "softcap": 2.0, "sinks": sinks}
    for keywords in ({"output_attentions": True}, {"novelty": 1}):
        with pytest.raises(ConfigError, match=f"attention uses {next(iter(keywords))}"):
            call(**keywords)
    for keywords in ({"mask": torch.zeros(1, 1, 3, 3)}, {"dropout": 0.1}):
        with pytest.raises(ConfigError, match="does not use the registered attention alone"):
            call(**keywords)
    bidirectional = nn.Module()
    bidirectional.is_causal = False
    with pytest.raises(ConfigError, match="not causal"):
        call(module=bidirectional)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(NATIVE)))
def test_the_families_tested_for_parity_take_this_path(family: str, tmp_path: Path) -> None:
    loaded = load_tiny(family, tmp_path)
    assert isinstance(loaded.model, TransformersModel)
    assert loaded.kv_shape.num_layers in (2, 4) and loaded.weight_bytes > 100_000


def test_dtype_and_device_are_resolved_or_refused() -> None:
    assert resolve_dtype("auto", {"torch_dtype": "float16"}) == torch.bfloat16
    assert resolve_dtype("auto", {"dtype": "float32"}) == resolve_dtype("float32", {}) == torch.float32
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="dtype 'int4' is not supported"):
        resolve_dtype("int4", {})
    for device, message in (("tpu", "'tpu' is not known"), ("meta", "'meta' is not supported"), ("cuda:99", "sees")):
        with pytest.raises(ConfigError, match=message):
            resolve_device(device)


def test_a_model_of_the_compact_decoder_imports_no_models_of_transformers(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    code = (
        "import sys, pathlib\nfrom headstart.model.weights.model_loader import load_model\n"
        "load_model(pathlib.Path(sys.argv[1]), device='cpu')\n"
        "sys.exit('transformers.modeling_utils' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
