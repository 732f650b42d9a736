from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headstart.model.weights.synthetic_tokenizer import EOS_ID, SMALLEST_VOCABULARY, SPECIAL_TOKENS, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 2000, max_length=64)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("vocab_size", [SMALLEST_VOCABULARY, 512, 32_000, 151_936])
def test_every_id_below_the_vocabulary_size_decodes_to_something(tmp_path: Path, vocab_size: int) -> None:
    write_tokenizer(tmp_path, vocab_size, max_length=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    assert all(texts)


@settings(max_examples=200)
@given(text=st.text(max_size=60))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_words_and_syllables_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" people said the").ids) == 3
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" kaloze").ids] == [" ka", "lo", "ze"]
    assert len(tokenizer.encode("xyz").ids) == 3


def test_made_up_words_of_a_large_vocabulary_are_single_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 32_000, max_length=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(tokenizer.encode(" kafi zulo").ids) == 2


def test_special_tokens_have_the_first_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("".join(SPECIAL_TOKENS)).ids == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.decode([EOS_ID]) == ""


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, 5000, max_length=64)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no room for 261"):
        write_tokenizer(tmp_path, 260, max_length=64)
