"""TurnMemory: prompts with the tokens that were generated for their turns, by exact text, tenant and domain."""

import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import CORPUS, METASPACE, TEMPLATE, build
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from headstart.core.request import CacheMode
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tokenizer.turn_memory import MAX_TURNS, Cut, TokenizedPiece, TurnMemory, generated_turn


def backend() -> Backend:
    """A byte-level tokenizer whose texts may be cut, with two special tokens and one that is only added."""
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=450, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_tokens([AddedToken("<tool_call>", special=False)])
    return made


BASE = Tokenizer(backend(), chat_template=TEMPLATE)


def _id(text: str) -> int:
    found = BASE.backend.token_to_id(text)
    assert found is not None
    return found


START, END, MARKER = (_id(text) for text in ("<|im_start|>", "<|im_end|>", "<tool_call>"))
ASK = "<|im_start|>assistant\n"
BEFORE = TokenizedPiece(0, array("i"))


def tokenizer(max_bytes: int = 1 << 20, base: Tokenizer = BASE) -> SegmentedTokenizer:
    return SegmentedTokenizer(base, turns=TurnMemory(max_bytes), segment_chars=40)


def spelled(text: str) -> "array[int]":
    found = array("i")
    for char in text:
        found += BASE.encode(char, add_special_tokens=False)
    return found


def say(own: SegmentedTokenizer, prompt: str, ids: "array[int]") -> "array[int]":
    """Render `prompt`, generate `ids`; return the prompt's token ids."""
    conversation = own.encode_conversation(prompt)
    if conversation.turn is not None:
        conversation.turn.ended(ids)
    return conversation.token_ids


def test_turn_that_comes_back_has_the_tokens_that_were_generated() -> None:
    own, first = tokenizer(), f"<|im_start|>user\nplay some music<|im_end|>\n{ASK}"
    generated = spelled("the music room")
    assert generated != BASE.encode("the music room", add_special_tokens=False)
    before = say(own, first, array("i", [*generated, END]))
    assert before == BASE.encode(first, add_special_tokens=False)
    later = f"{first}the music room<|im_end|>\n<|im_start|>user\nthe bear<|im_end|>\n{ASK}"
    found = own.encode_conversation(later).token_ids
    assert found[: len(before) + len(generated) + 1] == array("i", [*before, *generated, END])
    assert BASE.decode(found, skip_special_tokens=False) == later
    assert own.turns is not None and own.turns.stats[:4] == (1, 0, 0, len(generated))


@pytest.mark.parametrize(
    "changed",
    [
        f"<|im_start|>user\nplay some musiC<|im_end|>\n{ASK}the music room<|im_end|>\n",
        f"<|im_start|>user\nplay some music<|im_end|>\n{ASK}the music  room<|im_end|>\n",
        f"<|im_start|>user\nplay some music<|im_end|>\n{ASK}The music room<|im_end|>\n",
    ],
)
def test_any_other_text_has_the_tokens_of_the_tokenizer(changed: str) -> None:
    own = tokenizer()
    say(own, f"<|im_start|>user\nplay some music<|im_end|>\n{ASK}", spelled("the music room"))
    assert own.encode_conversation(changed).token_ids == BASE.encode(changed, add_special_tokens=False)


def test_stripped_content_keeps_the_tokens_before_the_stripped_blanks() -> None:
    own, first = tokenizer(), f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    generated = spelled("the room")
    say(own, first, array("i", [*generated, *spelled(" \n"), END]))
    found = own.encode_conversation(f"{first}the room<|im_end|>\n").token_ids
    at = len(BASE.encode(first, add_special_tokens=False))
    assert found[at : at + len(generated) + 1] == array("i", [*generated, END])
    assert own.turns is not None and own.turns.stats.num_partial == 1


def test_a_turn_is_cut_before_an_added_token_behind_which_the_text_differs() -> None:
    own, first = tokenizer(), f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    say(own, first, array("i", [*spelled("the room"), MARKER, *spelled("x")]))
    later = f"{first}the room<tool_call> y<|im_end|>\n"
    found = own.encode_conversation(later).token_ids
    at = len(BASE.encode(first, add_special_tokens=False))
    assert found[at : at + 9] == array("i", [*spelled("the room"), MARKER])
    assert BASE.decode(found, skip_special_tokens=False) == later


def test_skipped_special_token_within_a_turn_does_not_enter_a_prompt_without_it() -> None:
    own, first = tokenizer(), f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    say(own, first, array("i", [*spelled("the"), START, *spelled(" room")]))
    later = f"{first}the room<|im_end|>\n"
    found = own.encode_conversation(later).token_ids
    assert BASE.decode(found, skip_special_tokens=False) == later


def test_other_tenants_and_salts_find_nothing_and_the_own_domain_does() -> None:
    own, first = tokenizer(), f"<|im_start|>user\nplay some music<|im_end|>\n{ASK}"
    later = f"{first}the music room<|im_end|>\n"
    mine = own.for_domain("acme", b"a")
    assert isinstance(mine, SegmentedTokenizer)
    say(mine, first, spelled("the music room"))
    plain = BASE.encode(later, add_special_tokens=False)
    for tenant, domain in (("other", b"b"), ("other", b"a"), ("acme", b"b"), ("", b"")):
        assert own.for_domain(tenant, domain).encode_conversation(later).token_ids == plain
    assert own.for_domain("acme", b"a").encode_conversation(later).token_ids != plain  # the positive control
    assert own.for_domain("acme", b"a", CacheMode.BYPASS).encode_conversation(later).token_ids == plain


@pytest.mark.parametrize("mode", [CacheMode.READ_ONLY, CacheMode.BYPASS])
def test_requests_that_publish_no_blocks_store_no_turn(mode: CacheMode) -> None:
    own, first = tokenizer(), f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    other = own.for_domain("", b"", mode)
    assert isinstance(other, SegmentedTokenizer)
    say(other, first, spelled("the music room"))
    later = f"{first}the music room<|im_end|>\n"
    assert own.encode_conversation(later).token_ids == BASE.encode(later, add_special_tokens=False)


def test_each_choice_of_a_prompt_is_found_by_its_own_text_and_the_newest_of_equal_ones() -> None:
    own, first = tokenizer(), f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    at = len(BASE.encode(first, add_special_tokens=False))
    say(own, first, BASE.encode("the bear", add_special_tokens=False))
    for text in ("the room", "the bear"):
        say(own, first, spelled(text))
    for text in ("the room", "the bear"):
        found = own.encode_conversation(f"{first}{text}<|im_end|>\n").token_ids
        assert found[at : at + len(text)] == spelled(text)
    for number in range(2 * MAX_TURNS):
        say(own, first, spelled(f"the room {number}"))
    assert own.turns is not None and own.turns.stats.num_bytes < 20_000


def test_turn_is_found_behind_an_earlier_one_that_is_gone() -> None:
    own, first = tokenizer(), f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    say(own, first, spelled("the bear"))
    second = f"{first}the bear<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n{ASK}"
    say(own, second, spelled("the room"))
    for number in range(MAX_TURNS):
        say(own, first, spelled(f"other {number}"))
    later = f"{second}the room<|im_end|>\n"
    found = own.encode_conversation(later).token_ids
    assert BASE.decode(found, skip_special_tokens=False) == later
    assert found == BASE.encode(second, add_special_tokens=False) + array("i", [*spelled("the room"), END]) + (
        BASE.encode("\n", add_special_tokens=False)
    )


def test_tokenizer_that_may_not_be_cut_stores_nothing() -> None:
    base = Tokenizer(build(METASPACE), chat_template=TEMPLATE)
    own, first = tokenizer(base=base), f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    assert own.encode_conversation(first).turn is None


def test_oldest_tail_of_a_conversation_is_evicted_first_and_bytes_are_bounded() -> None:
    own = tokenizer(max_bytes=32 * 1024)
    text = f"<|im_start|>user\nhi<|im_end|>\n{ASK}"
    first = text
    for number in range(60):
        say(own, text, spelled(f"the room {number}"))
        text += f"the room {number}<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n{ASK}"
    assert own.turns is not None and own.turns.stats.num_bytes <= 40 * 1024
    at = len(BASE.encode(first, add_special_tokens=False))
    assert own.encode_conversation(text).token_ids[at : at + 10] == spelled("the room 0")


def test_memory_held_is_at_most_the_bytes_stated() -> None:
    tracemalloc.start()
    try:
        memory = TurnMemory(1 << 30)
        own = SegmentedTokenizer(BASE, turns=memory)
        ids = [spelled(f"the quick brown fox {number}") for number in range(2000)]
        before = tracemalloc.get_traced_memory()[0]
        for number, generated in enumerate(ids):
            say(own, f"<|im_start|>user\n{number}<|im_end|>\n{ASK}", generated)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert memory.stats.num_bytes / 4 <= held <= memory.stats.num_bytes


def test_turn_of_special_tokens_only_is_none() -> None:
    assert generated_turn(array("i", [END, END]), BEFORE, BASE.vocabulary) is None
    turn = generated_turn(array("i", [*spelled("a "), END]), BEFORE, BASE.vocabulary)
    assert turn is not None and turn.cuts == (Cut(2, 2), Cut(1, 1))


WORDS = st.sampled_from(
    ["the", " room", "é", "東京", "👋🏽", "\n", " ", "<tool_call>", "<|im_end|>", "x", "assistant\n"]
)
TEXTS = st.lists(WORDS, max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=6), st.data())
def test_any_conversation_has_its_own_text_and_extends_the_tokens_before(
    turns: list[tuple[str, str, bool]], data: st.DataObject
) -> None:
    """The text of the ids is always the prompt's; and a turn that comes back whole extends prompt and output."""
    own, text, computed = tokenizer(), "", array("i")
    for user, answer, comes_back in turns:
        text += f"<|im_start|>user\n{user}<|im_end|>\n{ASK}"
        conversation = own.encode_conversation(text)
        assert BASE.decode(conversation.token_ids, skip_special_tokens=False) == text
        assert conversation.token_ids[: len(computed)] == computed
        generated = data.draw(st.sampled_from([spelled(answer), BASE.encode(answer, add_special_tokens=False)]))
        assert conversation.turn is not None
        conversation.turn.ended(array("i", [*generated, END]))
        shown = answer if comes_back else answer + "!"
        text += f"{shown}<|im_end|>\n"
        while generated and generated[-1] == END:
            generated.pop()
        is_whole = comes_back and BASE.decode(generated, skip_special_tokens=False) == answer
        computed = conversation.token_ids + generated if is_whole else array("i")
