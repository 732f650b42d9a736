"""The tokens that end an answer of a GGUF model: those its metadata name, and known texts of such tokens.

A file names one end-of-text token, and newer files also the end of a turn. Chat models with several are completed as
in llama.cpp: control tokens with the texts that model families use for the end of a turn or a text.
"""

from headstart.gguf.gguf_reader import GGUFFile
from headstart.gguf.metadata import list_of, token_id_of, tokens_of

_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # the last three: between the files of a completion
_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>",
}  # fmt: skip
CONTROL = 3  # the type of a token that is no text, as in tokenizer.ggml.token_type


def end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids of all tokens that end an answer, the named ones first. Raises ConfigError."""
    tokens = tokens_of(file)
    found = {i: None for name in _NAMES if (i := token_id_of(file, name)) is not None}
    types = list_of(file, "tokenizer.ggml.token_type", int, [])
    if any(types):
        found |= {
            i: None for i, kind in enumerate(types) if kind == CONTROL and i < len(tokens) and tokens[i] in _TEXTS
        }
    return tuple(found)
