"""Tokenizing in segments: the same tokens, whatever the text, and only where that is certain."""

import asyncio
import tracemalloc
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizer_folders
from hypothesis import given, settings
from hypothesis import strategies as st
from server.harness import inside
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headstart.bundled import bundled_intent_model_folder
from headstart.core.request import CacheMode
from headstart.openai.tokenizer.segmented_tokenizer import SegmentCache, SegmentedTokenizer
from headstart.openai.tokenizer.tenant_cache import CacheScope
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tokenizer.word_borders import BORDER, _ends_words, is_safe_to_cut_at_borders

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama3": (LLAMA3,),
    "gpt4o": (GPT4O,),
    "deepseek": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK),
}
"""Splitting patterns of published families of models."""
SEPARABLE = ("gpt2", "smollm", *SPLITS, "unigram", "wordpiece", "bundled")
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
            "...",
        ),
        *(
            "a b c d e f",
            " a  b ",
            "|",
            "word",
            " word",
            "_a b_",
            "STOP",
            "b\u0307 a",
            "\u212a k",
            "ﬁ",
            "\u00a0",
            "\u017f",
        ),
    ]
)
TEXTS = st.lists(PIECES, max_size=24).map("".join) | st.text(max_size=80) | st.text("aZ \n'b\u0301東", max_size=120)


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _model(kind: str) -> tuple[Backend, Any]:
    special: dict[str, Any] = {"special_tokens": ["<s>", "<|im_start|>", "<|im_end|>"], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "unigram":
        return Backend(models.Unigram()), trainers.UnigramTrainer(
            vocab_size=400, unk_token="<s>", initial_alphabet=alphabet, **special
        )
    if kind == "wordpiece":
        return Backend(models.WordPiece(unk_token="<s>")), trainers.WordPieceTrainer(vocab_size=400, **special)
    return Backend(models.BPE()), trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, **special)


def backend(kind: str) -> Backend:
    """A small tokenizer that splits as a family of real models does."""
    if kind == "bundled":
        return Tokenizer.from_folder(bundled_intent_model_folder()).backend
    made, trainer = _model(kind)
    if kind in SPLITS:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[kind]]
        made.pre_tokenizer = pre_tokenizers.Sequence([*splits, _byte_level(False)])
    elif kind == "smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)])
    else:
        made.pre_tokenizer = _byte_level(True)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(tokenizer_folders.CORPUS, trainer)
    if kind == "llama3":
        made.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
        made.normalizer = normalizers.NFC()
    if kind == "gpt4o":
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.NFD()])
        made.add_tokens([AddedToken("plain_added", special=False), AddedToken("ﬁ", lstrip=True), "b\u0301"])
    if kind == "gpt2":
        both = [("<s>", 0), ("<|im_end|>", 2)]
        made.post_processor = processors.TemplateProcessing(single=["<s>", "$A", "<|im_end|>"], special_tokens=both)
        made.add_tokens([AddedToken("...", rstrip=True, lstrip=True)])
    return made


@pytest.fixture(scope="module", params=SEPARABLE)
def base(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(backend(request.param))


@given(TEXTS, st.integers(1, 40), st.booleans())
def test_the_tokens_are_those_of_the_whole_text(base: Tokenizer, text: str, size: int, special: bool) -> None:
    segmented = SegmentedTokenizer(base, SegmentCache(max_tenant_bytes=4096), segment_chars=size)
    assert segmented.is_segmented
    for _ in range(2):
        found = segmented.encode(text, add_special_tokens=special)
        assert found.tolist() == base.backend.encode(text, add_special_tokens=special).ids


def words(count: int, seed: int = 0) -> str:
    rng = Random(seed)
    return " ".join(rng.choice(tokenizer_folders.CORPUS[0].split()) for _ in range(count)) + " "


def test_what_two_texts_begin_with_is_tokenized_once(base: Tokenizer) -> None:
    segmented = SegmentedTokenizer(base)
    shared = words(2000)
    segmented.encode(shared + "says one thing")
    misses = segmented.memory.num_misses
    assert segmented.memory.num_hits == 0 and misses >= 8
    segmented.encode(shared + "says another thing altogether")
    assert segmented.memory.num_misses <= misses + 1 and segmented.memory.num_hits >= misses - 1


def test_short_texts_are_not_remembered(base: Tokenizer) -> None:
    segmented = SegmentedTokenizer(base)
    segmented.encode("the quick brown fox")
    assert not len(segmented.memory) and segmented.vocab_size == base.vocab_size


# ------------------------------------------------------------------------------------------- where nothing can be shown


def with_added(token: AddedToken) -> Backend:
    made = backend("gpt2")
    made.add_tokens([token])
    return made


def with_split(*patterns: str, behavior: str = "isolated") -> Backend:
    made = backend("gpt2")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior) for pattern in patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, _byte_level(False)])
    return made


def with_normalizer(normalizer: Any) -> Backend:
    made = backend("gpt2")
    made.normalizer = normalizer
    return made


def with_pre_tokenizer(pre_tokenizer: Any) -> Backend:
    made = backend("gpt2")
    made.pre_tokenizer = pre_tokenizer
    return made


UNSAFE = {
    **{kind: lambda kind=kind: tokenizer_folders.build(kind) for kind in tokenizer_folders.KINDS},
    "a token over a border": lambda: with_added(AddedToken("end of text", special=False)),
    "a token over a border when normalized": lambda: with_added(AddedToken("the\u2002b", special=False)),
    "a token that ends with a space": lambda: with_added(AddedToken("end ", special=False)),
    "a token that takes spaces behind it": lambda: with_added(AddedToken("STOP", rstrip=True)),
    "a token that looks around": lambda: with_added(AddedToken("x", single_word=True)),
    "a match over a border": lambda: with_split("[a-z]+ [a-z]+|."),
    "a match over a rare border": lambda: with_split(r"q z\d|\p{L}+|\s|\S"),
    "an attempt over a border": lambda: with_split(r"\p{L}+(?: \p{L}+)*\d|\p{L}+|\s|\S"),
    "a look behind": lambda: with_split(r"(?<=b) a|\s|\w"),
    "a look at a space": lambda: with_split(r"\p{L}+(?= )|\p{L}|\s+|\S"),
    "a look at no space": lambda: with_split(r"\p{L}(?! )|\p{L}+|\s+|\S"),
    "a look at the end": lambda: with_split(r"\p{L}+$|\p{L}|\s+|\S"),
    "a border of words": lambda: with_split(r"\b\p{L}+|\s+|\S"),
    "letters that are not split off": lambda: with_split(r"\p{N}+"),
    "some letters that are not split off": lambda: with_split(r" ?[a-w]+|\s+\d"),
    "a pattern that may match nothing": lambda: with_split(r"\p{N}*|\p{L}+"),
    "possessive repeats": lambda: with_split(r"\p{L}?+\p{L}+|\s+|\S"),
    "merging splits": lambda: with_split(LLAMA3, behavior="merged_with_next"),
    "contiguous splits": lambda: with_split(LLAMA3, behavior="contiguous"),
    "a space before everything": lambda: with_normalizer(normalizers.Prepend("▁")),
    "stripping": lambda: with_normalizer(normalizers.Strip()),
    "replacing": lambda: with_normalizer(normalizers.Replace(Regex("b a"), "c")),
    "a prefix space": lambda: with_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "splitting bytes": lambda: with_pre_tokenizer(
        pre_tokenizers.Sequence([_byte_level(False), pre_tokenizers.Split(Regex(LLAMA3), "isolated")])
    ),
    "metaspace": lambda: with_pre_tokenizer(pre_tokenizers.Metaspace(split=False)),
    "no splits": lambda: with_pre_tokenizer(_byte_level(False)),
}


@pytest.mark.parametrize("name", UNSAFE)
@given(text=TEXTS.map(lambda text: text + " the STOP end of text b a q z1 x and b a STOP the" * 2))
def test_where_parts_may_not_be_the_whole_the_whole_is_tokenized(name: str, text: str) -> None:
    made = UNSAFE_BUILT.setdefault(name, UNSAFE[name]())
    assert not is_safe_to_cut_at_borders(made)
    segmented = SegmentedTokenizer(Tokenizer(made), segment_chars=4)
    assert segmented.encode(text).tolist() == made.encode(text).ids and not len(segmented.memory)


UNSAFE_BUILT: dict[str, Backend] = {}


def test_a_tokenizer_that_drops_merges_by_chance_is_not_cut() -> None:
    made = backend("gpt2")
    made.model.dropout = 0.5
    assert not is_safe_to_cut_at_borders(made)


# ------------------------------------------------------------------------------------------------- who shares with whom


def test_what_one_domain_sent_speeds_up_no_other() -> None:
    segmented = SegmentedTokenizer(Tokenizer(backend("gpt2")))
    memory, text = segmented.memory, words(2000)
    scopes = [("a", b"1"), ("a", b"2"), ("b", b"1!"), ("", b"")]
    for tenant, domain in scopes:
        segmented.for_domain(tenant, domain).encode(text)
        assert memory.num_hits == 0 and memory.num_misses == len(memory)
    for tenant, domain in scopes:
        before = memory.num_misses
        segmented.for_domain(tenant, domain).encode(text)
        assert memory.num_misses == before


@pytest.mark.parametrize(("mode", "remembered", "found"), [(CacheMode.READ_ONLY, 0, 1), (CacheMode.BYPASS, 0, 0)])
def test_the_cache_mode_of_a_request_holds_here_too(mode: CacheMode, remembered: int, found: int) -> None:
    segmented = SegmentedTokenizer(Tokenizer(backend("gpt2")))
    text = words(2000)
    segmented.for_domain("", b"", mode).encode(text)
    assert len(segmented.memory) == remembered
    segmented.for_domain("", b"").encode(text)
    segmented.for_domain("", b"", mode).encode(text)
    assert (segmented.memory.num_hits > 0) == bool(found)


def ids(count: int) -> "array[int]":
    return array("i", range(count))


def keys(memory: SegmentCache, scope: CacheScope, texts: list[str]) -> list[bool]:
    return [token_ids is not None for _, token_ids in memory.find_keys_and_tokens(scope, texts)]


def put(memory: SegmentCache, scope: CacheScope, text: str, token_ids: "array[int]") -> None:
    memory.remember(scope, memory.find_keys_and_tokens(scope, [text])[0][0], token_ids)


def test_above_its_bound_a_tenants_least_recently_used_segments_are_evicted_whatever_its_salts() -> None:
    memory = SegmentCache(max_tenant_bytes=1024 + 3 * (320 + 400))
    one, two, other = CacheScope("a", b"1"), CacheScope("a", b"2"), CacheScope("b", b"3")
    put(memory, other, "other", ids(100))
    for scope, text in ((one, "x"), (one, "y"), (two, "z")):
        put(memory, scope, text, ids(100))
    memory.find_keys_and_tokens(one, ["x"])
    put(memory, two, "w", ids(100))
    assert keys(memory, one, ["x", "y"]) == [True, False] and keys(memory, two, ["z", "w"]) == [True, True]
    assert keys(memory, other, ["other"]) == [True]
    put(memory, one, "far too large", ids(10_000))
    assert keys(memory, one, ["x", "far too large"]) == [True, False]


def test_above_the_bound_of_all_tenants_the_least_recently_used_one_is_evicted() -> None:
    memory = SegmentCache(max_bytes=3 * (1024 + 320 + 400))
    for tenant in "abcd":
        put(memory, CacheScope(tenant), "x", ids(100))
    assert [keys(memory, CacheScope(tenant), ["x"]) for tenant in "abcd"] == [[False], [True], [True], [True]]
    assert memory.num_bytes <= 3 * (1024 + 320 + 400)
    for tenant in range(1000):
        put(memory, CacheScope(str(tenant)), "x", ids(100))
    assert len(memory) <= 3 and memory.num_bytes <= 3 * (1024 + 320 + 400)


def test_the_bytes_that_are_counted_are_those_that_are_held() -> None:
    tracemalloc.start()
    try:
        memory = SegmentCache(max_tenant_bytes=1 << 30, max_bytes=1 << 30)
        before = tracemalloc.get_traced_memory()[0]
        for tenant in range(200):
            for number in range(20):
                put(memory, CacheScope(str(tenant)), f"text {number}", ids(10))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert memory.num_bytes / 2 <= held <= memory.num_bytes


# ---------------------------------------------------------------------------------------------------------- in a server


def test_a_server_remembers_segments_by_key_and_salt(tmp_path: Path) -> None:
    backend("llama3").save(str(tmp_path / "tokenizer.json"))

    async def run() -> None:
        options = {"api_key": ("one", "two"), "max_body_bytes": 1 << 20}
        async with inside(f"{tmp_path}?length=100000", **options) as server:
            tokenizer = server.state.loaded_model.tokenizer
            assert isinstance(tokenizer, SegmentedTokenizer) and tokenizer.is_segmented
            memory = tokenizer.memory
            text = words(2000)
            seen = []
            for key, fields in (("one", {}), ("two", {}), ("one", {"cache_salt": "s"}), ("one", {})):
                before = memory.num_hits, memory.num_misses
                body = {"prompt": text, "max_tokens": 1, **fields}
                headers = {"authorization": f"Bearer {key}"}
                answer = await server.client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                expected = tokenizer.backend.encode(text).ids
                assert answer.json()["usage"]["prompt_tokens"] == len(expected)
                seen.append((memory.num_hits - before[0] > 0, memory.num_misses - before[1] > 0))
            assert seen == [(False, True), (False, True), (False, True), (True, False)]

    asyncio.run(run())


# ------------------------------------------------------------------------------------------- the proof against patterns

ATOMS = st.sampled_from(
    [*"a bZ'1.", r"\p{L}", r"\p{N}", r"\s", r"\S", r"\d", r"\W", "[a-c]", "[^a-c]", r"[^\s\p{L}]", r"[^\r\n\p{L}\p{N}]"]
)
REPEATS = st.sampled_from(["", "", "", "?", "*", "+", "{1,3}", "{2}", "{0,2}", "??", "++"])
LOOKS = st.sampled_from([r"(?!\S)", "(?=a)", "(?! )", "(?= )", "(?<=a)", "$", "^", r"\b", "(?![a-z'])", "(?!b c)"])
PATTERNS = st.recursive(
    st.tuples(ATOMS, REPEATS).map("".join) | LOOKS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.tuples(
            st.sampled_from(["(", "(?:", "(?i:"]), st.lists(inner, min_size=1, max_size=3).map("|".join), REPEATS
        ).map(lambda parts: f"{parts[0]}{parts[1]}){parts[2]}")
    ),
    max_leaves=8,
)
SOME_LETTERS = st.sampled_from([r"|\p{L}+|\s", r"|\p{L}", r"|[A-Za-z]+", "", r"| ?\p{L}+|\s+(?!\S)|\s+"])


@settings(max_examples=1000)
@given(PATTERNS, SOME_LETTERS, st.lists(st.text("ab cZ'1.\n", min_size=2, max_size=30), min_size=20, max_size=20))
def test_where_a_pattern_is_found_safe_it_splits_parts_as_it_splits_the_whole(
    start: str, rest: str, texts: list[str]
) -> None:
    pattern = start + rest
    try:
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # tokenizers raises no narrower class
        assert "Oniguruma" in str(error), "only patterns that are no regular expressions are refused"
        return
    if not _ends_words({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}):
        return

    def pieces(text: str) -> list[str]:
        return [piece for piece, _ in splitter.pre_tokenize_str(text)]

    for text in (*texts, "".join(texts)):
        for border in BORDER.finditer(text):
            assert pieces(text) == pieces(text[: border.end()]) + pieces(text[border.end() :])
