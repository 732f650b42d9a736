"""Tokenizer: the same tokens and texts as transformers' AutoTokenizer, without importing transformers or torch."""

import json
import os
import random
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import BYTE_LEVEL, KINDS, METASPACE, build, write
from transformers import AutoTokenizer

import headstart
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.openai.tokenizer.tokenizer import Tokenizer

TEXTS = st.text(max_size=40) | st.sampled_from(
    ["", " ", "  two  blanks ", "<|im_end|>", "a<|im_start|>b", "東京 👋🏽", "\n"]
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, object]]:
    """Ours and transformers' reading of the same folder, for every kind."""
    folders = {kind: write(tmp_path_factory.mktemp("t") / kind, kind) for kind in KINDS}
    return {
        kind: (Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)) for kind, folder in folders.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, special=st.booleans())
def test_encoding_is_that_of_transformers(pairs, kind: str, text: str, special: bool) -> None:
    ours, theirs = pairs[kind]
    assert list(ours.encode(text, add_special_tokens=special)) == theirs.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("kind", KINDS)
@given(numbers=st.lists(st.integers(0, 10_000), max_size=30), skip=st.booleans())
def test_decoding_is_that_of_transformers(pairs, kind: str, numbers: list[int], skip: bool) -> None:
    ours, theirs = pairs[kind]
    token_ids = [number % ours.vocab_size for number in numbers]
    assert ours.decode(token_ids, skip_special_tokens=skip) == theirs.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_those_of_transformers(pairs, kind: str) -> None:
    ours, theirs = pairs[kind]
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("borders", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}, {}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_decides_on_bos_and_eos_whatever_old_settings_say(
    tmp_path: Path, kind: str, borders: dict[str, bool]
) -> None:
    folder = write(tmp_path, kind, bos_token="<|im_start|>", **borders)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert list(ours.encode("the fox")) == theirs.encode("the fox")


@pytest.mark.parametrize("eos", ["plain added", "fox", "<new>"])
def test_a_named_token_is_as_special_as_in_transformers(tmp_path: Path, eos: str) -> None:
    folder = write(tmp_path, BYTE_LEVEL, eos_token=eos)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    text = "a fox plain added <new> b"
    assert list(ours.encode(text)) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_encoding_gives_packed_ids(pairs) -> None:
    token_ids = pairs[METASPACE][0].encode("the fox")
    assert isinstance(token_ids, array) and token_ids.typecode == "i" and token_ids[0] == 1


def test_ids_beyond_the_vocabulary_say_nothing(pairs) -> None:
    ours = pairs[BYTE_LEVEL][0]
    assert ours.decode([ours.vocab_size + 7]) == ""
    assert ours.token_bytes(ours.vocab_size + 7) == b""


def test_tokens_of_a_byte_level_vocabulary_write_their_bytes(pairs) -> None:
    ours = pairs[BYTE_LEVEL][0]
    token_ids = ours.encode("naïve 👋 plain added 東西")
    assert b"".join(ours.token_bytes(i) for i in token_ids) == "naïve 👋 plain added 東西".encode()


def test_tokens_of_a_sentencepiece_vocabulary_keep_their_blank(pairs) -> None:
    ours = pairs[METASPACE][0]
    assert ours.token_text(ours.backend.token_to_id("▁the")) == " the"
    assert ours.token_bytes(ours.backend.token_to_id("<0xF0>")) == b"\xf0"
    assert ours.token_text(ours.backend.token_to_id("<0xF0>")) == "\ufffd"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, (5, 7, 1)),
        ({}, {"eos_token_id": 9}, (9, 1)),
        (None, None, (1,)),
        ({"eos_token_id": 1}, {"eos_token_id": 9}, (1,)),
    ],
)
def test_every_id_that_ends_a_text_is_known(tmp_path: Path, generation, config, expected) -> None:
    folder = write(tmp_path, BYTE_LEVEL)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


def test_truncation_in_the_file_is_switched_off(tmp_path: Path) -> None:
    folder = write(tmp_path, BYTE_LEVEL)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "direction": "Right", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert len(Tokenizer.from_folder(folder).encode("the quick brown fox jumps")) > 3


@pytest.mark.parametrize("where", ["jinja", "json", "list"])
def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path: Path, where: str) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "D{{ messages[0].content }}"}]
    folder = write(tmp_path, BYTE_LEVEL, chat_template=named if where == "list" else None)
    if where == "jinja":
        (folder / "chat_template.jinja").write_text("D{{ messages[0].content }}")
    if where == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "D{{ messages[0].content }}"}))
    assert Tokenizer.from_folder(folder).render_chat_text([{"role": "user", "content": "hi"}]) == "Dhi"


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, BYTE_LEVEL, chat_template=None))
    with pytest.raises(InvalidRequestError, match="no chat template; use /v1/completions"):
        tokenizer.render_chat_text([{"role": "user", "content": "hi"}])


def test_an_old_folder_with_vocabulary_and_merges_is_converted(tmp_path: Path) -> None:
    old = build(BYTE_LEVEL)
    old.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    named = {name: "<|im_end|>" for name in ("bos_token", "eos_token", "unk_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **named}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert list(tokenizer.encode("the quick é 東")) == old.encode("the quick é 東").ids
    assert tokenizer.eos_token_ids == (1,)


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, BYTE_LEVEL)
    (folder / name).write_text("{broken")
    with pytest.raises(ConfigError, match=name):
        Tokenizer.from_folder(folder)


def test_a_text_that_cannot_fit_is_known_by_its_length_alone(pairs) -> None:
    assert pairs[BYTE_LEVEL][0].max_token_chars > 0
    assert pairs[METASPACE][0].max_token_chars == 0  # runs of unknown characters may fuse


def test_threads_may_encode_at_once(pairs) -> None:
    ours = pairs[BYTE_LEVEL][0]
    rng = random.Random(0)
    texts = ["".join(rng.choice("abc déf東 ") for _ in range(200)) for _ in range(40)]
    expected = [ours.encode(text) for text in texts]
    results: list[list[array]] = [[] for _ in range(4)]

    def work(index: int) -> None:
        results[index] = [ours.encode(text) for text in texts]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert results == [expected] * 4


def test_the_front_end_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path, BYTE_LEVEL)
    code = (
        "import sys\n"
        "import headstart.openai.responses, headstart.openai.engine_requests\n"
        "from headstart.openai.tokenizer.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_folder({str(folder)!r})\n"
        "assert t.decode(t.encode(t.render_chat_text([{'role': 'user', 'content': 'hi'}])))\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    path = {"PYTHONPATH": str(Path(headstart.__file__).parents[1])}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True, env=os.environ | path)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_json_that_is_nested_too_deeply_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, BYTE_LEVEL)
    (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ConfigError, match=f"{name} is nested too deeply"):
        Tokenizer.from_folder(tmp_path)
