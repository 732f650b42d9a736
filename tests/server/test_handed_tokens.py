"""Token ids that a router hands on: the tokens of the text, whatever ids come, and no byte of a body changed."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.test_segmented_tokenizer import SEPARABLE, TEXTS, backend

from headstart.core.request import CacheMode
from headstart.openai.tokenizer.handed_tokens import (
    MAX_HANDED_BYTES,
    MIN_HANDED,
    add_tokens_to_body,
    split_tokens_from_body,
)
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer

IDS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 500), max_size=40).map(lambda ids: array("i", ids))
MANY = array("i", range(MIN_HANDED))


@pytest.fixture(scope="module", params=SEPARABLE)
def tokenizer(request: pytest.FixtureRequest) -> SegmentedTokenizer:
    return SegmentedTokenizer(Tokenizer(backend(request.param)), segment_chars=8)


@given(TEXTS, st.booleans())
def test_tokens_of_the_same_tokenizer_are_used(tokenizer: SegmentedTokenizer, text: str, special: bool) -> None:
    made = tokenizer.encode(text, add_special_tokens=special)
    found = tokenizer.with_precomputed_tokens(made).encode(text, add_special_tokens=special)
    assert found == made
    if tokenizer.digest and tokenizer.backend.normalizer is None and found is not made:
        assert tokenizer.decode(made, skip_special_tokens=False) != text or not text, "it was tokenized again"


@given(TEXTS, IDS, st.booleans())
def test_other_ids_are_not_believed(tokenizer: SegmentedTokenizer, text: str, ids: "array[int]", special: bool) -> None:
    others = [ids, tokenizer.encode(text + "x", add_special_tokens=special)]
    for other in [*others, tokenizer.encode(text, add_special_tokens=special) + array("i", [tokenizer.vocab_size])]:
        found = tokenizer.with_precomputed_tokens(other).encode(text, add_special_tokens=special)
        if found is other:  # another way to write the text in tokens
            before, after = tokenizer._around if special and tokenizer._around else ((), ())
            inner = found[len(before) : len(found) - len(after)]
            assert b"".join(map(tokenizer.token_bytes, inner)) == text.encode() and all(
                map(tokenizer.token_bytes, inner)
            )
            assert (*found,) == (*before, *inner, *after)
        else:
            assert found == tokenizer.encode(text, add_special_tokens=special)


def test_a_request_past_the_cache_takes_none() -> None:
    tokenizer = SegmentedTokenizer(Tokenizer(backend("gpt2")))
    assert tokenizer.digest and not tokenizer.for_domain("", b"", CacheMode.BYPASS).digest


def test_the_digest_is_of_all_settings() -> None:
    digests = [SegmentedTokenizer(Tokenizer(backend(kind))).digest for kind in ("gpt2", "gpt2", "smollm", "llama3")]
    assert digests[0] == digests[1] and len({*digests}) == 3


@given(st.dictionaries(st.text(), st.integers() | st.text(), min_size=1), st.sampled_from(["", " ", "\n\t"]))
def test_a_body_comes_back_as_it_was(fields: dict[str, object], space: str) -> None:
    body = space.encode() + json.dumps(fields).encode()
    sent = add_tokens_to_body(body, MANY)
    assert json.loads(sent)["headstart_tokens"] and split_tokens_from_body(sent) == (body.strip(), MANY)
    assert split_tokens_from_body(body) == (body, None)


def test_few_tokens_and_long_bodies_are_left_alone() -> None:
    body = b'{"prompt": "x"}'
    assert add_tokens_to_body(body, MANY[:-1]) == body
    long = b'{"prompt": "' + b"x" * (MAX_HANDED_BYTES - 20) + b'"}'
    assert add_tokens_to_body(long, MANY) == long and add_tokens_to_body(b"[1]", MANY) == b"[1]"


@given(st.binary(max_size=200))
def test_ids_that_cannot_be_read_are_none(garbage: bytes) -> None:
    sent = b'{"headstart_tokens":"' + garbage + b'","prompt":"x"}'
    body, ids = split_tokens_from_body(sent)
    assert ids is None or ids.itemsize == 4
    if b'",' not in garbage:
        assert body == b'{"prompt":"x"}'
