"""Rules for prompts: equal prompts in other forms become equal; others stay as they are; answers say which applied."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.harness import Server, fake_server

from headstart.config.options import PROMPT_RULES, ServerOptions, check_option_values
from headstart.core.errors import ConfigError
from headstart.openai.bounds import RequestBounds
from headstart.openai.canonical.canonical_body import CHAT, MESSAGES, RESPONSES, canonical_body
from headstart.openai.canonical.canonical_messages import KEEPING_VARIABLES, canonical_messages, canonicalize_json_text
from headstart.openai.canonical.prompt_rules import PLACEMENT_TEXTS, RULE_TEXTS, RULES_HEADER
from headstart.openai.canonical.stable_tools import sorted_schema, sorted_tools, tool_name_of
from headstart.openai.request_bodies import parse_chat

ALL = frozenset(RULE_TEXTS) - {"keep_reasoning"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};\n"
RULES = "You are a careful agent. Keep to these rules, all of them, and answer briefly."


def tool(name: str, flipped: bool = False) -> dict[str, Any]:
    properties: dict[str, Any] = {"city": {"type": "string"}, "unit": {"enum": ["c", "f"], "type": "string"}}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": ["city", "unit"]}
    if flipped:
        schema = {
            "required": ["unit", "city"],
            "properties": {"unit": {"type": "string", "enum": ["c", "f"]}, "city": {"type": "string"}},
            "type": "object",
        }
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": schema}}


def rewritten(path: str, body: dict[str, Any], rules: frozenset[str] = ALL) -> tuple[dict[str, Any], dict[str, int]]:
    found = canonical_body(path, json.dumps(body).encode(), body, rules)
    assert json.loads(found.data) == json.loads(json.dumps(found.values))
    again = canonical_body(path, found.data, json.loads(found.data), rules)
    assert again.data == found.data, "the rules are idempotent"
    return json.loads(found.data), dict(found.applied)


def test_options_list_every_rule_and_refuse_others() -> None:
    assert set(PROMPT_RULES) == set(RULE_TEXTS)
    check_option_values(ServerOptions(prompt_rule=("tools", "dates")))
    with pytest.raises(ConfigError, match="choose one of tools"):
        check_option_values(ServerOptions(prompt_rule=("tool",)))
    with pytest.raises(ConfigError, match="both"):
        check_option_values(ServerOptions(prompt_rule=("drop_reasoning", "keep_reasoning")))


def test_tools_are_sorted_by_name_unless_one_has_none() -> None:
    tools = [tool("b"), {"name": "a"}]
    assert sorted_tools(tools, tool_name_of) == tools[::-1]
    assert sorted_tools([tool("b"), {"type": "web_search"}, tool("a")], tool_name_of)[0] == tool("b")


def test_schemas_have_one_key_order_and_keep_lists_and_data() -> None:
    assert json.dumps(sorted_schema(tool("a"))) == json.dumps(sorted_schema(tool("a", flipped=True)))
    schema = {"properties": {"required": {"type": "array"}, "a": {"default": {"required": ["z", "b"]}}}, "enum": [2, 1]}
    found = sorted_schema(schema)
    assert found == schema and list(found["properties"]) == ["a", "required"]


def test_json_keeps_numbers_as_written_and_other_texts() -> None:
    assert canonicalize_json_text('{"b": 1.10, "a": [123456789012345678901.5, true]}') == (
        '{"a":[123456789012345678901.5,true],"b":1.10}'
    )
    for text in ("plain", '{"a": 1, "a": 2}', '{"a": NaN}', "[1, 2", "7"):
        assert canonicalize_json_text(text) == text


def test_nonces_are_dropped_and_ids_moved_behind_the_last_message() -> None:
    system = BILLING.format("eb6c6") + f"X-Request-ID: 7f\n{RULES}\nRequest ID: 3f2b8c11-77\nSession: open\n"
    counts: Counter[str] = Counter()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
    found = canonical_messages(messages, ALL, counts)
    assert found == [
        {"role": "system", "content": f"{RULES}\nSession: open\n"},
        {"role": "user", "content": "Hi\n\nRequest ID: 3f2b8c11-77"},
    ]
    assert counts == {"billing_header": 1, "trace_headers": 1, "request_ids": 1, "dates": 0}


def test_dates_are_counted_and_never_changed() -> None:
    body = {"messages": [{"role": "system", "content": f"Today is 2026-11-23, 16:20. {RULES} Since 2019-01-02."}]}
    data = json.dumps(body).encode()
    found = canonical_body(CHAT, data, body, ALL)
    assert found.data is data and found.applied == (("dates", 2),)


@pytest.mark.parametrize("rule", sorted(ALL - {"dates"}))
def test_each_rule_changes_its_own_mistake_only(rule: str) -> None:
    content = "<think>Hm.</think>Yes."
    system = BILLING.format("1") + "traceparent: 00-ab-cd-01\nrequest_id: 12345678\n" + RULES
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": system},
            {"role": "assistant", "content": content, "reasoning_content": "Hm."},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "a", "arguments": '{"x": "y'}}]},
            {"role": "tool", "content": '{"b": 1, "a": 2}'},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Go on.\n<total_tokens>9 tokens left</total_tokens>"},
        ],
        "tools": [tool("b", flipped=True), tool("a")],
    }
    found, applied = rewritten(CHAT, body, frozenset({rule}))
    assert set(applied) == {rule} and found != body
    _, rest = rewritten(CHAT, found, ALL)
    assert set(rest) == ALL - {rule, "dates"}


def test_bodies_of_the_other_apis_are_changed_alike() -> None:
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
    header = {"type": "text", "text": BILLING.format("2")}
    body: dict[str, Any] = {
        "system": [header, {"type": "text", "text": f"{RULES}\nrequest_id: 12345678"}],
        "messages": [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": '{"b": 1, "a": 2}'}]},
        ],
        "tools": [{"name": "b", "input_schema": {}}, {"name": "a", "input_schema": {}}],
    }
    found, applied = rewritten(MESSAGES, body)
    assert found["system"] == [{"type": "text", "text": f"{RULES}\n"}]
    assert found["messages"][0]["content"] == blocks[1:]
    last = found["messages"][1]["content"]
    assert last[0]["content"] == '{"a":2,"b":1}' and last[1] == {"type": "text", "text": "\nrequest_id: 12345678"}
    assert [one["name"] for one in found["tools"]] == ["a", "b"]
    assert set(applied) == ALL - {"schemas", "trace_headers", "dates", "token_counts", "inline_system", "plain_items"}

    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call_output", "call_id": "c", "output": "[1 , 2]"},
    ]
    found, applied = rewritten(RESPONSES, {"instructions": BILLING.format("3") + RULES, "input": items, "tools": None})
    assert found == {
        "instructions": RULES,
        "input": [{"type": "function_call_output", "call_id": "c", "output": "[1,2]"}],
        "tools": None,
    }
    assert applied == {"json": 1, "drop_reasoning": 1, "billing_header": 1}


def test_reasoning_is_kept_by_templates_that_can_unless_the_client_decides() -> None:
    keep = frozenset({"keep_reasoning"})
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    found, applied = rewritten(CHAT, body, keep)
    assert found["chat_template_kwargs"] == KEEPING_VARIABLES and applied == {"keep_reasoning": 1}
    sent = body | {"chat_template_kwargs": {"clear_thinking": True, "own": 1}}
    found, _ = rewritten(CHAT, sent, keep)
    assert found["chat_template_kwargs"] == {**KEEPING_VARIABLES, "clear_thinking": True, "own": 1}
    params = parse_chat(sent, RequestBounds(256, 4096, prompt_rules=keep)).params
    assert dict(params.template_options) == {**KEEPING_VARIABLES, "clear_thinking": True, "own": 1}
    assert params.applied_rules == (("keep_reasoning", 1),)
    _, applied = rewritten(CHAT, found, keep)
    assert applied == {}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": f"{BILLING} is not in a system prompt"}], "top": 1.10},
        {"messages": "none", "tools": {"a": 1}},
        {"messages": [1, None], "tools": [1, None], "system": 3, "input": [2]},
        {"messages": [{"role": "assistant", "content": "Plain."}, {"role": "tool", "content": "no JSON"}]},
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/completions"])
def test_a_body_that_no_rule_changes_stays_the_same_bytes(path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body, indent=1).encode()
    assert canonical_body(path, data, body, ALL).data is data


# ------------------------------------------------------------------------------------------------------- on a server


@pytest.fixture(scope="module")
def ruled(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("ruled") / "log"
    options: dict[str, Any] = {"prompt_rule": sorted(ALL), "tool_call_parser": "hermes"}
    with fake_server(f"{folder}?step=0.001&length=4096", log, **options) as running:
        yield running


def _bodies(number: int) -> dict[str, dict[str, Any]]:
    """The same request with one of two nonces and orders, for each API."""
    flipped = bool(number % 2)
    tools = [tool("a", flipped), tool("b", not flipped)]
    tools = tools[::-1] if flipped else tools
    system, asked = BILLING.format(f"{number:05x}") + RULES, [{"role": "user", "content": "Hi"}]
    functions = [one["function"] for one in tools]
    return {
        CHAT: {"messages": [{"role": "system", "content": system}, *asked], "tools": tools, "max_tokens": 2},
        RESPONSES: {
            "instructions": system,
            "input": asked,
            "tools": [{"type": "function", "strict": False, **one} for one in functions],
            "max_output_tokens": 2,
            "store": False,
        },
        MESSAGES: {
            "model": json.dumps(None),
            "system": system,
            "messages": asked,
            "tools": [
                {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
                for one in functions
            ],
            "max_tokens": 2,
        },
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_requests_that_differ_by_nonce_and_order_have_one_prompt(
    ruled: Server, server: Server, path: str, stream: bool
) -> None:
    name = ruled.get("/v1/models").json()["data"][0]["id"]
    bodies = [_bodies(number)[path] | {"stream": stream} for number in (2, 3)]
    bodies = [body | {"model": name} if "model" in body else body for body in bodies]
    answers = [ruled.post(path, json=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    headers = [dict(part.split("=") for part in a.headers[RULES_HEADER].split(", ")) for a in answers]
    assert headers[0] == {"schemas": "2", "billing_header": "1"}
    assert headers[1] == {"tools": "1", "schemas": "2", "billing_header": "1"}
    if path == CHAT:
        prompts = [ruled.post("/tokenize", json={k: body[k] for k in ("messages", "tools")}).json() for body in bodies]
        assert prompts[0]["tokens"] == prompts[1]["tokens"]


def test_a_server_without_rules_changes_nothing_and_says_nothing(server: Server) -> None:
    body = {"messages": _bodies(2)[CHAT]["messages"], "max_tokens": 2}
    answer = server.post(CHAT, json=body)
    assert answer.status_code == 200 and RULES_HEADER not in answer.headers
    tokens = server.post("/tokenize", json={"messages": body["messages"], "return_token_strs": True}).json()
    assert "billing" in "".join(tokens["token_strs"])


def test_metrics_count_requests_by_rule(ruled: Server) -> None:
    before = _counts(ruled)
    assert set(before) == set(RULE_TEXTS | PLACEMENT_TEXTS)
    ruled.post(CHAT, json=_bodies(5)[CHAT])
    changed = {name: count - before[name] for name, count in _counts(ruled).items() if count != before[name]}
    assert changed == {"tools": 1, "schemas": 1, "billing_header": 1}


def _counts(server: Server) -> dict[str, float]:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith("headstart:prompt_rules_t")]
    return {line.partition('rule="')[2].partition('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
