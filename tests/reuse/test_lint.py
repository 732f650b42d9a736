"""The prefix doctor: names injected mistakes and their cost, blames no clean prompt, reads any body."""

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.cli.main import main
from headstart.reuse.causes import CAUSES
from headstart.reuse.log_report import lint_report
from headstart.reuse.logged_prompt import LoggedMessage, LoggedPrompt, parse_log
from headstart.reuse.miss_ratios import miss_ratios
from headstart.reuse.prompt_changes import compare_logged_prompts
from headstart.reuse.text_changes import text_changes
from headstart_lab.prompts.lint_rates import causes, clean_blamed, pair_rate, report, single_rates
from headstart_lab.prompts.prompt_mistakes import ENGINE_MISTAKES, MISTAKES, clean_log, in_place_log, log_with

RULES = "\n".join(f"Rule {name}: never leave the {name} open over night." for name in ("door", "safe", "gate", "well"))


def test_single_mistakes_are_named() -> None:
    rates = single_rates(5)
    assert set(rates) <= set(CAUSES) and min(rates.values()) >= 0.8 and sum(rates.values()) / len(rates) >= 0.95


def test_two_mistakes_are_named() -> None:
    assert pair_rate(1)[0] >= 0.85


def test_no_clean_prompt_is_blamed() -> None:
    blamed, num_prompts = clean_blamed(50)
    assert num_prompts >= 500 and blamed == 0


def test_timestamp_costs_the_text_behind_it() -> None:
    def body(time: str) -> dict[str, Any]:
        system = {"role": "system", "content": f"It is {time}.\n{RULES}"}
        return {"messages": [system, {"role": "user", "content": "Hi"}]}

    found = report([body("2026-11-23 11:17"), body("2026-11-23 11:18"), body("2026-11-24 09:00")])
    cost = found.causes[0].as_dict()
    assert [one.cause for one in found.causes] == ["timestamp"] and cost["requests"] == 2
    assert abs(cost["tokens_per_request"] - len(RULES) // 4) <= 16
    assert cost["example"]["field"] == "messages[0].content" and 6 <= cost["example"]["character"] <= 22
    assert found.avoidable_tokens == pytest.approx(2 * len(RULES) / 4, rel=0.2) and found.redundancy_factor > 2


def test_same_text_behind_the_timestamp_of_one_request_only_is_no_loss() -> None:
    one = {
        "messages": [{"role": "system", "content": f"It is 2026-11-23.\n{RULES}"}, {"role": "user", "content": "Hi"}]
    }
    found = report([one, one])
    assert not found.causes and found.reused_tokens > 0 and found.redundancy_factor == 1.0


def test_reasoning_that_the_answer_had_is_missed() -> None:
    question = {"role": "user", "content": RULES}
    answer = {"role": "assistant", "content": RULES, "reasoning_content": "Let me think about it for a while."}
    first = {"body": {"messages": [question]}, "response": {"choices": [{"message": answer}]}}
    back = [question, {"role": "assistant", "content": RULES}, {"role": "user", "content": "And then?"}]
    assert causes([first, {"body": {"messages": back}}]) == {"reasoning_stripped"}
    kept = [question, answer, {"role": "user", "content": "And then?"}]
    assert causes([first, {"body": {"messages": kept}}]) == set()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": f"It is 10:0{{}}.\n{RULES}\n{RULES.upper()}"},
        {"instructions": f"It is 10:0{{}}.\n{RULES}", "input": "Hi"},
        {
            "system": [{"type": "text", "text": f"It is 10:0{{}}.\n{RULES}"}],
            "messages": [{"role": "user", "content": "Hi"}],
        },
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": f"It is 10:0{{}}.\n{RULES}"}]}]},
    ],
)
def test_bodies_of_all_apis_are_read(body: dict[str, Any]) -> None:
    logs = [json.loads(json.dumps(body).replace("{}", digit)) for digit in "12345"]
    assert causes(logs) == {"timestamp"}


def test_report_is_plain_json_and_every_cause_has_a_remedy() -> None:
    found = report(log_with(["uuid", "tool_order"], 0))
    plain = json.loads(json.dumps(found.as_dict()))
    assert {one["cause"] for one in plain["causes"]} == {"uuid", "tool_order"}
    assert all(one["remedy"] for one in plain["causes"]) and {*MISTAKES, *ENGINE_MISTAKES} <= set(CAUSES)
    assert 0 < plain["avoidable_share"] < 1 and plain["prompt_tokens"] > plain["reused_tokens"]


# --------------------------------------------------------------------------------------------------------------- laws


def _lru_misses(prompts: list[list[int]], size: int) -> int:
    """Misses of an LRU cache of `size` blocks, used from the last block of each prompt to the first."""
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for prompt in prompts:
        for block in reversed(prompt):
            misses += block not in held
            held[block] = None
            held.move_to_end(block)
            while len(held) > size:
                held.popitem(last=False)
    return misses


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=8), min_size=1, max_size=12))
def test_miss_ratios_are_those_of_an_lru_cache(prompts: list[list[int]]) -> None:
    num_uses = sum(map(len, prompts))
    points = miss_ratios(prompts, 1)
    for point in points:
        assert point.miss_ratio == pytest.approx(_lru_misses(prompts, point.cache_tokens) / num_uses)
    assert points[-1].cache_tokens >= len({block for prompt in prompts for block in prompt})


TEXTS = st.lists(
    st.sampled_from(["a rule of the house", "\n", " ", "2026-11-23", "{", '"x": 1', "é", "東京"]), max_size=12
)


@settings(max_examples=300, deadline=None)
@given(TEXTS.map("".join), TEXTS.map("".join))
def test_equal_text_is_never_longer_than_the_text(this: str, that: str) -> None:
    found = text_changes(this, that)
    assert 0 <= found.num_before <= len(this) + 1 and found.total_same_chars <= len(this) + 1
    assert all(change.num_same >= 0 and change.kind in {*CAUSES, "other"} for change in found.changes)
    assert bool(found.changes) == (this != that)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS.map("".join)), max_size=5))
def test_a_prompt_differs_from_itself_in_nothing(messages: list[tuple[str, str]]) -> None:
    prompt = LoggedPrompt(1, ("{}",), tuple(LoggedMessage(role, text) for role, text in messages))
    assert compare_logged_prompts(prompt, prompt).changes == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["messages", "tools", "input", "prompt", "system", "response", "body", "role", "content"])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.dictionaries(KEYS, JSON | st.lists(st.dictionaries(KEYS, JSON, max_size=3), max_size=3)), max_size=4)
)
def test_any_json_is_read_or_skipped(bodies: list[Any]) -> None:
    found = parse_log([*map(json.dumps, bodies), "no json", "[1]", ""])
    assert len(found.prompts) + len(found.id_prompts) + found.num_skipped == len(bodies) + 2
    lint_report(found.prompts, found.num_skipped).as_dict()


# -------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, log_with(["timestamp"], 1))), encoding="utf-8")
    return path


def test_lint_prints_cost_remedy_and_place(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(log)]) == 0
    text = capsys.readouterr().out
    assert "timestamp:" in text and "mend:  a date or time: move it" in text and "messages[0].content" in text
    assert main(["lint", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"][0]["cause"] == "timestamp"


def test_lint_draws_a_picture(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["lint", str(log), "--plot", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_lint_refuses_a_file_without_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("{}\n")
    assert main(["lint", str(tmp_path / "empty")]) == 2 and main(["lint", str(tmp_path / "none")]) == 2
    assert "holds no request" in capsys.readouterr().err


def test_lint_of_a_clean_log_finds_nothing_and_loads_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "clean.jsonl"
    path.write_text("\n".join(map(json.dumps, clean_log(Random(3)))), encoding="utf-8")
    code = (
        "import sys; from headstart.cli.main import main; "
        f"code = main(['lint', {str(path)!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "No avoidable prefill was found." in done.stdout, done.stderr


def test_prompts_of_another_salt_share_nothing() -> None:
    def body(minute: int, salt: str) -> dict[str, Any]:
        system = {"role": "system", "content": f"It is 11:{minute}.\n{RULES}"}
        return {"messages": [system, {"role": "user", "content": "Hi"}], "cache_salt": salt}

    assert report([body(10, "a"), body(11, "a")]).causes
    found = report([body(10, "a"), body(11, "b"), body(10, "b")])
    assert not found.reused_tokens and [len(cost.costs) for cost in found.causes] == [1]


@pytest.mark.parametrize("cause", ENGINE_MISTAKES)
def test_lint_names_what_agents_and_engines_of_2026_do_to_prompts(cause: str) -> None:
    assert [{cost.cause for cost in report(log_with([cause], seed)).causes} for seed in range(3)] == [{cause}] * 3


def test_system_messages_and_token_counts_that_stay_in_place_are_not_blamed() -> None:
    assert not any(report(in_place_log(Random(f"clean {seed}"))).causes for seed in range(3))
