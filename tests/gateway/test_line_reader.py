"""JSONLinesReader: complete lines of JSON, the first and the last of them, and the counts of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.apis.ollama_api import OLLAMA_CHAT
from headstart.gateway.proxy import sse_reader as line_reader
from headstart.gateway.proxy.sse_reader import JSONLinesReader, ReportedUsage, read_ollama_usage
from headstart.gateway.proxy.upstream import InvalidReplicaResponseError
from headstart.router.routing_request import ReportedTokenUsage

LINES = [
    b'{"message":{"content":"\\"done\\":true"},"done":false}\n',
    b'{"message":{"content":"b"},"done":false}\n',
    b'{"done":true,"prompt_eval_count":9,"prompt_eval_cached_count":4,"eval_count":2}\n',
]


@given(st.lists(st.integers(1, 60), max_size=8))
def test_any_pieces_give_complete_lines_and_the_counts(sizes: list[int]) -> None:
    stream, whole, passed = JSONLinesReader(OLLAMA_CHAT.end), b"".join(LINES), b""
    rest = whole
    for size in [*sizes, len(whole)]:
        piece, rest = rest[:size], rest[size:]
        part = stream.feed_and_take_relayable(piece)
        assert not part or part.endswith(b"\n")
        passed += part
    assert passed + stream.flush() == whole and stream.is_done and stream.num_events == 3
    assert stream.first == LINES[0].strip() and stream.reported == ReportedUsage(ReportedTokenUsage(9, 4), 2)


def test_a_text_does_not_end_a_stream() -> None:
    stream = JSONLinesReader(OLLAMA_CHAT.end)
    stream.feed_and_take_relayable(LINES[0])
    assert stream.has_data and not stream.is_done
    stream.feed_and_take_relayable(b'{"error":"lost"}\n')
    assert stream.is_done


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "KEPT_EVENT_BYTES", 10)
    with pytest.raises(InvalidReplicaResponseError):
        JSONLinesReader(OLLAMA_CHAT.end).feed_and_take_relayable(b"x" * 11)


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b'{"prompt_eval_count":-1,"prompt_eval_cached_count":0}', b"{}"])
def test_counts_that_cannot_be_are_none(line: bytes) -> None:
    assert read_ollama_usage(line) == ReportedUsage()
