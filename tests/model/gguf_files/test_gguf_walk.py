"""Every key and every tensor name that llama.cpp knows is used, refused by name, or known to change nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import TENSOR_NAMES
from model.hybrid_gguf import ARCHITECTURES, random_hybrid
from model.tiny_gguf import write_gguf
from tokenizer_folders import BYTE_LEVEL, METASPACE

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import GGUFFile, TensorInfo, read_gguf
from headstart.gguf.metadata import read_end_token_ids
from headstart.gguf.tokenizer_json import gguf_tokenizer_json, special_tokens_by_name
from headstart.model.weights.gguf.gguf_config import gguf_config
from headstart.model.weights.gguf.gguf_names import hf_tensor_name
from headstart.model.weights.model_loader import load_model

VALUES: list[Any] = [7, 1 << 31, 0.25, True, "odd", ["odd"], [7, 7], [True]]
# Keys that change neither weights nor tokens: descriptions, other uses of a vocabulary, other templates. llama.cpp
# reads general.name to guess at Phi-3's control tokens, which are known here by the architecture.
HARMLESS = {
    "{arch}.attention.layer_norm_epsilon": "the norms of these models are RMS norms",
    "{arch}.rope.scaling.finetuned": "a description",
    "{arch}.tensor_data_layout": "a description",
    "{arch}.rope.scaling.original_context_length": "without yarn or longrope",
    "{arch}.rope.scaling.yarn_beta_fast": "without yarn",
    "{arch}.rope.scaling.yarn_beta_slow": "without yarn",
    "tokenizer.ggml.token_type_count": "of BERT",
    "tokenizer.ggml.seperator_token_id": "of BERT",
    "tokenizer.ggml.mask_token_id": "of BERT",
    "tokenizer.ggml.fim_pre_token_id": "in a text only if it is written there",
    "tokenizer.ggml.fim_suf_token_id": "in a text only if it is written there",
    "tokenizer.ggml.fim_mid_token_id": "in a text only if it is written there",
    "tokenizer.ggml.prefix_token_id": "in a text only if it is written there",
    "tokenizer.ggml.suffix_token_id": "in a text only if it is written there",
    "tokenizer.ggml.middle_token_id": "in a text only if it is written there",
    "tokenizer.chat_template": "read by the tokenizer itself",
    "tokenizer.chat_templates": "names of other templates",
    "tokenizer.chat_template.{name}": "another template",
    "tokenizer.huggingface.json": "the same vocabulary in another form",
}
PER_VOCABULARY = {
    BYTE_LEVEL: {
        "tokenizer.ggml.scores": "it has merges",
        "tokenizer.ggml.unknown_token_id": "it has all bytes",
    },
    METASPACE: {
        "tokenizer.ggml.merges": "it has scores",
        "tokenizer.ggml.pre": "its words are not split",
    },
}
PER_ARCHITECTURE = {
    "qwen35": {
        "{arch}.full_attention_interval": "there is a list of the layers",
        "{arch}.rope.dimension_sections": "text has one position; see test_gguf_hybrids.py",
    }
}
# Values that are what a file without the key means.
DEFAULTS: dict[str, list[Any]] = {
    "{arch}.attention.causal": [True],
    "{arch}.attention.sliding_window": [1 << 31],  # longer than the context
    "{arch}.rope.scaling.yarn_attn_factor": [1.0],
    "{arch}.rope.scaling.yarn_ext_factor": [1.0],
    "tokenizer.ggml.padding_token_id": [1 << 31],  # no token: as in llama.cpp, there is none then
    "tokenizer.ggml.add_bos_token": [True],
    "tokenizer.ggml.add_space_prefix": [True],
}


def known_keys(group: type = gguf.Keys) -> Iterator[str]:
    for name, value in vars(group).items():
        if isinstance(value, type) and not name.startswith("_"):
            yield from known_keys(value)
        elif isinstance(value, str) and not name.startswith("_"):
            yield value


def write(path: Path, architecture: str, vocabulary: str = BYTE_LEVEL) -> GGUFFile:
    """Write a small model of an architecture in F32 and return its header."""
    families = {arch: family for family, arch in ARCHITECTURES.items()}
    if architecture in families:
        random_hybrid(path, families[architecture], tie_word_embeddings=False)
    else:
        write_gguf(path, architecture, "F32", tokenizer=vocabulary)
    return read_gguf(path)


def meaning(file: GGUFFile) -> list[Any]:
    return [gguf_config(file), gguf_tokenizer_json(file), special_tokens_by_name(file), read_end_token_ids(file)]


@pytest.mark.parametrize(
    ("architecture", "vocabulary"),
    [
        *((name, BYTE_LEVEL) for name in ("llama", "qwen2", "qwen3", "qwen35", "lfm2")),
        *((name, METASPACE) for name in ("llama", "phi3")),
    ],
)
def test_every_key_that_llama_cpp_knows_is_used_or_refused_by_name(
    architecture: str, vocabulary: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "m.gguf", architecture, vocabulary)
    before, ignored, forms = meaning(file), set[str](), set(known_keys())
    forms = {form for form in forms if form.split(".")[0] in ("{arch}", "tokenizer")}
    assert len(forms) > 120
    for form in (
        forms - HARMLESS.keys() - PER_VOCABULARY[vocabulary].keys() - PER_ARCHITECTURE.get(architecture, {}).keys()
    ):
        key = form.replace("{arch}", architecture)
        for value in VALUES:
            if value == file.metadata.get(key) or value in DEFAULTS.get(form, ()):
                continue
            try:
                after = meaning(replace(file, metadata={**file.metadata, key: value}))
            except ConfigError as error:
                assert "\n" not in str(error)
                continue
            if after == before:
                ignored.add(f"{key} = {value!r}")
    assert not ignored, "\n".join(sorted(ignored))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "qwen35", "lfm2"])
def test_every_tensor_that_llama_cpp_knows_is_used_or_refused_by_name(architecture: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", architecture)
    names = {form.format(bid=0, xid=0) for form in TENSOR_NAMES.values()}
    assert len(names) > 300
    ends = ("weight", "bias", "scale", "input_scale")
    tried = {f"{name}.{end}" for name in names for end in ends} - file.tensors.keys()
    tried |= {name.replace("blk.0.", "blk.00.") for name in file.tensors} - file.tensors.keys()
    tried -= {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}  # settings: see below
    for name in tried:
        info = TensorInfo(file.path, "F32", (8,), 0, 32)
        with pytest.raises(ConfigError, match=rf"tensor '?{name.replace('.', '[.]')}'? is "):
            gguf_config(replace(file, tensors={**file.tensors, name: info}))


def bias(path: Path, family: str, *names: str) -> None:
    """Write a model with biases of 8 numbers under some names."""
    write_gguf(path, family, "F32", tensors={name: np.ones(8, np.float32) for name in names})


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["blk.0.attn_output.bias", "blk.1.attn_output.bias"]),
        ("llama", ["blk.0.ffn_down.bias", "blk.1.ffn_down.bias"]),
        ("llama", [f"blk.1.attn_{part}.bias" for part in ("q", "k", "v", "output")]),
        ("llama", ["blk.0.attn_norm.bias"]),
        ("llama", ["output_norm.bias"]),
        ("llama", ["output.bias"]),
        ("qwen2", ["blk.0.attn_output.bias"]),
        ("qwen2", ["blk.0.ffn_up.bias"]),
        ("qwen3", ["blk.0.attn_q.bias", "blk.1.attn_q.bias"]),
        ("qwen3", ["blk.0.attn_q_norm.bias"]),
        ("phi3", ["blk.0.attn_qkv.bias", "blk.1.attn_qkv.bias"]),
        ("phi3", ["blk.0.ffn_down.bias"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_biases_that_would_not_be_added_are_refused_by_name(family: str, names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    bias(path, family, *names)
    with pytest.raises(ConfigError, match=names[0].replace(".", r"\.")):
        load_model(path, dtype="float32", device="cpu")


def test_a_qwen2_without_one_of_its_biases_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", "F32")
    file = read_gguf(tmp_path / "m.gguf")
    rest = {name: info for name, info in file.tensors.items() if name != "blk.1.attn_k.bias"}
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.bias is there, but not blk\.1\.attn_k\.bias"):
        gguf_config(replace(file, tensors=rest))
    none = {name: info for name, info in file.tensors.items() if not name.endswith(".bias")}
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.attn_q\.bias is missing"):
        gguf_config(replace(file, tensors=none))


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("message", "metadata"),
    [
        (r"type is 'yarn' without llama\.rope\.scaling\.factor", {"llama.rope.scaling.type": "yarn"}),
        (r"attn_factor is 2\.0 beside scaling of type 'linear'", {"llama.rope.scaling.attn_factor": 2.0}),
        (r"type is 'longrope' without tensors", {"llama.rope.scaling.type": "longrope"}),
        (r"rope\.scaling\.yarn_ext_factor is 0\.5", {**YARN, "llama.rope.scaling.yarn_ext_factor": 0.5}),
        (r"rms_norm_eps is 1\.0+\d*e\+38|rms_norm_eps is 9", {"llama.attention.layer_norm_rms_epsilon": 1e38}),
        (r"rope_theta is", {"llama.rope.freq_base": 1e38}),
        (r"rope_theta is", {"llama.rope.freq_base": 1e-38}),
        (r"factor is", {"llama.rope.scaling.factor": 1e38}),
        (r"factor is", {"llama.rope.scaling.factor": 1e-38}),
        (r"attention_factor is", {**YARN, "llama.rope.scaling.attn_factor": 1e38}),
        (r"beta_fast is", {**YARN, "llama.rope.scaling.yarn_beta_fast": 1e38}),
        (r"llama\.attention\.head_count is 0; it must be positive", {"llama.attention.head_count": 0}),
        (r"llama\.attention\.head_count_kv is 0", {"llama.attention.head_count_kv": 0}),
        (r"llama\.attention\.key_length is 0", {"llama.attention.key_length": 0}),
        (r"llama\.block_count is 4000000000, but there are", {"llama.block_count": 4_000_000_000}),
        (r"feed_forward_length has 3 values", {"llama.feed_forward_length": [512, 512, 512]}),
        (r"token_embd\.weight has 452 rows.*vocab_size is 451", {"llama.vocab_size": 451}),
        (r"llama\.pooling_type is 4", {"llama.pooling_type": 4}),
        (r"qwen2\.rope\.freq_base is a setting of another architecture", {"qwen2.rope.freq_base": 1e6}),
    ],
)
def test_settings_that_would_be_ignored_or_are_absurd_are_refused(
    message: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        load_model(path, dtype="float32", device="cpu")


def test_blocks_of_an_old_layout_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata={"general.quantization_version": 1})
    with pytest.raises(ConfigError, match=r"general\.quantization_version is 1; blocks of version 2 are read"):
        load_model(path)


FACTORS = np.linspace(1, 2, 32, dtype=np.float32)


@pytest.mark.parametrize(
    ("names", "metadata"),
    [
        (["rope_factors_long.weight"], {}),
        (["rope_factors_short.weight"], {}),
        (["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"], {}),
        (["rope_factors_short.weight", "rope_factors_long.weight"], YARN),
        (["rope_factors_short.weight", "rope_factors_long.weight"], {"llama.rope.scaling.factor": 4.0}),
        (["rope_freqs.weight"], {"llama.rope.scaling.factor": 4.0}),
    ],
)
def test_factors_that_would_be_ignored_are_refused_by_name(
    names: list[str], metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", "F32", tensors=dict.fromkeys(names, FACTORS), metadata=metadata)
    with pytest.raises(ConfigError, match=names[0].replace(".", r"\.")):
        load_model(path, dtype="float32", device="cpu")


def test_hf_names_are_those_of_one_tensor_each() -> None:
    assert hf_tensor_name("blk.0.attn_q.weight", "llama") and hf_tensor_name("blk.00.attn_q.weight", "llama") is None
