"""Typed reading of GGUF metadata: values with a check of their type, and errors that name the key.

The tokens that end an answer of a GGUF model: those its metadata name, and known texts of such tokens.

A file names one end-of-text token, and newer files also the end of a turn. Chat models with several are completed as
in llama.cpp: control tokens with the texts that model families use for the end of a turn or a text.
"""

from typing import Any

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import GGUFFile

REQUIRED: Any = object()  # as a default: the key must be there
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where a file names none, as in llama.cpp
_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # the last three: between the files of a completion
_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>",
}  # fmt: skip
CONTROL = 3  # the type of a token that is no text, as in tokenizer.ggml.token_type


def read_string(file: GGUFFile, key: str, default: Any = REQUIRED) -> Any:
    """Return the text of `key`, or `default` if it is missing. Raises ConfigError."""
    return _typed(file, key, default, str, "a text")


def read_int(file: GGUFFile, key: str, default: Any = REQUIRED) -> Any:
    """Return the whole number of `key`, or `default` if it is missing. Raises ConfigError."""
    return _typed(file, key, default, int, "a whole number")


def read_float(file: GGUFFile, key: str, default: Any = REQUIRED) -> Any:
    """Return the number of `key` as a float, or `default` if it is missing. Raises ConfigError."""
    found = _typed(file, key, default, (int, float), "a number")
    return float(found) if key in file.metadata else found


def read_bool(file: GGUFFile, key: str, default: bool) -> bool:
    """Return the truth value of `key`, or `default` if it is missing. Raises ConfigError."""
    found = file.metadata.get(key, default)
    if not isinstance(found, bool):
        raise ConfigError(f"{file.path}: {key} is {found!r:.80}; it must be true or false")
    return found


def read_list(file: GGUFFile, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED) -> Any:
    """Return the list of `key`, or `default` if it is missing. Raises ConfigError unless all items are of `kind`."""
    found = _typed(file, key, default, list, "a list")
    if key in file.metadata and not all(isinstance(item, kind) for item in found):
        raise ConfigError(f"{file.path}: {key} holds items of a wrong type")
    return found


def read_token_texts(file: GGUFFile) -> list[str]:
    """Return the texts of all tokens. Raises ConfigError."""
    return read_list(file, "tokenizer.ggml.tokens", str)


def read_special_token_id(file: GGUFFile, name: str) -> int | None:
    """Return the id of a special token by its name in the metadata: bos, eos, eot, ...; None if there is none.

    Raises ConfigError for an id without a token.
    """
    key, num_tokens = f"tokenizer.ggml.{name}_token_id", len(read_token_texts(file))
    if key not in file.metadata and file.metadata.get("tokenizer.ggml.model") == "llama":
        implied = _SENTENCEPIECE_IDS.get(name)
        return implied if implied is None or implied < num_tokens else None
    token_id = read_int(file, key, None)
    if name == "padding" and token_id is not None and not 0 <= token_id < num_tokens:
        return None  # as in llama.cpp: it is part of no prompt
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ConfigError(f"{file.path}: {key} is {token_id}, but there are {num_tokens} tokens")
    return token_id


def _typed(file: GGUFFile, key: str, default: Any, kind: type | tuple[type, ...], article: str) -> Any:
    if key not in file.metadata:
        if default is REQUIRED:
            raise ConfigError(f"{file.path}: metadata key {key} is missing")
        return default
    found = file.metadata[key]
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ConfigError(f"{file.path}: {key} is {found!r:.80}; it must be {article}")
    return found


def read_end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids of all tokens that end an answer, the named ones first. Raises ConfigError."""
    tokens = read_token_texts(file)
    found = {i: None for name in _NAMES if (i := read_special_token_id(file, name)) is not None}
    types = read_list(file, "tokenizer.ggml.token_type", int, [])
    if any(types):
        found |= {
            i: None for i, kind in enumerate(types) if kind == CONTROL and i < len(tokens) and tokens[i] in _TEXTS
        }
    return tuple(found)
