"""Streams on their way through: nothing is lost or added however they are cut, and only usage is taken out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.apis.api_table import api_of_path
from headstart.gateway.proxy import sse_reader as sse
from headstart.gateway.proxy.sse_reader import ReportedUsage, SSEStreamReader, read_usage
from headstart.gateway.proxy.upstream import InvalidReplicaResponseError
from headstart.router.routing_request import ReportedTokenUsage

USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 7}}


def event(value: object, end: str = "\n\n") -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}{end}".encode()


TOKEN = event({"choices": [{"text": 'say "usage":{ and [DONE]'}], "usage": None})
LAST = event({"choices": [], "usage": USAGE})
DONE = event("[DONE]")


def through(stream: SSEStreamReader, pieces: list[bytes]) -> bytes:
    return b"".join([*(stream.feed_and_take_relayable(piece) for piece in pieces), stream.flush()])


@st.composite
def cuts(draw: st.DrawFn) -> list[bytes]:
    whole = b": ping\n\n" + TOKEN * draw(st.integers(0, 3)) + LAST + DONE
    at = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in zip([0, *at], [*at, len(whole)], strict=True)]


@given(cuts(), st.booleans())
def test_however_a_stream_is_cut_it_comes_through_whole_but_for_hidden_usage(pieces: list[bytes], hides: bool) -> None:
    stream, whole = SSEStreamReader(hides_usage=hides), b"".join(pieces)
    assert through(stream, pieces) == (whole.replace(LAST, b"") if hides else whole)
    assert stream.reported == ReportedUsage(ReportedTokenUsage(10, 7), 4) and stream.is_done and stream.has_data


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_bytes_that_are_no_events_come_through_as_they_are(junk: bytes, at: list[int]) -> None:
    ends = sorted(min(index, len(junk)) for index in at)
    pieces = [junk[start:end] for start, end in zip([0, *ends], [*ends, len(junk)], strict=True)]
    stream = SSEStreamReader(hides_usage=True)
    if stream.reported == ReportedUsage():
        assert through(stream, pieces) == junk


def test_only_whole_events_are_passed_on() -> None:
    stream = SSEStreamReader()
    assert stream.feed_and_take_relayable(TOKEN[:10]) == b"" and not stream.has_data
    assert stream.feed_and_take_relayable(TOKEN[10:] + DONE[:3]) == TOKEN and stream.has_data and not stream.is_done
    assert stream.feed_and_take_relayable(DONE[3:]) == DONE and stream.is_done


def test_comments_are_no_data_and_texts_cannot_pose_as_an_end() -> None:
    stream = SSEStreamReader(hides_usage=True)
    assert stream.feed_and_take_relayable(b": ping\n\n") == b": ping\n\n" and not stream.has_data
    assert stream.feed_and_take_relayable(TOKEN) == TOKEN and not stream.is_done and stream.reported == ReportedUsage()


def test_usage_beside_a_choice_is_read_and_stays() -> None:
    both = event({"choices": [{"text": "a"}], "usage": USAGE})
    stream = SSEStreamReader(hides_usage=True)
    assert stream.feed_and_take_relayable(both) == both and stream.reported.usage == ReportedTokenUsage(10, 7)


def test_lines_may_end_in_carriage_returns() -> None:
    last, done = event({"choices": [], "usage": USAGE}, "\r\n\r\n"), event("[DONE]", "\r\n\r\n")
    stream = SSEStreamReader(hides_usage=True)
    assert stream.feed_and_take_relayable(last[:20]) == b""
    assert through(stream, [last[20:], done]) == done and stream.reported.output_tokens == 4 and stream.is_done


def test_events_and_comments_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEPT_EVENT_BYTES", 1000)
    monkeypatch.setattr(sse, "MAX_COMMENT_BYTES", 1000)
    stream = SSEStreamReader()
    assert stream.feed_and_take_relayable(b"data: " + b"x" * 900) == b""
    with pytest.raises(InvalidReplicaResponseError, match="event"):
        stream.feed_and_take_relayable(b"x" * 100)
    stream = SSEStreamReader()
    for _ in range(3):
        assert stream.feed_and_take_relayable(b": ping\n\n" * 100 + TOKEN)
    with pytest.raises(InvalidReplicaResponseError, match="comments"):
        stream.feed_and_take_relayable(b": ping\n\n" * 200)


LONG_TOKEN = event({"choices": [{"text": "x" * 3_000}], "usage": None})
LONG_LAST = event({"choices": [{"text": "y" * 3_000}], "usage": USAGE})


@given(st.lists(st.sampled_from([TOKEN, LONG_TOKEN, LONG_LAST, b": ping\n\n"]), max_size=4), st.data())
def test_a_long_event_is_passed_on_as_it_comes_and_its_usage_is_read(parts: list[bytes], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse, "KEPT_EVENT_BYTES", 1_000)
        whole = b"".join([*parts, LAST if LONG_LAST not in parts else b"", DONE])
        stream, passed, kept = SSEStreamReader(), b"", 0
        at = 0
        while at < len(whole):
            end = at + data.draw(st.integers(1, 800))
            passed += stream.feed_and_take_relayable(whole[at:end])
            kept = max(kept, len(stream._rest))
            at = end
        assert passed + stream.flush() == whole and stream.is_done and not stream.is_mid_event
        assert stream.reported == ReportedUsage(ReportedTokenUsage(10, 7), 4) and kept <= 1_000


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_long_last_event_of_a_named_stream_ends_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEPT_EVENT_BYTES", 1_000)
    name = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}[path]
    stream, last = SSEStreamReader(api_of_path(path).end), f"event: {name}\n".encode() + event({"text": "x" * 5_000})
    assert stream.feed_and_take_relayable(last[:3_000]) == last[:3_000] and stream.is_mid_event and not stream.is_done
    assert stream.feed_and_take_relayable(last[3_000:]) == last[3_000:] and stream.is_done and stream.num_events == 1


@given(cuts())
def test_an_event_in_many_pieces_is_looked_at_once(pieces: list[bytes]) -> None:
    """Byte by byte the same events come out as in one piece."""
    whole = b"".join(pieces)
    stream = SSEStreamReader()
    assert (
        b"".join(stream.feed_and_take_relayable(whole[i : i + 1]) for i in range(len(whole))) == whole
        and stream.is_done
    )
    assert json.loads(stream.first)["choices"] is not None


def test_engines_that_do_not_tell_cached_tokens_tell_nothing_to_learn_from() -> None:
    assert read_usage(json.dumps({"usage": USAGE}).encode()) == ReportedUsage(ReportedTokenUsage(10, 7), 4)
    assert read_usage(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}') == ReportedUsage(None, 2)
    assert read_usage(b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": null}}') == ReportedUsage(None, None)
    assert (
        read_usage(b'{"usage": {"prompt_tokens": "many"}}')
        == read_usage(b"not json")
        == read_usage(b"[1]")
        == read_usage(b"\xff")
        == ReportedUsage()
    )
