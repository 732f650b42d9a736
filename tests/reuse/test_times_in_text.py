"""Dates and times in a text: the quick search against one that tries every character, and their number by hand."""

from hypothesis import given
from hypothesis import strategies as st

from headstart.reuse import causes as divergence
from headstart.reuse.causes import count_timestamps, find_timestamps

PARTS = (
    *("2026-11-24", "T10:20", ":30.5", "Z", "+01:00", "9:05", " pm", "24.12.2026", "1/2/26", "1732406400", "123"),
    *("Monday", "Tue", "Sunrise", "24 ", "Nov", "ember", ". ", " 3", ", ", "2026", "a", "é", "_", " ", "-", "D"),
)
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join) | st.text(max_size=40)


@given(TEXTS)
def test_times_are_those_that_a_search_at_every_character_finds(text: str) -> None:
    assert [found.span() for found in find_timestamps(text)] == [
        found.span() for found in divergence._TIMES.finditer(text)
    ]


def test_a_date_and_its_time_are_one() -> None:
    assert count_timestamps("It is 2026-11-24 at 10:20.\nNo digits on Monday.\nDue 3 Nov 2026; seen on Friday 13") == 3
