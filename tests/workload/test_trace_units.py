"""Units of traces are recognised if only one is possible, and asked for otherwise."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headstart.cli.main import main
from headstart.core.errors import ConfigError
from headstart.workload.jobs import perfect_cache_prefill_tokens
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.recorded.trace_units import RECOGNISED, TraceUnits, seconds_per_unit, tokens_per_id
from headstart.workload.traces import parse_trace


def rows(size: int, lengths: list[int], unit: float = 1000, has_rest: bool = True) -> list[dict[str, Any]]:
    """Requests 30 s apart whose ids stand for `size` tokens; two prompts share all but the last block."""
    return [
        {
            "timestamp": round(30 * unit * at) if unit > 10 else 30.25 * unit * at,
            "input_length": length,
            "output_length": 5,
            "hash_ids": [*range(num - 1), 1000 + at]
            if (num := -(-length // size) if has_rest else length // size)
            else [],
        }
        for at, length in enumerate(lengths)
    ]


def read(found: list[dict[str, Any]], units: TraceUnits = RECOGNISED) -> Any:
    return parse_trace(map(json.dumps, found), units)


LENGTHS = [5000, 6001, 4999, 5120, 7777]


@pytest.mark.parametrize("has_rest", [True, False], ids=["an id for the rest", "full blocks only"])
@pytest.mark.parametrize("size", [16, 64, 128, 512, 48])
def test_ids_stand_for_as_many_tokens_as_the_lengths_say(size: int, has_rest: bool) -> None:
    trace = read(rows(size, LENGTHS, has_rest=has_rest))
    assert trace.block_size == size
    jobs = trace.to_jobs(32_000, 0)
    assert [len(job.prompt) for job in jobs] == LENGTHS
    shared = (4999 - 1) // size * size if has_rest else (4999 // size - 1) * size
    assert jobs[0].prompt[:shared] == jobs[2].prompt[:shared] != jobs[1].prompt[1 : shared + 1]
    assert jobs[0].prompt[: shared + size] != jobs[2].prompt[: shared + size]


@given(
    st.sampled_from([16, 32, 64, 256, 512]), st.booleans(), st.lists(st.integers(1, 40_000), min_size=1, max_size=12)
)
def test_a_size_is_right_or_asked_for(size: int, has_rest: bool, lengths: list[int]) -> None:
    """Never another one, whatever the lengths."""
    prompts = [(-(-length // size) if has_rest else length // size, length) for length in lengths]
    try:
        found = tokens_per_id(prompts)
    except ConfigError as error:
        assert "--trace-block-size" in str(error)
        return
    assert found == size


@given(st.integers(2, 600), st.lists(st.integers(1, 40_000), min_size=1, max_size=12))
def test_a_size_that_is_no_power_of_two_is_only_taken_for_one_that_fits(size: int, lengths: list[int]) -> None:
    prompts = [(-(-length // size), length) for length in lengths]
    try:
        found = tokens_per_id(prompts)
    except ConfigError:
        return
    assert all(-(-length // found) == ids or length // found == ids for ids, length in prompts)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([(2, 700)], "256 or 512 tokens"),
        ([(1, 40)], "21 or more tokens"),
        ([(3, 1000), (1, 900)], "no number of tokens per id fits"),
        ([(0, 10)], "11 or more tokens"),
    ],
)
def test_what_is_ambiguous_names_the_option(prompts: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*--trace-block-size N"):
        tokens_per_id(prompts)


def test_a_stated_size_is_checked_against_the_lengths() -> None:
    assert tokens_per_id([(2, 700)], 512) == 512 and tokens_per_id([(9, 700)], 512) == 512
    with pytest.raises(ConfigError, match="a prompt of 700 tokens has only 2 ids"):
        tokens_per_id([(2, 700)], 16)


@pytest.mark.parametrize(
    ("times", "documented", "seconds"),
    [
        ([0, 300, 900], 1e-3, 1e-3),
        ([0.0, 61.5, 90.25], 1.0, 1.0),
        ([1_764_000_000, 1_764_000_060], None, 1.0),
        ([1_764_000_000.25, 1_764_000_060.5], 1e-3, 1.0),
        ([1_764_000_000_000, 1_764_000_060_000], None, 1e-3),
        ([1_764_000_000_000_000, 1_764_000_060_000_000], None, 1e-6),
        ([1_764_000_000_000_000_000, 1_764_000_060_000_000_000], 1e-3, 1e-9),
        ([7, 7], 1e-3, 1e-3),
    ],
)
def test_units_of_time_that_are_certain(times: list[float], documented: float | None, seconds: float) -> None:
    assert seconds_per_unit([float(at) for at in times], documented, TraceUnits()) == seconds


@pytest.mark.parametrize(
    ("times", "documented"),
    [
        ([0.0, 0.4, 31.25], 1e-3),  # seconds, as a fraction shows
        ([0, 1, 1, 2, 3], 1e-3),  # whole seconds: 1,000 requests per second otherwise
        ([0, 30_000], None),  # agents' times count from 1970
    ],
)
def test_units_of_time_that_are_not_certain_are_asked_for(times: list[float], documented: float | None) -> None:
    with pytest.raises(ConfigError, match=r"in s, .* in ms, .*--trace-time-unit"):
        seconds_per_unit([float(at) for at in times], documented, TraceUnits())
    assert seconds_per_unit([float(at) for at in times], documented, TraceUnits(time="s")) == 1.0
    with pytest.raises(ConfigError, match="--trace-time-unit h: one of s, ms, us, ns"):
        TraceUnits(time="h")


def test_a_trace_in_seconds_keeps_its_pauses_once_the_unit_is_stated() -> None:
    found = rows(512, LENGTHS, unit=1)
    with pytest.raises(ConfigError, match="--trace-time-unit"):
        read(found)
    assert [request.at for request in read(found, TraceUnits(time="s")).requests] == [30.25 * at for at in range(5)]


def test_bailians_traces_have_blocks_of_16_and_seconds() -> None:
    found = [
        {**row, "chat_id": at, "parent_chat_id": at - 1, "turn": at, "type": "text"}
        for at, row in enumerate(rows(16, LENGTHS, unit=1))
    ]
    trace = read(found)
    assert (trace.kind, trace.block_size, trace.requests[1].at) == ("bailian", 16, 30.25)


@given(st.floats(0.01, 1.0), st.sampled_from([16, 64, 512]))
def test_scaled_lengths_share_the_scaled_part(factor: float, size: int) -> None:
    """Also where a block has less than a token."""
    trace = read(rows(size, LENGTHS))
    first, _, third, *_ = trace.to_jobs(2**31 - 1, 0, factor=factor)
    assert [len(job.prompt) for job in trace.to_jobs(99, 0, factor=factor)] == [
        max(int(n * factor), 1) for n in LENGTHS
    ]
    shared = round(4998 // size * size * factor)
    assume(shared > 4)
    assert first.prompt[: shared - 1] == third.prompt[: shared - 1]
    assert perfect_cache_prefill_tokens([first.prompt, third.prompt]) >= len(first.prompt)


def test_lengths_are_divided_with_their_blocks() -> None:
    trace = read(rows(64, LENGTHS))
    found = trace.with_divided_lengths(16)
    assert found.block_size == 4 and [one.length for one in found.requests] == [-(-n // 16) for n in LENGTHS]
    assert found.requests[0].output == 1 and [len(job.prompt) for job in found.to_jobs(99, 0)] == [
        -(-n // 16) for n in LENGTHS
    ]
    with pytest.raises(ConfigError, match="which 3 does not divide"):
        trace.with_divided_lengths(3)


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_simulate_and_plan_ask_and_obey(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(16, [100, 33, 80], unit=1))))
    limit = ["--slo-ttft", "60s"] if verb == "plan" else ["--replicas", "1"]
    assert main([verb, "--trace", str(path), *limit]) == 2
    assert "--trace-time-unit" in capsys.readouterr().err
    assert main([verb, "--trace", str(path), "--trace-time-unit", "s", *limit]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["setup"]["trace"]["tokens_per_id"] == 16


def test_a_benchmark_asks_before_it_makes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(16, [100, 33, 80], unit=1))))
    assert main(["bench", "trace", "--trace", str(path)]) == 2
    assert "--trace-time-unit" in capsys.readouterr().err


def test_marks_and_gzip_change_nothing(tmp_path: Path) -> None:
    text = "\n" + "\n".join(map(json.dumps, rows(64, LENGTHS)))
    plain = parse_trace(text.split("\n"))
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert read_trace_path(tmp_path / "a.jsonl") == read_trace_path(tmp_path / "b.jsonl.gz") == plain
    (tmp_path / "c.gz").write_bytes(gzip.compress(text.encode())[:-40])
    with pytest.raises(ConfigError, match=r"c\.gz"):
        read_trace_path(tmp_path / "c.gz")
