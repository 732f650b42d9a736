"""The model folder: a `LlamaForCausalLM` checkpoint in bf16 with tokenizer and chat template."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from chat_format import END, PAD
from network import Network
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast


def save_model(network: Network, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights, config, generation config and tokenizer to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in network.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(network.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write(out / "config.json", config)
    _write(out / "generation_config.json", {**ids, "do_sample": False, "max_new_tokens": 96})
    tokenizer.save_pretrained(out)
    for extra in ("chat_template.jinja", "special_tokens_map.json"):
        (out / extra).unlink(missing_ok=True)
    path = out / "tokenizer_config.json"
    stored = json.loads(path.read_text())
    _write(path, {**stored, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template})


def _write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
