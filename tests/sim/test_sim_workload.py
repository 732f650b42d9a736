"""Workloads of simulations: traces, decision logs, synthetic traffic."""

import json
from pathlib import Path
from statistics import fmean, median

import pytest
from sim.fleets import BLOCK, fleet, profile, requests

from headstart.core.errors import ConfigError
from headstart.router.decision_log import DecisionRecord
from headstart.sim.sim_fleet import VirtualFleet
from headstart.sim.sim_workload import (
    SYNTHETIC,
    read_decision_log_requests,
    read_trace_requests,
    slice_and_rebase_requests,
    synthetic_requests,
)


def mooncake(path: Path) -> Path:
    rows = [
        {"timestamp": 1000 * i, "input_length": 1000, "output_length": 3 * i, "hash_ids": [0, 10 + i]} for i in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_window_of_a_trace_begins_at_zero_and_arrives_faster(tmp_path: Path) -> None:
    found = read_trace_requests(mooncake(tmp_path / "trace"), speed=2.0, skip=1, count=3)
    assert [(one.at, one.prompt_tokens, one.output_tokens, one.block_ids) for one in found] == [
        (0.0, 1000, 3, (0, 11)),
        (0.5, 1000, 6, (0, 12)),
        (1.0, 1000, 9, (0, 13)),
    ]
    assert read_trace_requests(tmp_path / "trace")[0].output_tokens == 1, "an answer has at least one token"


def test_texts_and_lengths_become_tokens(tmp_path: Path) -> None:
    texts = [
        {
            "timestamp": 1_700_000_000_000_000 + i,
            "input": "the same beginning " * 4 + str(i),
            "output": "abcd",
            "session_id": "s",
        }
        for i in (0, 1)
    ]
    (tmp_path / "agent").write_text("".join(json.dumps(row) + "\n" for row in texts))
    first, second = read_trace_requests(tmp_path / "agent")
    assert (
        first.session == "s"
        and first.prompt_token_ids()[:18] == second.prompt_token_ids()[:18]
        and first.prompt_token_ids() != second.prompt_token_ids()
    )
    (tmp_path / "azure").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    (one,) = read_trace_requests(tmp_path / "azure")
    assert (one.prompt_tokens, one.output_tokens, len(one.prompt_token_ids())) == (374, 44, 374)


def test_nothing_left_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none is left"):
        read_trace_requests(mooncake(tmp_path / "trace"), skip=5)
    with pytest.raises(ConfigError, match="--trace"):
        read_trace_requests(tmp_path / "nothing")


def test_decode_heavy_chat_is_what_it_says() -> None:
    found = synthetic_requests("decode-heavy", 14.0, 4000, seed=1)
    traffic = SYNTHETIC["decode-heavy"]
    assert found[-1].at == pytest.approx(4000 / 14, rel=0.1)
    assert {one.prompt_tokens for one in found} == {2048}
    assert median(one.output_tokens for one in found) == pytest.approx(403, rel=0.1)  # e ** 6
    assert fmean(one.output_tokens for one in found) == pytest.approx(665, rel=0.1)  # e ** 6.5
    groups = [one.block_ids[:3] for one in found]
    assert len(set(groups)) == traffic.groups
    counts = sorted((groups.count(one) for one in set(groups)), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.3), "Zipf's law"
    assert len({one.block_ids[3] for one in found}) == 4000, "the rest is each request's own"
    assert (
        found
        == synthetic_requests("decode-heavy", 14.0, 4000, seed=1)
        != synthetic_requests("decode-heavy", 14.0, 4000, seed=2)
    )


def test_hot_documents_come_in_bursts() -> None:
    found = synthetic_requests("hot-documents", 5.0, 240, seed=0)
    burst = SYNTHETIC["hot-documents"].burst
    for start in range(0, 240, burst):
        assert len({one.block_ids[:32] for one in found[start : start + burst]}) == 1


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode-heavy, hot-documents"):
        synthetic_requests("chat", 1.0, 10, 0)


def logged(found: VirtualFleet, path: Path) -> Path:
    """Run a fleet whose router writes a decision log."""
    lines: list[str] = []

    def log(record: DecisionRecord) -> None:
        lines.append(json.dumps(record.as_dict()) + "\n")

    found.routers[0]._log = log
    found.run(requests(4, 60))
    path.write_text("".join(lines))
    return path


def test_a_replayed_decision_log_shares_what_the_requests_shared(tmp_path: Path) -> None:
    first = fleet(2, profile(24))
    replayed = read_decision_log_requests(logged(first, tmp_path / "log"))
    asked = requests(4, 60)
    assert [one.prompt_tokens for one in replayed] == [one.prompt_tokens for one in asked]
    for number, (a, b) in enumerate(zip(replayed, asked, strict=True)):
        full = b.prompt_tokens // BLOCK
        assert a.id_size == BLOCK and len(a.block_ids) == -(-b.prompt_tokens // BLOCK)
        for c, d in zip(replayed[:number], asked[:number], strict=True):
            common = min(full, d.prompt_tokens // BLOCK)
            same = [x == y for x, y in zip(a.block_ids[:common], c.block_ids[:common], strict=True)]
            assert same == [x == y for x, y in zip(b.block_ids[:common], d.block_ids[:common], strict=True)]


def test_lines_that_are_no_decisions_are_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('\n{"at": 1}\n')
    with pytest.raises(ConfigError, match="line 2 is no decision"):
        read_decision_log_requests(tmp_path / "log")
    (tmp_path / "log").write_text("")
    with pytest.raises(ConfigError, match="no decisions"):
        read_decision_log_requests(tmp_path / "log")


def test_a_window_keeps_the_distances() -> None:
    asked = requests(1, 10)
    assert [one.at for one in slice_and_rebase_requests(asked, 4, 2)] == [0.0, pytest.approx(asked[5].at - asked[4].at)]
