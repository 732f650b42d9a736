"""Traces as chains of full blocks, and overlapping sessions."""

import json

import pytest

from headstart.core.errors import ConfigError
from headstart.workload.block_paths import overlap_sessions, trace_block_paths
from headstart.workload.traces import Trace, parse_trace

AZURE = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,374,44"]


def mooncake(*rows: tuple[int, list[int]]) -> Trace:
    lines = [
        json.dumps({"timestamp": 1000 * at, "input_length": length, "output_length": 1, "hash_ids": ids})
        for at, (length, ids) in enumerate(rows)
    ]
    return parse_trace(lines)


def agents(*rows: tuple[float, str, str]) -> Trace:
    lines = [
        json.dumps({"timestamp": 1.7e15 + at * 1e6, "input": text, "output": "", "session_id": name})
        for at, name, text in rows
    ]
    return parse_trace(lines)


def test_only_full_blocks_count_and_what_is_not_cached_is_computed() -> None:
    prompts = trace_block_paths(mooncake((1000, [0, 1]), (1024, [0, 2]), (100, [3])))
    assert [list(path) for path in prompts.paths] == [[0], [0, 2], []]
    assert prompts.block_size == 512 and prompts.num_distinct == 2
    assert prompts.computed_tokens([0, 0, 0]) == 2124
    assert prompts.computed_tokens([0, 2, 0]) == 1000 + 1 + 100  # the last token of a cached prompt


def test_texts_share_blocks_as_long_as_they_are_equal() -> None:
    first, block = "a" * 64, "b" * 64
    prompts = trace_block_paths(agents((0, "x", first + block + "tail"), (1, "x", first), (2, "y", block + block)))
    assert [list(path) for path in prompts.paths] == [[0, 1], [0], [2, 3]]  # a block behind another prefix is another
    assert prompts.block_size == 16 and prompts.lengths == [33, 16, 32]


def test_a_trace_of_lengths_has_no_blocks_and_no_sessions() -> None:
    with pytest.raises(ConfigError, match="states no prompts"):
        trace_block_paths(parse_trace(AZURE))
    with pytest.raises(ConfigError, match="no sessions"):
        overlap_sessions(parse_trace(AZURE), 2)


def test_sessions_overlap_so_many_at_a_time_and_keep_their_pauses() -> None:
    rows = [(0, "x", "x0"), (1, "x", "x1"), (10, "y", "y0"), (13, "y", "y1"), (20, "z", "z0"), (21, "z", "z1")]
    found = overlap_sessions(agents(*rows), 2)
    assert [(row.at, row.text) for row in found.requests] == [
        *((0, "x0"), (0, "y0"), (1, "x1"), (1, "z0"), (2, "z1"), (3, "y1"))
    ]
    assert [row.at for row in overlap_sessions(agents(*rows), 1, stretch=2).requests] == [0, 2, 2, 8, 8, 10]
    same = [(at, f"agents/{name}", text) for at, name, text in rows]  # no sub-agents of one session
    assert [row.at for row in overlap_sessions(agents(*same), 2).requests] == [row.at for row in found.requests]
