"""The tokens that end an answer of a GGUF model: those its metadata name, and known texts of such tokens.

A file names one end-of-text token, and newer files also the end of a turn. Chat models with several are completed as
in llama.cpp: control tokens with the texts that model families use for the end of a turn or a text.
"""

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import GGUFFile
from headstart.gguf.metadata import integer_of, list_of

_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>",
}  # fmt: skip
CONTROL = 3  # the type of a token that is no text, as in tokenizer.ggml.token_type


def end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids of all tokens that end an answer, the named ones first. Raises ConfigError."""
    tokens = list_of(file, "tokenizer.ggml.tokens", str)
    found: dict[int, None] = {}
    for name in _KEYS:
        token_id = integer_of(file, f"tokenizer.ggml.{name}", None)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ConfigError(f"{file.path}: {name} is {token_id}, but there are {len(tokens)} tokens")
        found[token_id] = None
    types = list_of(file, "tokenizer.ggml.token_type", int, [])
    if any(types):
        found |= {
            i: None for i, kind in enumerate(types) if kind == CONTROL and i < len(tokens) and tokens[i] in _TEXTS
        }
    return tuple(found)
