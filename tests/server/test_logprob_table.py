"""LogprobTable: a list of entries in less memory."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from headstart.core.batch import TokenLogprob
from headstart.openai.text.logprob_table import LogprobTable, TokenEntry

TOP = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e4, 0)), max_size=3).map(tuple)
ENTRY = st.builds(TokenEntry, st.integers(0, 2**31 - 1), st.floats(-1e4, 0), TOP, st.integers(0, 2**31 - 1))


@given(entries=st.lists(ENTRY, max_size=6), start=st.integers(-7, 7), end=st.integers(-7, 7))
def test_it_reads_as_the_list_of_what_was_put_in(entries: list[TokenEntry], start: int, end: int) -> None:
    table = LogprobTable()
    table.extend(entries)
    assert table == entries and entries == table and list(table) == entries
    assert table[start:end] == entries[start:end] and len(table) == len(entries)
    assert [table.token_logprob_at(i) for i in range(len(table))] == [
        TokenLogprob(e.token_id, e.logprob or 0, e.top) for e in table
    ]
    assert [table[i] for i in range(-len(entries), len(entries))] == entries * 2


def test_an_alternative_takes_twelve_bytes() -> None:
    tables = [LogprobTable(), LogprobTable()]
    for table, width in zip(tables, (0, 20), strict=True):
        for token in range(1000):
            table.append(TokenLogprob(token, -1.0, tuple((other, -2.0) for other in range(width))))
    small, large = (sum(sys.getsizeof(getattr(table, name)) for name in vars(table)) for table in tables)
    assert large - small < 1000 * 20 * 12 * 1.2
