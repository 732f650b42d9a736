"""The eviction lab: redundancy of each policy beside the bound."""

import json
from pathlib import Path

import pytest

from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.core.errors import ConfigError
from headstart_lab.cache.eviction_replay import EvictionConfig, run_eviction


def trace_of(folder: Path, *prompts: list[int]) -> Path:
    path = folder / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_redundancy_counts_tokens_and_is_compared_with_the_bound(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1], [2], [3], [1], [2])
    report = run_eviction(trace, EvictionConfig(pools=(70.0, 100.0), trace_block_size=512))
    small, whole = report.values["pools"]
    assert report.values["distinct_blocks"] == 3 and report.values["infinite_hit_tokens"] == 2 * 511
    assert small["pool_blocks"] == 2 and small["bound"] == round((4 * 512 + 1) / (3 * 512 + 2), 4)
    assert small["redundancy"]["lru"] == round(5 * 512 / (3 * 512 + 2), 4)
    assert small["over_bound"]["lru"] == round(5 * 512 / (4 * 512 + 1), 4)
    assert whole["bound"] == 1.0 and set(whole["over_bound"].values()) == {1.0}
    assert set(small["redundancy"]) == set(EVICTION_POLICIES) and not report.problems


def test_overlapping_sessions_need_sessions_and_a_readable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sessions"):
        run_eviction(trace_of(tmp_path, [1]), EvictionConfig(at_once=2, trace_block_size=512))
    with pytest.raises(ConfigError, match="--trace"):
        run_eviction(tmp_path / "none.jsonl")
