"""The `tokenizer.json` of a model: the file of its folder, or the same made from the metadata of its GGUF file.

A GGUF file holds the vocabulary, the types of its tokens, and merges or scores; the rest (how text is split, decoded
and prefixed) follows from the kind of tokenizer: byte-level BPE (`gpt2`) with a named pre-tokenizer, or SentencePiece
BPE (`llama`) with bytes as a fallback.

Pre-tokenizers of byte-level BPE vocabularies, by the names that GGUF files give them (`tokenizer.ggml.pre`).

The expressions are those of the `tokenizer.json` of the models for which llama.cpp introduced the names. A name that is
not here is refused: another split gives other tokens, and a worse answer without an error.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import GGUFFile, has_gguf_suffix, read_gguf
from headstart.gguf.metadata import CONTROL, read_bool, read_list, read_special_token_id, read_string, read_token_texts

FILE_NAME = "tokenizer.json"
_UNKNOWN, _USER_DEFINED, _UNUSED = 2, 4, 5  # types of tokens, besides CONTROL
_FILLER = re.compile(r"\[PAD-?\d+\]")  # rows of the embedding without a token, as converters name them
_NEVER_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}
_KINDS = ("gpt2", "llama")
_HANDLED = {
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id",
    "eom_token_id", "unknown_token_id", "padding_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id",
    "add_bos_token", "add_eos_token",
}  # fmt: skip
# Of tokens that a text has only if it is written so, and of encoders.
_HARMLESS = {
    "token_type_count", "seperator_token_id", "separator_token_id", "mask_token_id", "cls_token_id",
    "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "prefix_token_id", "suffix_token_id",
    "middle_token_id",
}  # fmt: skip
# The template is read by the tokenizer; others with names, and the same vocabulary in another form, are not.
_TEMPLATES = {"tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.huggingface.json"}
_SPACE = "\u2581"  # SentencePiece's space
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
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
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"),
        PreTokenizer(_split(_LLAMA3), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_split(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(_split(_QWEN2), is_nfc=True)),
    "qwen35": PreTokenizer(_split(_QWEN35), is_nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_split(_GPT4O))),
    "tekken": PreTokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
}


def read_tokenizer_json(model: Path) -> str | None:
    """Return the text of a model's `tokenizer.json`; None: its folder has none. Raises ConfigError."""
    if has_gguf_suffix(model):
        return json.dumps(gguf_tokenizer_json(read_gguf(model)), ensure_ascii=False)
    path = model / FILE_NAME
    return path.read_text(encoding="utf-8") if path.is_file() else None


def gguf_tokenizer_json(file: GGUFFile) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` for a GGUF file. Raises ConfigError, with names, for unknown kinds."""
    kind = read_string(file, "tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ConfigError(f"{file.path}: the tokenizer {kind!r:.80} is not supported; gpt2 (BPE) and llama (SPM) are")
    _refuse_unknown(file, kind)
    tokens: list[str] = [token or f"[EMPTY_{i}]" for i, token in enumerate(read_token_texts(file))]
    types: list[int] = read_list(file, "tokenizer.ggml.token_type", int, []) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"{file.path}: {len(types)} types of tokens, but {len(tokens)} tokens")
    return _byte_level(file, tokens, types) if kind == "gpt2" else _sentencepiece(file, tokens, types)


def special_tokens_by_name(file: GGUFFile) -> dict[str, str]:
    """Return the tokens that a file names, under the names that chat templates use: bos_token, eos_token, ..."""
    tokens = read_token_texts(file)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {name: tokens[i] for name, key in named.items() if (i := read_special_token_id(file, key)) is not None}


def _refuse_unknown(file: GGUFFile, kind: str) -> None:
    """Raise ConfigError for metadata of the tokenizer that would change tokens and are not understood."""
    known = _HANDLED | _HARMLESS | ({"add_space_prefix"} if kind == "llama" else set[str]())
    for key, value in file.metadata.items():
        if not key.startswith("tokenizer.") or not value or key.removeprefix("tokenizer.ggml.") in known:
            continue
        if key not in _TEMPLATES and not key.startswith("tokenizer.chat_template."):
            raise ConfigError(f"{file.path}: {key} is {value!r:.80}; this setting is not supported")


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    name = read_string(file, "tokenizer.ggml.pre", "")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ConfigError(
            f"{file.path}: the pre-tokenizer {name!r:.80} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    vocab = _vocabulary(file, tokens, types)
    merges: list[list[str]] = []
    for merge in read_list(file, "tokenizer.ggml.merges", str):
        left, _, right = merge[1:].partition(" ")  # a token may begin with a space, and has none elsewhere
        pair = [merge[:1] + left, right]
        if not right or any(part not in vocab for part in (*pair, "".join(pair))):
            raise ConfigError(f"{file.path}: the merge {merge!r:.80} names a token that does not exist")
        merges.append(pair)
    parts = [dict(part) for part in pre.parts]
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if pre.is_nfc else None,
        "pre_tokenizer": parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts},
        "post_processor": _post_processor(file, tokens, add_bos=pre.add_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    vocab = _vocabulary(file, tokens, types)
    scores: list[float] = read_list(file, "tokenizer.ggml.scores", (int, float))
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path}: {len(scores)} scores of tokens, but {len(tokens)} tokens")
    unknown = read_special_token_id(file, "unknown")
    has_prefix = read_bool(file, "tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    skipped = {token for token, kind in zip(tokens, types, strict=True) if kind != 1}
    model = _bpe(vocab, _merges_of_scores(vocab, scores, skipped), byte_fallback=True)
    if unknown is not None:
        model |= {"unk_token": tokens[unknown], "fuse_unk": True}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types, strips=file.metadata.get("general.architecture") == "phi3"),
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if has_prefix else replace,
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, tokens, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _vocabulary(file: GGUFFile, tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return ids by token, without fillers. Raises ConfigError for a token that is there twice."""
    vocab: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED and _FILLER.fullmatch(token):
            continue
        if token in vocab:
            raise ConfigError(f"{file.path}: the token {token!r:.80} is there twice, as {vocab[token]} and {token_id}")
        vocab[token] = token_id
    return vocab


def _merges_of_scores(vocab: dict[str, int], scores: list[float], skipped: set[str]) -> list[list[str]]:
    """Return the merges that a SentencePiece vocabulary implies: every split into two tokens, best score first."""
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for token, token_id in vocab.items():
        if token in skipped:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab and left not in skipped and right not in skipped:
                order = (-scores[token_id], -len(left), -len(right), vocab[left], vocab[right])
                found.append((*order, left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _added_tokens(tokens: list[str], types: list[int], *, strips: bool = False) -> list[dict[str, Any]]:
    """Return the tokens that are matched as a whole before the text is split.

    `strips`: control tokens remove the spaces behind them, as those of Phi-3 do, which no metadata say.
    """
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    added = {CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    return [
        {
            "id": i,
            "content": token,
            **flags,
            "rstrip": strips and kind == CONTROL and token not in _NEVER_STRIPPING,
            "special": added[kind],
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in added
    ]


def _post_processor(file: GGUFFile, tokens: list[str], *, add_bos: bool) -> dict[str, Any] | None:
    """Return the template that adds the tokens of begin and end around a text, or None if there are none to add."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single, special = [text], dict[str, Any]()
    for name, default, at in (("bos", add_bos, 0), ("eos", False, 2)):
        if read_bool(file, f"tokenizer.ggml.add_{name}_token", default):
            token_id = read_special_token_id(file, name)
            if token_id is None:
                raise ConfigError(
                    f"{file.path}: texts get {name} (add_{name}_token, or the default of the vocabulary), but "
                    f"tokenizer.ggml.{name}_token_id is missing"
                )
            single.insert(at, {"SpecialToken": {"id": tokens[token_id], "type_id": 0}})
            special[tokens[token_id]] = {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
    if not special:
        return None
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]  # not used: every text is encoded alone
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _bpe(
    vocab: dict[str, int], merges: list[list[str]], *, ignore_merges: bool = False, byte_fallback: bool = False
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }
