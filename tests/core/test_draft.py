"""Drafts: what followed the longest matches, and how far these agree."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.speculation.draft import END, Draft, draft_from_match, draft_of_longer_match
from headstart.core.speculation.ngram_index import NgramIndex, NgramMatch


def tokens(*values: int) -> "array[int]":
    return array("i", values)


def test_a_draft_ends_where_its_text_ends() -> None:
    text = tokens(1, 2, 3, 4, END, 1, 2, END)
    assert draft_from_match(text, NgramMatch(2, 2, ()), 5) == Draft(tokens(3, 4), 2, 2)
    assert draft_from_match(text, NgramMatch(2, 2, ()), 1) == Draft(tokens(3), 2, 1)
    assert draft_from_match(text, NgramMatch(7, 2, (2,)), 5) is None


def test_a_sequence_that_repeats_itself_goes_on_so() -> None:
    text = tokens(9, 1, 2, 1, 2)
    assert draft_from_match(text, NgramMatch(3, 2, ()), 5, repeats=True) == Draft(tokens(1, 2, 1, 2, 1), 2, 5)
    ones = tokens(1, 1, 1, 1, 1)
    assert draft_from_match(ones, NgramMatch(4, 4, (3, 2)), 6, repeats=True) == Draft(tokens(1, 1, 1, 1, 1, 1), 4, 6)


def test_tokens_are_agreed_until_an_occurrence_goes_on_otherwise_or_ends() -> None:
    text = tokens(1, 2, 3, 4, 5, END, 1, 2, 3, 4, 6, END, 1, 2, 3, END, 1, 2, 3, 4, 5, 7)
    newest = NgramMatch(18, 2, (14, 8, 2))
    assert draft_from_match(text, newest, 9) == Draft(tokens(3, 4, 5, 7), 2, 1)
    assert draft_from_match(text, newest._replace(others=(8, 2)), 9) == Draft(tokens(3, 4, 5, 7), 2, 2)
    assert draft_from_match(text, newest._replace(others=(2,)), 9) == Draft(tokens(3, 4, 5, 7), 2, 3)


def test_the_longer_match_wins_and_the_first_of_equal_ones_is_checked_by_the_other() -> None:
    short, long = Draft(tokens(1, 2, 3), 2, 3), Draft(tokens(1, 5, 3), 4, 3)
    assert draft_of_longer_match(short, long) == draft_of_longer_match(long, short) == long
    assert draft_of_longer_match(short, None) == draft_of_longer_match(None, short) == short
    assert draft_of_longer_match(None, None) is None
    assert draft_of_longer_match(short, long._replace(match_length=2)) == Draft(tokens(1, 2, 3), 2, 1)
    assert draft_of_longer_match(short, Draft(tokens(1, 2, 3), 2, 0)) == Draft(tokens(1, 2, 3), 2, 0)


def test_a_draft_is_cut() -> None:
    assert Draft(tokens(1, 2, 3), 5, 2).truncated(1) == Draft(tokens(1), 5, 1)
    assert Draft(tokens(1, 2, 3), 5, 2).truncated(9) == Draft(tokens(1, 2, 3), 5, 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=16), st.integers(1, 6))
def test_agreed_tokens_follow_every_occurrence(text: list[int], num: int) -> None:
    """Of 16 tokens every occurrence is compared: the longest match's tokens, then all occurrences by a search."""
    known, index = tokens(*text), NgramIndex(1, 16)
    index.index_tokens(known, len(known))
    match = index.find_longest(known, known[-8:])
    if match is None:
        assert text[-1] not in text[:-1]
        return
    draft = draft_from_match(known, match, num, repeats=True)
    assert draft is not None and len(draft.tokens) == num
    last = text[-match.length :]
    ends = [end for end in range(match.length, len(text)) if text[end - match.length : end] == last]
    for end in ends:
        behind = text[end:]
        while len(behind) < num:
            behind += text[end:]
        assert behind[: draft.num_agreed] == draft.tokens[: draft.num_agreed].tolist()
    assert ends[-1] == match.end
