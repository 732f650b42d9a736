"""The index of runs of tokens finds what a search of the whole text finds."""

from array import array

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headstart.core.speculation.ngram_index import MAX_LINKS, NgramIndex, NgramMatch

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def searched(tokens: list[int], length: int, most: int) -> NgramMatch | None:
    """The longest earlier occurrence of the last tokens, the newest of equal ones, by trying all."""
    last, best = tokens[-most:], None
    for end in range(length, len(tokens)):
        matched = 0
        while matched < min(len(last), end) and tokens[end - 1 - matched] == last[-1 - matched]:
            matched += 1
        if matched < length or (best is not None and matched < best.length):
            continue
        longer = best is None or matched > best.length
        best = NgramMatch(end, matched, () if best is None or longer else (best.end, *best.others))
    return best


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 4), st.integers(0, 40), st.integers(1, 7))
@example([1, 1, 1, 1, 1], 2, 0, 1)
def test_the_match_is_that_of_a_full_search(text: list[int], length: int, more: int, pace: int) -> None:
    tokens, index = array("i", text), NgramIndex(length, 8)  # fewer buckets than tokens: collisions
    for end in range(0, len(tokens) + pace, pace):
        index.index_tokens(tokens, min(end, len(tokens)))
    found, due = index.find_longest(tokens, tokens[-length - more :]), searched(text, length, length + more)
    if due is None or len(text) <= MAX_LINKS:
        assert found == due
    elif found is not None:  # the chain may be longer than what is followed
        assert length <= found.length <= due.length
        for end in (found.end, *found.others):
            assert text[end - found.length : end] == text[-found.length :]


def test_a_match_is_followed_by_a_token() -> None:
    tokens, index = array("i", [5, 6, 7, 5, 6]), NgramIndex(2, 16)
    index.index_tokens(tokens, len(tokens))
    assert index.find_longest(tokens, tokens[-2:]) == NgramMatch(2, 2, ())
    assert index.find_longest(tokens, array("i", [6, 7])) == NgramMatch(3, 2, ())
    assert index.find_longest(tokens, array("i", [7, 6])) is None
    assert index.find_longest(tokens, array("i", [6])) is None


def test_the_newest_of_equally_long_occurrences_comes_first() -> None:
    tokens, index = array("i", [8, 5, 6, 1, 9, 5, 6, 2, 9, 5, 6, 3, 9, 5, 6]), NgramIndex(2, 16)
    index.index_tokens(tokens, len(tokens))
    assert index.find_longest(tokens, tokens[-2:]) == NgramMatch(11, 2, (7, 3))
    assert index.find_longest(tokens, tokens[-9:]) == NgramMatch(11, 3, (7,))


def test_memory_is_bounded_by_the_tokens() -> None:
    index = NgramIndex(2, 1000)
    index.index_tokens(array("i", range(1000)), 1000)
    assert len(index._heads) == 1024 and len(index._links) == 999
