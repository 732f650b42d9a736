import json
from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart_lab.router.policy_traces import CASES, RouteConfig, run_route


def test_a_trace_of_block_ids_is_served_by_every_policy(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 40 * i, "input_length": 2568, "output_length": 4, "hash_ids": [0, *ids, 7]}
        for i in range(60)
        for ids in [[10 + i % 3, 50 + i % 3, 100 + i, 1000 + i]]
    ]
    (tmp_path / "trace").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = run_route(tmp_path / "trace", RouteConfig(replicas=2, speed=1.0, cache=64)).values
    for case in CASES:
        fewest, most = values[f"{case.label}.fewest_requests"], values[f"{case.label}.most_requests"]
        assert fewest + most == 60
        # Ray's keeps a prefix at its replica, whatever the load there; DualMap's until its first token is 5 s late.
        assert (fewest == 0) == (case.label in ("ray", "dualmap"))
        assert 0 < values[f"{case.label}.hit_rate"] < 0.6


def test_agent_texts_are_served_and_predicted(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 1_700_000_000_000_000 + i,
            "input": f"session {i % 3} " * 20 + "more " * (i // 3),
            "output": "x",
            "session_id": str(i % 3),
        }
        for i in range(30)
    ]
    (tmp_path / "trace").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = run_route(tmp_path / "trace", RouteConfig(replicas=2, cache=256)).values
    assert values["cost.hit_rate"] > 0.3
    assert values["cost.prediction_error_tokens"] <= values["cost_index_x4_uncorrected.prediction_error_tokens"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="no trace in a known format"):
        run_route(tmp_path / "trace", RouteConfig())


def test_a_trace_without_prefixes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    with pytest.raises(ConfigError, match="does not record shared prefixes"):
        run_route(tmp_path / "trace", RouteConfig())


def test_a_cache_that_is_too_small_for_the_longest_prompt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(
        '{"timestamp": 0, "input_length": 5120, "output_length": 4, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}\n'
    )
    with pytest.raises(ConfigError, match="never fits"):
        run_route(tmp_path / "trace", RouteConfig(cache=10))
