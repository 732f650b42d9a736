"""System messages in mid-conversation and counts of the tokens left: positions stay, and prompts extend each other."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conversations import FOLDER, Shown
from server.harness import inside
from tokenizer_folders import BYTE_LEVEL, write
from typer.testing import CliRunner

from headstart.cli.main import app
from headstart.gateway.proxy.request_reader import RequestParser, SenderRoutingInfo
from headstart.openai.canonical.canonical_body import CHAT, MESSAGES, RESPONSES, canonical_body, canonicalize_log_line
from headstart.openai.canonical.canonical_messages import inline_system_messages
from headstart.openai.canonical.prompt_rules import RULES_HEADER
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.reuse.causes import KINDS, classify_difference
from headstart.reuse.log_report import lint_report
from headstart.reuse.logged_prompt import parse_log

INLINE, COUNTS = frozenset({"inline_system"}), frozenset({"token_counts"})
GEMMA = (FOLDER / "google-gemma-2-2b-it.jinja").read_text(encoding="utf-8")
MOVING = (  # collects all system messages in front, as several published templates do
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = ns.s + m.content %}"
    "{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SENT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "system", "content": "In French."},
    {"role": "user", "content": "Bye"},
]


def rewritten(path: str, body: dict[str, Any], rules: frozenset[str], forms: Any = None) -> tuple[Any, dict[str, int]]:
    found = canonical_body(path, json.dumps(body).encode(), body, rules, forms)
    again = canonical_body(path, found.data, json.loads(found.data), rules, forms)
    assert again.data == found.data, "the rules are idempotent"
    return json.loads(found.data), dict(found.applied)


def test_the_rule_inlines_in_bodies_of_three_apis() -> None:
    chat, applied = rewritten(CHAT, {"messages": SENT}, INLINE)
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant", "user", "user"]
    assert applied == {"inline_system": 1}
    items = [{"role": "developer", "content": "Be brief."}, *SENT[1:]]
    responses, _ = rewritten(RESPONSES, {"input": items}, INLINE)
    assert [item["role"] for item in responses["input"]] == ["developer", "user", "assistant", "user", "user"]
    messages, _ = rewritten(MESSAGES, {"system": "x", "messages": SENT[1:]}, INLINE)
    assert [message["role"] for message in messages["messages"]] == ["user", "assistant", "user", "user"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_bodies_without_such_messages_stay_the_same_bytes(path: str) -> None:
    body = {("input" if path == RESPONSES else "messages"): SENT[1:3]}
    data = json.dumps(body).encode()
    assert canonical_body(path, data, body, INLINE | COUNTS).data is data


@pytest.mark.parametrize("name", ["google-gemma-2-2b-it", "Mistral-Small-3.2-24B-Instruct-2506"])
def test_the_rule_joins_turns_where_the_template_is_known_to_demand_it(name: str) -> None:
    shown = Shown(FOLDER / f"{name}.jinja")
    counts: Counter[str] = Counter()
    found = inline_system_messages(SENT, shown.forms, counts, leads=True)
    assert found[-1] == {"role": "user", "content": "In French.\n\nBye"}
    shown.template.render([dict(message) for message in found])
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in SENT]
    joined = inline_system_messages(parts, shown.forms, counts, leads=True)[-1]["content"]
    assert "".join(part["text"] for part in joined) == "In French.\n\nBye"


def test_the_rule_leaves_what_the_template_shows() -> None:
    forms = Shown(FOLDER / "Qwen-Qwen2.5-7B-Instruct.jinja").forms
    assert inline_system_messages(SENT, forms, Counter(), leads=True) == SENT
    developer = [*SENT[:3], {"role": "developer", "content": "In French."}]
    assert inline_system_messages(developer, forms, Counter(), leads=True)[-1]["role"] == "user"


def test_counts_of_tokens_left_are_dropped_wherever_they_are() -> None:
    count = "<total_tokens>12,345 tokens left</total_tokens>"
    for text, expected in [
        (f"Hi\n{count}", "Hi"),
        (f"{count}\nHi", "Hi"),
        (f"Hi\n{count}\nBye", "Hi\nBye"),
        ("Hi <system_warning>Token usage: 5/9; 4 remaining</system_warning>", "Hi"),
        ("<total_tokens>5 tokens left\n", "\n"),
        ("There are 5 tokens left.", "There are 5 tokens left."),
    ]:
        body, applied = rewritten(CHAT, {"messages": [{"role": "user", "content": text}, SENT[1]]}, COUNTS)
        assert (body["messages"][0]["content"] if body["messages"][1:] else "") == expected.lstrip("\n") or not applied
    alone, applied = rewritten(CHAT, {"messages": [*SENT, {"role": "system", "content": count}]}, COUNTS)
    assert alone["messages"] == SENT and applied == {"token_counts": 1}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": f"Snow\n{count}"}]}
    body, _ = rewritten(MESSAGES, {"messages": [{"role": "user", "content": [result]}]}, COUNTS)
    assert body["messages"][0]["content"][0]["content"] == [{"type": "text", "text": "Snow"}]
    items = [{"type": "function_call_output", "call_id": "c", "output": f"Snow\n{count}"}]
    assert rewritten(RESPONSES, {"input": items}, COUNTS)[0]["input"][0]["output"] == "Snow"


def turns(rng: random.Random) -> list[list[dict[str, Any]]]:
    """The requests of an agent that sends a reminder, and the count of tokens left, in each turn; old counts go."""
    history: list[dict[str, Any]] = [SENT[0]]
    requests: list[list[dict[str, Any]]] = []
    for turn in range(6):
        reminder = {"role": "system", "content": f"Reminder {turn}."}
        asked = {"role": "user", "content": f"Question {turn}?"}
        history = [*history, *([reminder] if turn and rng.random() < 0.7 else []), asked]
        count = f"<total_tokens>{9000 - 100 * turn} tokens left</total_tokens>"
        requests.append([*history[:-1], {**asked, "content": f"{asked['content']}\n\n{count}"}])
        history = [*history, {"role": "assistant", "content": f"Answer {turn}."}]
    return requests


@pytest.mark.parametrize("source", [GEMMA, MOVING], ids=["gemma", "moving"])
def test_each_turn_extends_the_one_before_at_the_server_and_through_a_router(tmp_path: Path, source: str) -> None:
    folder = write(tmp_path / "model", BYTE_LEVEL, chat_template=source)
    reader = RequestParser(Tokenizer.from_folder(str(folder)), INLINE | COUNTS)
    requests = turns(random.Random(5))

    async def run() -> None:
        async with inside(str(folder), prompt_rule=("token_counts",)) as server:

            async def tokens(messages: Any) -> list[int]:
                body = {"messages": messages, "add_generation_prompt": False}
                answer = await server.client.post("/tokenize", json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()["tokens"]

            last: list[int] = []
            for messages in requests:
                found = await tokens(messages)
                assert found[: len(last)] == last
                read = reader.read(CHAT, json.dumps({"messages": messages}).encode(), SenderRoutingInfo())
                routed = json.loads(bytes(read.body))["messages"]
                assert await tokens(routed) == found
                last = found
            text = (await server.client.post("/detokenize", json={"tokens": last})).json()["prompt"]
            assert text.index("Question 0") < text.index("Reminder") < text.index("Question 5")
            assert "total_tokens" not in text

    asyncio.run(run())


def test_three_apis_place_it_alike_and_say_so_in_header_and_metrics(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", BYTE_LEVEL, chat_template=GEMMA)
    bodies = {
        CHAT: {"messages": SENT, "max_tokens": 2},
        RESPONSES: {"instructions": "Be brief.", "input": SENT[1:], "max_output_tokens": 2},
        MESSAGES: {"system": "Be brief.", "messages": SENT[1:], "max_tokens": 2},
    }

    async def run() -> None:
        async with inside(str(folder)) as server:
            counts: set[int] = set()
            for path, body in bodies.items():
                answer = await server.client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                assert answer.headers[RULES_HEADER] == "inline_system=2, joined_turns=2"
                usage = answer.json()["usage"]
                counts.add(
                    usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
                )
            assert len(counts) == 1
            metrics = (await server.client.get("/metrics")).text
            (line,) = [one for one in metrics.splitlines() if 'rule="inline_system"' in one and "prompt_rules" in one]
            assert line.endswith(" 3.0")

    asyncio.run(run())


RULES = "You are a careful agent. Keep to these rules, all of them, and answer briefly. " * 20


def causes(lines: list[str]) -> set[str]:
    found = parse_log(lines)
    prompts, num_skipped = found.prompts, found.num_skipped
    return {one.cause for one in lint_report(prompts, num_skipped).causes}


def test_the_doctor_names_both_causes_and_a_rule_can_be_tried_on_a_log(tmp_path: Path) -> None:
    def line(count: int, system: str = RULES) -> str:
        text = f"<total_tokens>{count} tokens left</total_tokens>\n{RULES}"
        return json.dumps({"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]})

    counted = [line(9000 - 100 * turn) for turn in range(5)]
    assert causes(counted) == {"token_count"}
    assert causes([canonicalize_log_line(one, COUNTS) for one in counted]) == set()
    grown = [line(1, RULES + "".join(f"\nReminder {n}: be brief." for n in range(turn))) for turn in range(5)]
    assert causes(grown) == {"system_grown"}
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(counted), encoding="utf-8")
    runner = CliRunner()
    assert "token_counts" in runner.invoke(app, ["lint", str(log)]).stdout
    tried = json.loads(runner.invoke(app, ["lint", str(log), "--json", "--prompt-rule", "token_counts"]).stdout)
    assert tried["causes"] == []
    assert runner.invoke(app, ["lint", str(log), "--prompt-rule", "nothing"]).exit_code != 0


def test_an_explanation_names_both_kinds() -> None:
    def text(system: str, count: int) -> str:
        return f"<system>\n{system}\n<user>\nHi <total_tokens>{count} tokens left</total_tokens>"

    for this, that, kind in [
        (text("Be brief.", 8123), text("Be brief.", 9004), "token_count"),
        (text("Be brief.\nIn French.", 5), text("Be brief.", 5), "system_grown"),
        (text("Be kind.", 5), text("Be brief.", 5), "system_prompt"),
    ]:
        at = next(index for index, (one, other) in enumerate(zip(this, that, strict=False)) if one != other)
        assert classify_difference(this, that, at, is_chat=True) == kind and KINDS[kind]
