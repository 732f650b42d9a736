"""Detokenizer: the pieces, joined, are the text of all the tokens at once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import BYTE_LEVEL, KINDS, METASPACE, build

from headstart.openai.text.detokenizer import MAX_HELD_TOKENS, Detokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer

TOKENIZERS = {kind: Tokenizer(build(kind), eos_token_ids=(1,)) for kind in KINDS}


def pieces_of(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.finish()]


def is_ascii_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    """The one documented exception: these are shown at once, whatever becomes of their run."""
    return tokenizer.vocabulary.is_byte_token(token_id) and tokenizer.token_bytes(token_id) < b"\x80"


@pytest.mark.parametrize("kind", KINDS)
@given(numbers=st.lists(st.integers(0, 10_000), max_size=25), skip=st.booleans())
def test_pieces_join_to_the_decoding_of_everything(kind: str, numbers: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = [number % (tokenizer.vocab_size + 3) for number in numbers]  # and ids that no token has
    token_ids = [token_id for token_id in token_ids if not is_ascii_byte(tokenizer, token_id)]
    pieces = pieces_of(tokenizer, [], token_ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30), cut=st.integers(0, 60))
def test_pieces_continue_the_prompt_at_any_token(kind: str, text: str, cut: int) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = list(tokenizer.encode("the fox " + text, add_special_tokens=False))
    cut = min(max(cut, 1), len(token_ids))
    prompt, output = token_ids[:cut], token_ids[cut:]
    before, whole = tokenizer.decode(prompt), tokenizer.decode(token_ids)
    if "\ufffd" in before or "\ufffd" in tokenizer.decode(output):  # cut inside a character: its own test below
        return
    assert before + "".join(pieces_of(tokenizer, prompt, output)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_long_random_sequences_stay_exact(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    rng = random.Random(1)
    for _ in range(5):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(400)]
        token_ids = [token_id for token_id in token_ids if not is_ascii_byte(tokenizer, token_id)]
        assert "".join(pieces_of(tokenizer, [], token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
def test_a_character_appears_when_its_last_byte_is_there(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = list(tokenizer.encode("x𓀀y", add_special_tokens=False))  # a hieroglyph: four byte tokens
    pieces = pieces_of(tokenizer, [], token_ids)
    assert "".join(pieces) == "x𓀀y"
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    tokenizer = TOKENIZERS[BYTE_LEVEL]
    token_ids = list(tokenizer.encode("𓀀"))[:-1]
    assert pieces_of(tokenizer, [], token_ids) == [""] * len(token_ids) + ["\ufffd"]


def test_a_character_that_began_in_the_prompt_is_completed() -> None:
    tokenizer = TOKENIZERS[BYTE_LEVEL]
    token_ids = list(tokenizer.encode("ab 𓀀!"))
    split = len(token_ids) - 2
    assert "".join(pieces_of(tokenizer, token_ids[:split], token_ids[split:])) == "𓀀!"


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
@pytest.mark.parametrize("output", ['{"a": 1}', "\n\nx", "é", "𓀀", "𓀀𓀀!", " y", ""])
def test_a_character_that_the_prompt_leaves_unfinished_is_not_shown_before_the_answer(
    kind: str, num_bytes: int, output: str
) -> None:
    tokenizer = TOKENIZERS[kind]
    begun = [token_id for token_id in tokenizer.encode("x𓀀", add_special_tokens=False)][: num_bytes - 4]
    behind = list(tokenizer.encode("x" + output, add_special_tokens=False))
    first = next(at for at in range(len(behind)) if tokenizer.decode(behind[: at + 1]).endswith("x")) + 1
    assert "".join(pieces_of(tokenizer, begun, behind[first:])) == output


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_that_the_prompt_leaves_unfinished_is_completed_by_the_answer(kind: str, num_bytes: int) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = list(tokenizer.encode("ab𓀀!𓀀", add_special_tokens=False))
    end = (
        next(at for at in range(len(token_ids)) if tokenizer.decode(token_ids[: at + 1]).endswith("𓀀")) - 3 + num_bytes
    )
    pieces = pieces_of(tokenizer, token_ids[:end], token_ids[end:])
    assert "".join(pieces) == "𓀀!𓀀"
    assert pieces[: 4 - num_bytes] == [""] * (3 - num_bytes) + ["𓀀"]


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
def test_an_answer_that_ends_within_the_character_of_the_prompt_is_empty(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = list(tokenizer.encode("x𓀀", add_special_tokens=False))
    assert "".join(pieces_of(tokenizer, token_ids[:-2], token_ids[-2:-1])) == ""
    assert "".join(pieces_of(tokenizer, token_ids[:-2], [])) == ""


def test_the_first_word_keeps_its_blank_behind_a_prompt_and_loses_it_without() -> None:
    tokenizer = TOKENIZERS[METASPACE]
    the, fox = tokenizer.backend.token_to_id("▁the"), tokenizer.encode("x")[1]
    assert "".join(pieces_of(tokenizer, [], [the])) == "the"
    assert "".join(pieces_of(tokenizer, [fox], [the])) == " the"


def test_special_tokens_are_silent_unless_wanted() -> None:
    tokenizer = TOKENIZERS[BYTE_LEVEL]
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert "".join(pieces_of(tokenizer, [], [end])) == ""
    assert "".join(pieces_of(tokenizer, [], [end], skip=False)) == "<|im_end|>"


def test_an_invalid_byte_run_is_replaced_byte_by_byte() -> None:
    tokenizer = TOKENIZERS[METASPACE]
    run = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xA9, 0xC3)]  # é and half a character
    token_ids = [*run, tokenizer.backend.token_to_id("▁the")]
    assert "".join(pieces_of(tokenizer, [], token_ids)) == tokenizer.decode(token_ids) == "\ufffd\ufffd\ufffd the"


def test_a_line_end_that_is_a_byte_token_appears_at_once() -> None:
    tokenizer = TOKENIZERS[METASPACE]
    line_end = tokenizer.backend.token_to_id("<0x0A>")
    word = tokenizer.backend.token_to_id("▁the")
    assert pieces_of(tokenizer, [], [word, line_end, line_end, word]) == ["the", "\n", "\n", " the", ""]


def test_an_endless_run_of_byte_tokens_is_not_held_back_for_ever() -> None:
    tokenizer = TOKENIZERS[METASPACE]
    run = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()] * MAX_HELD_TOKENS
    pieces = pieces_of(tokenizer, [], run)
    assert "".join(pieces) == "é" * MAX_HELD_TOKENS
    assert pieces[MAX_HELD_TOKENS - 1] == "é" * (MAX_HELD_TOKENS // 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [10, 10_000])
def test_the_prompt_is_not_read_beyond_its_last_tokens(kind: str, length: int) -> None:
    tokenizer = TOKENIZERS[kind]
    calls: list[int] = []

    class Counting:
        vocabulary = tokenizer.vocabulary

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            calls.append(len(token_ids))
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    word = tokenizer.encode("fox", add_special_tokens=False)[-1]
    detokenizer = Detokenizer(Counting(), [word] * length)  # type: ignore[arg-type]
    for _ in range(50):
        detokenizer.push(word)
    assert max(calls, default=0) <= 12


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_of_a_token_does_not_grow_with_tokens_that_say_nothing(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer)
    for _ in range(200):
        assert detokenizer.push(tokenizer.vocab_size + 1) == ""
    assert len(getattr(detokenizer._stream, "_tokens", [])) == 0
