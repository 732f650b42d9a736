"""benchmarks/prompts: chats of recorded traces, and what rules mend in them."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headstart.bundled import bundled_intent_model_folder
from headstart_lab.prompts import agent_chats, agent_doctor, agent_replay, tool_order

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "tests" / "data" / "chat_templates" / "Qwen-Qwen3-0.6B.jinja"
THOUGHT = "The reader of lines stops at the last newline, so that a rest without one is lost; print what it returns."


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three sessions of six calls, two of them mixed by time, and one call that belongs to none."""
    rows: list[dict[str, Any]] = []
    for session in range(3):
        text = f"Issue {session}: the parser drops the last line of a file without a newline at its end."
        for call in range(6):
            rows.append({"timestamp": 10 * call + session, "session_id": "ab"[session % 2]})
            rows[-1] |= {"input": text, "output": f"Thought {call} of {session}: {THOUGHT}"}
            text += f"\n\nThe command printed {session * 100 + call} lines, none of them empty."
    rows.append({"timestamp": 5, "session_id": "c", "input": "Alone.", "output": ""})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_calls_are_put_together_by_the_beginnings_of_their_inputs(trace: Path) -> None:
    chats = list(agent_chats.recorded_chats(trace))
    assert sorted(len(chat) for chat in chats) == [6, 6, 6]
    bodies = agent_chats.bodies_of(chats[0], Random(1), agent_chats.agent(Random(2)))
    for before, body in pairwise(bodies):
        assert body["messages"][: len(before["messages"])] == before["messages"]
    assert bodies[1]["messages"][2]["content"] == chats[0][0].output


def test_the_doctor_is_right_on_the_chats_of_a_trace(trace: Path) -> None:
    found = agent_doctor.measure(list(agent_chats.recorded_chats(trace)), 6, 1)
    assert found["clean_prompts"] == 18 and found["clean_prompts_blamed"] == 0
    assert found["one_mistake"]["share"] >= 0.95 and found["two_mistakes"]["share"] >= 0.85


@pytest.mark.parametrize("case", ["billing header first", "tools shuffled", "schemas serialized anew"])
def test_a_rule_brings_the_computed_tokens_back_to_those_of_clean_prompts(trace: Path, case: str) -> None:
    own = agent_chats.agent(Random(2))
    chats = [agent_chats.bodies_of(chat[:3], Random(1), own) for chat in agent_chats.recorded_chats(trace)]

    def computed(name: str, *, on: bool) -> int:
        mistake, rules = agent_replay.CASES[name]
        found = agent_replay.replay(bundled_intent_model_folder(), TEMPLATE, chats, mistake, rules if on else ())
        return found["computed_tokens"]

    clean = computed("none", on=False)
    assert computed(case, on=True) <= 1.02 * clean < 2 * clean < computed(case, on=False)


def test_distances_of_samples_are_compared_with_those_of_shuffled_samples() -> None:
    same, other = [["a", "b"] * 8], [["a"] * 14 + ["b"] * 2]
    assert tool_order.distance(same, same) == 0.0 and tool_order.distance(same, other) == pytest.approx(0.375)
    assert tool_order.p_value(same, same, Random(1))[1] == 1.0
    assert tool_order.p_value(same, [["c"] * 16], Random(1))[1] < 0.01
