"""Lines of replicas in the router's log."""

import json

from headstart.gateway.replicas.replica_child import label_output_line


def test_json_lines_of_a_replica_stay_json_and_have_its_name_as_a_field() -> None:
    line = json.dumps({"ts": "2026-11-26T00:00:00Z", "level": "info", "event": "stats", "text": "\u00e9"})
    named = label_output_line("r0", line)
    assert json.loads(named) == {**json.loads(line), "replica": "r0"} and "\n" not in named


def test_other_lines_have_it_in_front() -> None:
    for line in ("headstart: SIGTERM", "{not JSON", "  KV  up to 1 GiB", '["a"]'):
        assert label_output_line("r1", line) == f"[r1] {line}"
