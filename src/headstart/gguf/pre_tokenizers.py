"""Pre-tokenizers of byte-level BPE vocabularies, by the names that GGUF files give them (`tokenizer.ggml.pre`).

The expressions are those of the `tokenizer.json` of the models for which llama.cpp introduced the names. A name that is
not here is refused: another split gives other tokens, and a worse answer without an error.
"""

from typing import Any, NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
_GPT4O = rf"{_CASED % ((_CONTRACTIONS + '?',) * 2)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"


class PreTokenizer(NamedTuple):
    """The settings that a name stands for, all but `parts` with llama.cpp's defaults."""

    parts: tuple[dict[str, Any], ...]  # pre-tokenizers in the form of tokenizer.json
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # unless the file says otherwise
    is_nfc: bool = False  # text is brought into Unicode's normal form C


def _split(pattern: str) -> tuple[dict[str, Any], ...]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return ({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, level)


_GPT2_PART = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_GPT2 = PreTokenizer((_GPT2_PART,))
_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, _GPT2_PART))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"),
        PreTokenizer(_split(_LLAMA3), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_split(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(_split(_QWEN2), is_nfc=True)),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_split(_GPT4O))),
    "tekken": PreTokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
}
