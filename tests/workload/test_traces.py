from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart.workload.traces import TracedBlocks, TracedText, read_agents, read_mooncake

BLOCKS = """{"timestamp": 2500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7], "more": 1}
{"timestamp": 500, "input_length": 500, "output_length": 3, "hash_ids": [0]}
"""
TEXTS = """{"timestamp": 1000000, "input": "a", "output": "b", "session_id": "s"}
{"timestamp": 3500000, "input": "a b", "output": "", "session_id": "s"}
"""


def test_times_are_seconds_after_the_first_request(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text(BLOCKS)
    (tmp_path / "texts").write_text(TEXTS)
    assert read_mooncake(tmp_path / "blocks") == [TracedBlocks(0.0, 500, 3, (0,)), TracedBlocks(2.0, 600, 5, (0, 7))]
    assert read_agents(tmp_path / "texts") == [TracedText(0.0, "a", "b", "s"), TracedText(2.5, "a b", "", "s")]


def test_other_files_are_refused_with_the_line_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text(TEXTS)
    with pytest.raises(ConfigError, match=r"texts:1: .*another kind of trace"):
        read_mooncake(tmp_path / "texts")
    with pytest.raises(ConfigError, match="No such file"):
        read_agents(tmp_path / "nothing")
    (tmp_path / "empty").write_text("")
    assert read_mooncake(tmp_path / "empty") == []
