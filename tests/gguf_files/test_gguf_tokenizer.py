"""Tokenizers built from GGUF metadata give the tokens of the tokenizers that the metadata were written from."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizer_folders
import tokenizers
from model.tiny_gguf import add_value, write_vocabulary
from tokenizer_folders import BYTE_LEVEL, CORPUS, METASPACE, TEMPLATE
from transformers import Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from headstart.core.errors import ConfigError
from headstart.gguf.tokenizer_json import PRE_TOKENIZERS, read_tokenizer_json
from headstart.openai.tokenizer.tokenizer import Tokenizer

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two spaces",
    "\n\n\t x \r\n",
    "1234567 and 3.14159; Ⅷ ½",
    "I'm HERE'S we'll 'tis don't",
    "<|im_start|>user\nhi<|im_end|>\n plain added 東西 <|im_end|>",
    "e\u0301 cafe\u0301 Å",
    "\x00\x7f\u200b🇩🇪👩‍👩‍👧",
    "Größe_of snake_case camelCase HTTPServer",
]


def write(path: Path, kind: str, words: tokenizers.Tokenizer | None = None, **values: Any) -> Path:
    """Write a file with metadata only; `values` are keys of tokenizer.ggml."""
    writer = gguf.GGUFWriter(path, values.pop("architecture", "llama"))
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    write_vocabulary(writer, words or tokenizer_folders.build(kind), metadata)
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _with_implied_merges(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer unchanged; another one with the merges that Transformers derives from scores."""
    document = json.loads(original.to_str())
    if document["decoder"]["type"] == "ByteLevel":
        return original
    vocab, merges = document["model"]["vocab"], document["model"]["merges"]
    scores = dict.fromkeys(vocab, -1e6)
    for rank, (left, right) in reversed(list(enumerate(merges))):
        scores[left + right] = -float(rank)
    document["model"]["merges"] = [list(merge) for merge in generate_merges(vocab, scores)]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
def test_tokens_and_texts_are_those_of_the_original(kind: str, tmp_path: Path) -> None:
    words = tokenizer_folders.build(kind)
    original = _with_implied_merges(words)
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", kind, words))
    for text in TEXTS:
        for add_special_tokens in (False, True):
            expected = original.encode(text, add_special_tokens=add_special_tokens).ids
            assert list(ours.encode(text, add_special_tokens=add_special_tokens)) == expected, text
            assert ours.decode(expected) == original.decode(expected)
    assert ours.vocab_size == original.get_vocab_size()


def test_named_tokens_ends_and_template_are_those_of_the_metadata(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", BYTE_LEVEL))
    assert ours.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert ours.eos_token_ids == (1,) and ours.bos_token_id == 0 and ours.chat_template == TEMPLATE
    assert ours.vocabulary.special_ids == {0, 1}


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, [0]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [0, 1])]
)
def test_a_llama_3_vocabulary_begins_texts_unless_told_otherwise(
    flags: dict[str, bool], expected: list[int], tmp_path: Path
) -> None:
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", BYTE_LEVEL, pre="llama-bpe", **flags))
    found = list(ours.encode("x"))
    assert [i for i in found if i < 2] == expected
    assert list(ours.encode("x", add_special_tokens=False)) == [i for i in found if i >= 2]


def test_a_sentencepiece_vocabulary_has_the_ids_of_llama_cpp_where_the_file_names_none(tmp_path: Path) -> None:
    words = tokenizer_folders.build(METASPACE)
    by_id = {token_id: token for token, token_id in words.get_vocab(with_added_tokens=True).items()}
    none = dict.fromkeys(("bos_token_id", "eos_token_id"))
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", METASPACE, words, **none))
    assert ours.named_tokens == {"bos_token": by_id[1], "eos_token": by_id[2], "unk_token": by_id[0]}
    assert ours.encode("x")[0] == 1 and 2 in ours.eos_token_ids
    silent = Tokenizer.from_folder(write(tmp_path / "s.gguf", METASPACE, words, **none, add_bos_token=False))
    assert list(silent.encode("x")) == list(ours.encode("x"))[1:]


def test_tokens_between_the_files_of_a_completion_end_it(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", BYTE_LEVEL, fim_pad_token_id=5, fim_sep_token_id=7))
    assert ours.eos_token_ids == (1, 5, 7)


def test_qwen2_splits_and_normalises_as_transformers_does(tmp_path: Path) -> None:
    words = tokenizer_folders.build(BYTE_LEVEL)
    document = json.loads(words.to_str())
    merges = [tuple(merge) for merge in document["model"]["merges"]]
    theirs = Qwen2Tokenizer(vocab=document["model"]["vocab"], merges=merges).backend_tokenizer
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", BYTE_LEVEL, words, pre="qwen2"))
    for text in TEXTS:
        if "plain added" not in text and "東西" not in text and "<|" not in text:
            assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False).ids, text


def test_digits_are_single_in_smollm(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", BYTE_LEVEL, pre="smollm"))
    assert [ours.token_text(i) for i in ours.encode("a 730 b")] == ["a", " ", "7", "3", "0", " b"]


def test_every_pre_tokenizer_can_be_built_and_loses_nothing(tmp_path: Path) -> None:
    for name in PRE_TOKENIZERS:
        ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", BYTE_LEVEL, pre=name))
        for text in TEXTS:
            ids = list(ours.encode(text, add_special_tokens=False))
            if not PRE_TOKENIZERS[name].is_nfc:
                assert ours.decode(ids, skip_special_tokens=False) == text, name


def test_control_tokens_of_phi_3_remove_the_spaces_behind_them(tmp_path: Path) -> None:
    words = tokenizer_folders.build(METASPACE)
    phi = Tokenizer.from_folder(write(tmp_path / "p.gguf", METASPACE, words, architecture="phi3"))
    llama = Tokenizer.from_folder(write(tmp_path / "l.gguf", METASPACE, words))
    assert phi.encode("<|im_end|>\n the") == phi.encode("<|im_end|>the")
    assert llama.encode("<|im_end|>\n the") != llama.encode("<|im_end|>the")


def test_rows_without_a_token_have_no_text(tmp_path: Path) -> None:
    words = tokenizer_folders.build(BYTE_LEVEL)
    words.add_tokens(["[PAD452]", "[PAD453]"])
    types = [3, 3] + [1] * 448 + [4, 4] + [5, 5]
    ours = Tokenizer.from_folder(write(tmp_path / "m.gguf", BYTE_LEVEL, words, token_type=types))
    assert ours.token_bytes(452) == b"" and ours.vocab_size == 452


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (BYTE_LEVEL, "the pre-tokenizer 'odd' is not supported; supported are gpt-2", {"pre": "odd"}),
    (BYTE_LEVEL, "the tokenizer 'rwkv' is not supported", {"model": "rwkv"}),
    (BYTE_LEVEL, "the merge 'q zzz' names a token", {"merges": ["q zzz"]}),
    (BYTE_LEVEL, "the merge 'q' names a token", {"merges": ["q"]}),
    (BYTE_LEVEL, r"1 types of tokens, but 452 tokens", {"token_type": [1]}),
    (BYTE_LEVEL, r"the token 'a' is there twice, as 0 and 1", {"tokens": ["a", "a"], "token_type": [1, 1]}),
    (METASPACE, r"1 scores of tokens, but \d+ tokens", {"scores": [0.5]}),
    (BYTE_LEVEL, r"eos_token_id is 452, but there are 452 tokens", {"eos_token_id": 452}),
    (BYTE_LEVEL, r"bos_token_id is 452, but there are 452 tokens", {"bos_token_id": 452}),
    (BYTE_LEVEL, r"texts get bos .*bos_token_id is missing", {"pre": "llama-bpe", "bos_token_id": None}),
    (BYTE_LEVEL, r"texts get eos .*eos_token_id is missing", {"add_eos_token": True, "eos_token_id": None}),
    (BYTE_LEVEL, r"add_space_prefix is True; this setting is not supported", {"add_space_prefix": True}),
    (METASPACE, r"add_sep_token is True; this setting is not supported", {"add_sep_token": True}),
    (METASPACE, r"suppress_tokens is \[3\]; this setting is not supported", {"suppress_tokens": [3]}),
    (BYTE_LEVEL, "tokenizer.ggml.tokens holds items of a wrong type", {"tokens": [1, 2]}),
]


@pytest.mark.parametrize(("kind", "message", "values"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_metadata_that_make_no_tokenizer_are_refused(
    kind: str, message: str, values: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", kind, **values)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.from_folder(path)
    assert "m.gguf" in str(caught.value)


def test_the_document_of_a_folder_is_its_file(tmp_path: Path) -> None:
    assert read_tokenizer_json(tmp_path) is None
    tokenizer_folders.write(tmp_path, BYTE_LEVEL)
    assert read_tokenizer_json(tmp_path) == (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
