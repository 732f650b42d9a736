"""Tokenizing in segments: the same tokens, whatever the text, and only where that is certain."""

import json
from random import Random

import pytest
import tokenizer_folders
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headstart.bundled import bundled_model
from headstart.fleet.segments import SegmentedTokenizer, is_separable
from headstart.server.tokenizer import Tokenizer

CLASSES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern of Llama 3 without its contractions; Qwen's differs in digits."""
PIECES = st.sampled_from(
    [
        *(
            "the quick brown fox",
            " and runs away ",
            "don't",
            " it's",
            "12345",
            " 7",
            "\n",
            "\r\n\n",
            "  ",
            "   x",
            "\t",
        ),
        *(
            "naïve",
            " café",
            "東京",
            "👋🏽",
            "e\u0301",
            "<|im_start|>",
            "<|im_end|>",
            "<|im_start|>user\nthe end",
            "_a b_",
            "...",
        ),
        *("a b c d e f", " a  b ", "|", "word", " word"),
    ]
)
TEXTS = st.lists(PIECES, max_size=24).map("".join)


def backend(kind: str) -> Backend:
    """A small BPE that splits as a family of real models does."""
    if kind == "bundled":
        return Tokenizer.from_folder(bundled_model()).backend
    made = Backend(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    split = pre_tokenizers.Split(Regex(CLASSES), "isolated")
    made.pre_tokenizer = level if kind == "gpt2" else pre_tokenizers.Sequence([split, level])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        tokenizer_folders.CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if kind == "llama3":
        made.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
        made.normalizer = normalizers.NFC()
    return made


@pytest.fixture(scope="module", params=["gpt2", "llama3", "bundled"])
def base(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(backend(request.param))


@given(TEXTS, st.integers(1, 40), st.booleans())
def test_the_tokens_are_those_of_the_whole_text(base: Tokenizer, text: str, size: int, special: bool) -> None:
    assert is_separable(base.backend)
    segmented = SegmentedTokenizer(base, segment_chars=size, max_chars=200)
    for _ in range(2):
        found = segmented.encode(text, add_special_tokens=special)
        assert found.tolist() == base.backend.encode(text, add_special_tokens=special).ids
    assert segmented._num_chars == sum(map(len, segmented._known)) <= 200


def test_what_two_texts_begin_with_is_tokenized_once(base: Tokenizer) -> None:
    segmented = SegmentedTokenizer(base)
    rng = Random(0)
    shared = " ".join(rng.choice(tokenizer_folders.CORPUS[0].split()) for _ in range(2000)) + " "
    segmented.encode(shared + "says one thing")
    misses = segmented.num_misses
    assert segmented.num_hits == 0 and misses >= 8
    segmented.encode(shared + "says another thing altogether")
    assert segmented.num_misses <= misses + 1 and segmented.num_hits >= misses - 1


def test_short_texts_are_not_remembered(base: Tokenizer) -> None:
    segmented = SegmentedTokenizer(base)
    segmented.encode("the quick brown fox")
    assert not segmented._known and segmented.vocab_size == base.vocab_size


def spaced_token() -> Backend:
    made = backend("gpt2")
    made.add_tokens([AddedToken("end of text", special=False)])
    return made


def greedy_token() -> Backend:
    made = backend("gpt2")
    made.add_tokens([AddedToken("STOP", rstrip=True)])
    return made


def spanning() -> Backend:
    made = backend("gpt2")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("[a-z]+ [a-z]+|."), "isolated"), level])
    return made


def looking_back() -> Backend:
    made = backend("gpt2")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"(?<=b) a|\s|\w"), "isolated"), level])
    return made


@pytest.mark.parametrize(
    "made",
    [
        *(tokenizer_folders.build(kind) for kind in tokenizer_folders.KINDS),
        *(spaced_token(), greedy_token(), spanning(), looking_back()),
    ],
)
def test_where_parts_are_not_the_whole_the_whole_is_tokenized(made: Backend) -> None:
    assert not is_separable(made)
    segmented = SegmentedTokenizer(Tokenizer(made), segment_chars=4)
    text = "the STOP end of text and runs away from STOP the b a " * 5
    assert segmented.encode(text).tolist() == made.encode(text).ids and not segmented._known
    assert json.loads(made.to_str())["model"]["type"] in ("BPE", "Unigram")
