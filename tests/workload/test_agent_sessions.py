"""Sessions of coding agents: local ids, sub-agents, pauses, and the recorded ones where they are at hand."""

import gzip
import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.errors import ConfigError
from headstart.sim.profile import SERIAL
from headstart.sim.sim_request import requests_from_trace
from headstart.sim.sweep import SimulationConfig
from headstart.workload.block_paths import overlap_sessions, trace_block_paths
from headstart.workload.recorded.agent_sessions import ConsecutiveIdRuns, SessionReader
from headstart.workload.recorded.trace_files import TraceOptions, read_trace_path
from headstart.workload.traces import Trace, TracedRequest

RECORDED = Path(os.environ.get("HEADSTART_AGENT_SESSIONS", Path(__file__).parents[3] / "shared" / "traces" / "agentx"))
SIZE = 64


def call(at: float, ids: list[int], rest: int = 0, took: float = 1.0, **more: Any) -> dict[str, Any]:
    """One recorded request: full blocks have ids, `rest` tokens behind them have none."""
    length = SIZE * len(ids) + rest
    return {"t": at, "type": "n", "model": "m", "in": length, "out": 9, "hash_ids": ids, "api_time": took, **more}


def subagent(at: float, name: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"t": at, "type": "subagent", "agent_id": name, "subagent_type": "Search", "requests": calls}


def session(name: str, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": SIZE, "hash_id_scope": "local", "requests": requests, **more}


MADE = session(
    "made",
    [
        call(0, [1, 2, 3], took=2.0),
        call(10, [1, 2, 3, 4], rest=5, took=4.0),
        subagent(20, "a1", [call(0, [7, 8]), call(4, [7, 8, 9])]),  # relative to its own beginning
        subagent(21, "a2", [call(21.5, [7, 8, 10], took=0.5), call(60, [7, 8, 10, 11], took=100.0)]),
        call(30, [1, 2, 3, 4, 12]),
        call(200, [1, 2, 13]),
    ],
)


def read_sessions(sessions: list[dict[str, Any]]) -> Trace:
    """Return sessions as a trace, each from time 0."""
    reader = SessionReader()
    for one in sessions:
        reader.add_session(one)
    return reader.trace()


def by_session(trace: Trace) -> dict[str, list[TracedRequest]]:
    found: dict[str, list[TracedRequest]] = {}
    for request in trace.requests:
        found.setdefault(request.session, []).append(request)
    return found


def test_times_lengths_and_agents_of_a_session() -> None:
    trace = read_sessions([MADE])
    assert (trace.kind, trace.block_size) == ("sessions", SIZE)
    found = by_session(trace)
    assert {name: [one.at for one in requests] for name, requests in found.items()} == {
        "made": [0, 10, 30, 200],
        "made/a1": [20, 24],
        "made/a2": [21.5, 60],
    }
    assert [one.length for one in found["made"]] == [192, 261, 320, 192] and {
        one.root_session for one in trace.requests
    } == {"made"}


def test_a_request_waits_for_the_answers_that_it_needs_and_for_the_recorded_pause() -> None:
    found = by_session(read_sessions([MADE]))
    number = {(name, one.at): one.number for name, requests in found.items() for one in requests}
    waits = {
        (name, one.at): ({key for key, each in number.items() if each in one.after}, one.pause)
        for name, requests in found.items()
        for one in requests
    }
    parent = ("made", 10)
    assert waits == {
        ("made", 0): (set(), 0.0),
        ("made", 10): ({("made", 0)}, 8.0),  # it had ended at 2
        ("made/a1", 20): ({parent}, 6.0),
        ("made/a1", 24): ({("made/a1", 20)}, 3.0),
        ("made/a2", 21.5): ({parent}, 7.5),
        ("made/a2", 60): ({("made/a2", 21.5)}, 38.0),
        ("made", 30): ({parent, ("made/a1", 24)}, 5.0),  # a1 had ended, a2 had not
        ("made", 200): ({("made", 30), ("made/a2", 60)}, 40.0),
    }


def test_a_request_that_overlaps_another_does_not_wait_for_it() -> None:
    rows = [call(0, [1]), call(5, [1, 2], took=20.0), call(6, [1, 3]), call(40, [1, 2, 4])]
    found = read_sessions([session("s", rows)]).requests
    assert [one.after for one in found] == [(), (0,), (0,), (2,)] and found[2].pause == 5.0


def test_ids_are_local_to_a_session_unless_it_says_otherwise() -> None:
    trace = read_sessions([session("x", [call(0, [1, 2])]), session("y", [call(0, [1, 2])])])
    assert trace_block_paths(trace).num_distinct == 4
    shared = [session(name, [call(0, [1, 2])], hash_id_scope="global") for name in "xy"]
    assert trace_block_paths(read_sessions(shared)).num_distinct == 2


def test_tokens_behind_the_last_full_block_are_shared_with_no_other_request() -> None:
    first, second = read_sessions([session("s", [call(0, [1, 2], rest=9), call(9, [1, 2], rest=9)])]).to_jobs(
        2**31 - 1, 0
    )
    assert len(first.prompt) == 137 and first.prompt[:128] == second.prompt[:128]
    assert first.prompt[128:] != second.prompt[128:]


@given(st.lists(st.lists(st.integers(-5, 12) | st.integers(2**40, 2**40 + 3), max_size=12), min_size=1, max_size=6))
def test_runs_are_the_ids_by_other_names(paths: list[list[int]]) -> None:
    rows = [call(at, ids, rest=1) for at, ids in enumerate(paths)]
    found = [one.hash_ids for one in read_sessions([session("s", rows)]).requests]
    numbers: dict[int, int] = {}
    for ids, path in zip(found, paths, strict=True):
        assert isinstance(ids, ConsecutiveIdRuns) and len(ids) == len(path) + 1
        assert list(ids)[:-1] == [numbers.setdefault(name, len(numbers)) for name in path]
        assert [ids[index] for index in range(-len(ids), len(ids))] == 2 * list(ids)
        assert all(list(ids[:count]) == list(ids)[:count] for count in range(len(ids) + 2))
        assert list(ids[1:]) == list(ids)[1:] and list(pickle.loads(pickle.dumps(ids))) == list(ids)


def test_long_sessions_take_little_memory() -> None:
    rows = [call(at, list(range(1, 1500 + 4 * at))) for at in range(200)]
    value = session("s", rows)
    tracemalloc.start()
    trace = read_sessions([value])
    assert sum(len(one.hash_ids) for one in trace.requests) > 300_000
    assert tracemalloc.get_traced_memory()[0] < 1 << 19
    tracemalloc.stop()


# --------------------------------------------------------------------------------------------------------------- files


def folder_of(path: Path, count: int = 3) -> Path:
    path.mkdir()
    for number in range(count):
        text = json.dumps({**MADE, "id": f"s{number}"}, indent=number or None)
        name = path / f"s{number}.json{'.gz' if number else ''}"
        name.write_bytes(gzip.compress(text.encode()) if number else b"\xef\xbb\xbf" + text.encode())
    return path


def test_a_folder_one_file_and_lines_are_read_alike(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    trace = read_trace_path(folder_of(tmp_path / "all"), on_file=lambda index, count: seen.append((index, count)))
    assert seen == [(0, 3), (1, 3), (2, 3)] and len(trace.requests) == 3 * 8
    lines = tmp_path / "all.jsonl"
    lines.write_text("\n".join(json.dumps({**MADE, "id": f"s{number}"}) for number in range(3)))
    facts = [
        [(one.at, one.length, list(one.hash_ids), one.session, one.pause) for one in each.requests]
        for each in (trace, read_trace_path(lines))
    ]
    assert facts[0] == facts[1]
    assert len(read_trace_path(tmp_path / "all" / "s1.json.gz").requests) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "tokens each"),
        ({"requests": [call(0, [1]) | {"in": 200}]}, "1 blocks of 64 for 200 tokens"),
        ({"requests": [call(0, [1]) | {"hash_ids": [1, None]}]}, "no list of numbers"),
        ({"requests": [call(0, [1]) | {"hash_ids": "12"}]}, "no list of numbers"),
        ({"requests": [call(0, [1]) | {"t": float("nan")}]}, "time is nan"),
        ({"requests": [call(0, [1]) | {"in": 1 << 60}]}, "prompt of"),
        ({"requests": [{"t": 0}]}, "'in'"),
        ({"requests": []}, "no requests"),
        ({"requests": [call(0, [1]), call(1e9, [1])]}, "arrive over"),
        ({"requests": 5}, "s0"),
        ({"requests": [5]}, "s0"),
    ],
)
def test_sessions_that_cannot_be_read_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({**MADE, "id": "s0", **changes}))
    with pytest.raises(ConfigError, match=message):
        read_trace_path(path)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "all")
    (folder / "s3.json").write_text(json.dumps({**MADE, "id": "s1"}))
    with pytest.raises(ConfigError, match=r"s3\.json.*another one of this id"):
        read_trace_path(folder)
    (folder / "s3.json").write_text(json.dumps({**MADE, "id": "s3", "block_size": 16}))
    with pytest.raises(ConfigError, match="for 16 tokens each, those of the others for 64"):
        read_trace_path(folder)
    (folder / "s3.json").write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match="holds no session"):
        read_trace_path(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no file in this folder ends with"):
        read_trace_path(tmp_path / "none")


# ---------------------------------------------------------------------------------------------------------- simulation


def test_sessions_one_at_a_time_follow_one_another() -> None:
    trace = overlap_sessions(read_sessions([{**MADE, "id": name} for name in "xyz"]), 2)
    starts = {name: requests[0] for name, requests in by_session(trace).items() if "/" not in name}
    assert [starts[name].at for name in "xyz"] == [0, 0, 200]
    last = by_session(trace)["x"][-1]
    assert starts["z"].after == (last.number,) and starts["x"].after == starts["y"].after == ()


def test_whole_sessions_are_left_out_if_one_prompt_is_too_long() -> None:
    long = session("long", [call(0, [1]), subagent(1, "a", [call(2, [1, 2, 3, 4, 5, 6])])])
    trace = read_sessions([MADE, long]).up_to_length(330)
    assert {one.root_session for one in trace.requests} == {"made"} and trace.num_dropped == 2


def test_a_simulated_request_comes_when_the_answers_it_needs_have_ended() -> None:
    trace = read_sessions([MADE])
    requests = requests_from_trace(trace.with_divided_lengths(16))
    profile = SERIAL
    records = SimulationConfig(profile, 1).run_new_fleet(requests).records
    found = {int(one.record.request_id): one.record for one in records}
    assert len(found) == 8 and not any(one.error for one in found.values())
    for index, request in enumerate(requests):
        if request.after:
            ends = [found[before].finish or 0.0 for before in request.after]
            assert found[index].arrival == pytest.approx(max(ends) + request.pause)
    faster = SimulationConfig(profile, 1).run_new_fleet(requests_from_trace(trace, speed=2.0)).records
    assert max(one.record.arrival for one in faster) < max(one.arrival for one in found.values())


@pytest.mark.long
@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded sessions are not at hand")
def test_recorded_sessions_are_read_whole() -> None:
    options = TraceOptions(divisor=16, sessions_at_once=8)
    trace = options.read(RECORDED)
    assert len(trace.requests) == 3530 and len({one.root_session for one in trace.requests}) == 59
    assert len({one.session for one in trace.requests}) == 63 and trace.block_size == 4
    prompts = trace_block_paths(read_trace_path(RECORDED))
    hits = 1 - prompts.num_distinct / sum(map(len, prompts.paths))
    assert 0.955 < hits < 0.97  # published: 96 % of prompt blocks come back
    part = requests_from_trace(trace.first(300))
    records = SimulationConfig(SERIAL, 2).run_new_fleet(part).records
    assert len(records) == 300 and not any(one.record.error for one in records)
