"""A deterministic byte-level BPE tokenizer of any vocabulary size, without training or download.

Ids 0 to 4 are special tokens, then come the 256 bytes (so that any text can be encoded), then merges: first those that
spell common English words, then pairs of consonant and vowel, then words of two and three such syllables until every
id is used. Each id decodes to readable text, which is sufficient for a model with random weights.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}{% else %}{{ '<|user|>' }}{% endif %}"
    "{% if message['role'] == 'system' %}{{ 'System: ' }}{% endif %}{{ message['content'] }}{{ '<|eos|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SPACE = "\u0120"  # a space in the byte-level alphabet
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who its now find long down day did get come made may part over new sound "
    "take only little work know place year live me back give most very after thing our just name good sentence man "
    "think say great where help through much before line right too mean old any same tell boy follow came want show"
)
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def write_tokenizer(folder: Path, vocab_size: int, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ValueError below SMALLEST_VOCABULARY."""
    document = json.dumps(_tokenizer(vocab_size), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(document, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "unk_token": None,  # otherwise Transformers' class for Qwen2 adds its own, with an id after the vocabulary
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {SMALLEST_VOCABULARY} special tokens and bytes")
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *_byte_alphabet()))}
    merges: list[tuple[str, str]] = []
    for left, right in _merges():
        if len(vocab) == vocab_size:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    assert len(vocab) == vocab_size, (len(vocab), vocab_size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _byte_alphabet() -> list[str]:
    """Return one printable character per byte, as in GPT-2's BPE: other bytes map to code points from 0x100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Yield pairs whose halves are bytes or results of earlier pairs; far more than any vocabulary needs."""
    for word in _WORDS.split():
        spelled = _SPACE
        for letter in word:
            yield spelled, letter
            spelled += letter
    yield from ((_SPACE, consonant) for consonant in _CONSONANTS)
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    yield from ((syllable[0], syllable[1]) for syllable in syllables)
    yield from ((_SPACE + syllable[0], syllable[1]) for syllable in syllables)
    words = [first + second for first in syllables for second in syllables]
    yield from ((word[:2], word[2:]) for word in words)
    yield from ((_SPACE + word[:2], word[2:]) for word in words)
    yield from ((_SPACE + word, syllable) for word in words for syllable in syllables)
