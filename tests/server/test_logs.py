"""Logs for programs and for people: access lines, and the statistics line."""

import io
import json
from typing import Any

import pytest

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.cache.block_store import StoreStats
from headstart.core.engine_info import EngineStats, PoolStats
from headstart.core.sched.token_accounting import TokenCounters
from headstart.http.access_record import AccessRecord
from headstart.http.logs import ServerLog
from headstart.server.statistics import MAX_COLUMNS, activity_text, compact_number

TIME_COLUMNS = len("12:34:56 ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(path: str, status: int | None) -> AccessRecord:
    return AccessRecord("r", "GET", path, status=status)


@pytest.mark.parametrize(
    ("access_log", "on_terminal", "logged"),
    [
        ("auto", True, ["/v1/models 404"]),
        ("auto", False, ["/v1/models 200", "/v1/models 404", "/health 503"]),
        ("all", True, ["/v1/models 200", "/v1/models 404", "/health 200", "/health 503", "/metrics 200"]),
        ("requests", True, ["/v1/models 200", "/v1/models 404", "/health 503"]),
        ("errors", False, ["/v1/models 404"]),
        ("none", False, []),
    ],
)
def test_which_requests_get_an_access_line(access_log: str, on_terminal: bool, logged: list[str]) -> None:
    requests = ["/v1/models 200", "/v1/models 404", "/health 200", "/health 503", "/metrics 200"]
    found = [
        request
        for request in requests
        if record(request.split()[0], int(request.split()[1])).should_log(access_log, on_terminal=on_terminal)
    ]
    assert found == logged


def test_an_access_line_is_json_in_a_file_and_text_on_a_terminal() -> None:
    answered = AccessRecord("r\n1", "POST", "/v1/x\x1b[31m", arrival=1.0, status=400, error="bad")
    answered.num_prompt_tokens, answered.num_tokens = 1234, 5
    answered.breakdown = PromptTokenBreakdown(computed=234, shared=1000)
    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        ServerLog(stream).event("request", answered.fields(2.5), text=answered.text(2.5))
    assert json.loads(file.getvalue())["e2e_ms"] == 1500.0
    expected = "POST /v1/x\\x1b[31m 400 bad, 1,234 prompt tokens (1,000 cached), 5 output, 1,500.0 ms, r\\n1\n"
    assert terminal.getvalue()[TIME_COLUMNS:] == expected


def test_a_log_may_be_told_that_its_pipe_ends_in_a_terminal() -> None:
    stream = io.StringIO()
    assert not ServerLog(stream).is_terminal and ServerLog(Terminal()).is_terminal
    ServerLog(stream, is_terminal=True).event("x", {"a": 1}, text="for people")
    assert stream.getvalue()[TIME_COLUMNS:] == "for people\n"
    stream.close()
    assert not ServerLog(stream).is_terminal


def test_lines_appear_above_the_status_line_of_a_terminal_and_elsewhere_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        log = ServerLog(stream)
        log.show_status_line("loading a long name")
        log.write_line("news")
        log.show_status_line("")
        log.show_status_line("")
        log.write_line("more")
    clear = "\r\x1b[2K"
    assert terminal.getvalue() == f"{clear}loading a\r{clear}news\nloading a\r{clear}more\n"
    assert file.getvalue() == "news\nmore\n"


def stats(number: int, **more: Any) -> EngineStats:
    """Every figure that the line shows is `number`."""
    counters = TokenCounters(number, number, generation_tokens=number, num_preemptions=more.pop("num_preemptions", 0))
    gauges = dict.fromkeys(("num_steps", "num_running", "num_waiting"), number)
    return EngineStats(counters, PoolStats(num_blocks=number), **gauges, **more)


@pytest.mark.parametrize(
    "number", [1, 999, 1_000, 9_995, 99_949, 99_950, 999_499, 999_500, 10**9, 10**15, 10**18, 2**62]
)
@pytest.mark.parametrize(
    "more",
    [
        {"step_seconds": 1e9},
        {"num_preemptions": 2**62},
        {"store": StoreStats(degraded="the disk is full and has been full for a long time")},
    ],
)
def test_the_statistics_line_fits_into_120_columns(number: int, more: dict[str, Any]) -> None:
    line = activity_text(EngineStats(), stats(number, **dict(more)), 1e-3)
    assert "\n" not in line and TIME_COLUMNS + len(line) <= MAX_COLUMNS == 114, line


def test_the_statistics_line_tells_what_happened_since_the_last() -> None:
    last = EngineStats(
        TokenCounters(prompt_tokens=100, generation_tokens=50, cached_tokens=10), num_steps=10, step_seconds=1.0
    )
    now = EngineStats(
        TokenCounters(prompt_tokens=25_100, generation_tokens=1_050, cached_tokens=20_010),
        PoolStats(num_blocks=200, num_free=50),
        num_steps=30,
        step_seconds=1.5,
        num_running=3,
        num_waiting=12,
    )
    text = "running 3, waiting 12 | tok/s: prompt 2.5k, output 100 | hit 80 % | KV 75 % | step 25 ms"
    assert activity_text(last, now, 10.0) == text
    assert activity_text(now, now, 10.0).endswith("prompt 0, output 0 | hit - | KV 75 %")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (42.51, "42.5"), (99.96, "100"), (999.4, "999"), (999.6, "1k"), (1234, "1.23k"), (10**9, "1G"),
     (999_999, "1M"), (1e18, ">999T")],
)  # fmt: skip
def test_numbers_are_written_in_five_characters(number: float, text: str) -> None:
    assert compact_number(number) == text and len(text) <= 5
