"""StopStringSearch: the answer of a naive search over the growing text, whatever the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from headstart.openai.text.stop_strings import StopMatch, StopStringAutomata, StopStringSearch


def naive(text: str, stops: list[str]) -> StopMatch | None:
    """The match whose end comes first; of those, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def naive_held(text: str, stops: list[str]) -> int:
    return max(
        (k for stop in stops for k in range(1, len(stop)) if len(text) >= k and text.endswith(stop[:k])), default=0
    )


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3, unique=True),
)
def test_search_and_holding_back_are_those_of_a_naive_search(pieces: list[str], stops: list[str]) -> None:
    search, text = StopStringSearch(StopStringAutomata(stops)), ""
    for piece in pieces:
        match = search.feed_and_find_match(piece)
        text += piece
        assert match == naive(text, stops)
        if match is not None:
            return
        assert search.num_held == naive_held(text, stops)


@given(before=st.text("ab", max_size=8), after=st.text("ab", max_size=8), stop=st.text("ab", min_size=1, max_size=4))
def test_a_match_that_ends_while_unarmed_is_passed_over(before: str, after: str, stop: str) -> None:
    search = StopStringSearch(StopStringAutomata([stop]))
    assert search.feed_and_find_match(before, armed=False) is None
    ends = [end for end in range(len(before) + 1, len(before + after) + 1) if (before + after)[:end].endswith(stop)]
    match = search.feed_and_find_match(after)
    assert (match and match.end) == (ends[0] if ends else None)


def test_without_stop_strings_nothing_is_held_back() -> None:
    search = StopStringSearch(StopStringAutomata([]))
    assert search.feed_and_find_match("anything") is None and search.num_held == 0
