"""Convert a GGUF file into a model folder: convert_gguf.py FILE FOLDER.

Needs torch and transformers, and gguf and accelerate, which smollm2.py installs beside its cache. Tied output weights
are left out, as in published checkpoints. Writes bfloat16, the tokenizer and the chat template.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, which exists and is empty."""
    source = str(file.parent)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})  # save_pretrained refuses GGUF
    config = model.config
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
