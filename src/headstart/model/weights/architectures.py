"""The supported architectures, checked by config.json before torch is imported.

It does not check the numbers of a supported architecture (model_config.py), nor whether Transformers' code for it
computes the same attention as Headstart (transformers_probe.py). Both need Transformers, which imports torch.
"""

import ast
import functools
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.model.weights.config_bounds import check_config_sizes
from headstart.model.weights.json_file import shorten_text
from headstart.model.weights.model_files import read_config

NATIVE_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Lfm2ForCausalLM": "lfm2",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "BambaForCausalLM": "bamba",
}
SUPPORTED = f"{', '.join(NATIVE_ARCHITECTURES)}, and decoders of Transformers with full or sliding attention layers"
_GENERATES = re.compile("CausalLM|LMHead|ConditionalGeneration|GenerationDecoder")  # in the name of a class
_AUTO_MODELS = "models/auto/modeling_auto.py"
_CAUSAL_MODELS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError if a model folder or GGUF file is unreadable, or a model that cannot be served."""
    raw = read_config(folder)
    architecture = architecture_of(raw)
    refuse_quantised(raw)
    check_config_sizes(raw)
    if architecture in NATIVE_ARCHITECTURES:
        return
    known, model_type = causal_model_types(), raw.get("model_type")
    if known is not None and isinstance(model_type, str) and model_type not in known:
        raise ConfigError(
            f"{shorten_text(architecture, 80)} is not supported: Transformers has no causal language model of "
            f"model_type {shorten_text(model_type, 80)!r} (supported: {SUPPORTED})"
        )


def architecture_of(config: dict[str, Any]) -> str:
    """Return the model class named in a `config.json`. Raises ConfigError if there is none, or not of a language model.

    Transformers would build a language model all the same from the files of a classifier that hold an output head.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json names no architecture (model_type {config.get('model_type')!r}); expected an entry such as "
            f'"architectures": ["LlamaForCausalLM"]'
        )
    if not isinstance(config.get("model_type"), str | None):
        raise ConfigError(
            f"config.json: model_type is {shorten_text(repr(config['model_type']), 80)}; it must be a name"
        )
    if _GENERATES.search(names[0]) is None:
        raise ConfigError(
            f"{shorten_text(names[0], 80)} is not supported: it is no language model but a classifier, an encoder or "
            f"the body of a model; its name would contain CausalLM, LMHead or ConditionalGeneration"
        )
    return names[0]


def refuse_quantised(config: dict[str, Any]) -> None:
    """Raise ConfigError for a checkpoint with quantised weights, which would be read as plain numbers."""
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise ConfigError(f"the checkpoint is quantised ({method}); use the bfloat16 or float32 original")


@functools.cache
def causal_model_types() -> frozenset[str] | None:
    """Return the model_types of Transformers' causal language models, or None if they cannot be read.

    Read from the source as text: importing that module imports torch.
    """
    spec = PathFinder.find_spec("transformers")
    try:
        folder = Path(((spec and spec.submodule_search_locations) or [])[0])
        tree = ast.parse((folder / _AUTO_MODELS).read_text(encoding="utf-8"))
    except (IndexError, OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == _CAUSAL_MODELS for target in node.targets):
            return _first_items(node.value)
    return None


def _first_items(table: ast.expr) -> frozenset[str] | None:
    """Return the first strings of the pairs in `OrderedDict([("a", ...), ...])`, or None for another form."""
    pairs = table.args[0] if isinstance(table, ast.Call) and table.args else None
    if not isinstance(pairs, ast.List):
        return None
    first = [pair.elts[0] for pair in pairs.elts if isinstance(pair, ast.Tuple) and pair.elts]
    names = [name.value for name in first if isinstance(name, ast.Constant) and isinstance(name.value, str)]
    return frozenset(names) if names and len(names) == len(pairs.elts) else None
