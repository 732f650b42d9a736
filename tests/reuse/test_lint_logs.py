"""Logs of other engines in `headstart lint`: LiteLLM's and vLLM's, byte order marks, other encodings, ids."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cli.main import main
from headstart.openai.canonical.nonces import nonce_rule_of_prompt_line
from headstart.reuse.log_report import find_costly_differences, id_trace_report, lint_report
from headstart.reuse.logged_prompt import (
    CUT,
    NOT_STORED,
    REDACTED,
    VLLM_HIDDEN,
    IdTracePrompt,
    parse_log,
    parse_log_line,
    split_rendered_prompt,
)
from headstart_lab.prompts.lint_rates import report
from headstart_lab.prompts.prompt_mistakes import clean_log, log_with

BODIES = log_with(["timestamp"], 1)
RULES = "\n".join(f"Rule {name}: never leave the {name} open over night." for name in ("door", "safe", "gate", "well"))


def litellm_payload(body: dict[str, Any]) -> dict[str, Any]:
    """Payload of LiteLLM 1.110 for a logging callback, with the fields that a reader could confuse with a body."""
    parameters = {key: value for key, value in body.items() if key not in ("messages", "model")}
    answer = {"choices": [{"message": {"role": "assistant", "content": "Fine."}}]}
    return {
        "id": "chatcmpl-1",
        "call_type": "acompletion",
        "startTime": 1.5,
        "model": "m",
        "metadata": {"user_api_key_alias": None},
        "messages": body["messages"],
        "response": answer,
        "model_parameters": parameters,
        "hidden_params": {},
    }


def spend_row(body: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": "r", "messages": "{}", "proxy_server_request": json.dumps(body), "response": "{}"}


def json_record(body: dict[str, Any]) -> dict[str, Any]:
    message = "Request received by LiteLLM:\n" + json.dumps(body)
    return {"message": message, "level": "DEBUG", "timestamp": "2026-11-26T10:00:00", "component": "LiteLLM Proxy"}


FORMS = {
    "payload": litellm_payload,
    "payload in kwargs": lambda body: {"kwargs": {}, "standard_logging_object": litellm_payload(body)},
    "messages as text": lambda body: {**litellm_payload(body), "messages": json.dumps(body["messages"])},
    "spend logs": spend_row,
    "spend logs with the whole request": lambda body: {"proxy_server_request": {"url": "u", "body": body}},
    "json logs": json_record,
    "datadog": lambda body: {"ddsource": "litellm", "message": json.dumps(litellm_payload(body)), "status": "info"},
}


@pytest.mark.parametrize("form", FORMS)
def test_litellm_logs_give_the_report_of_the_bodies(form: str) -> None:
    found = parse_log([json.dumps(FORMS[form](body)) for body in BODIES])
    assert len(found.prompts) == len(BODIES) and not found.num_skipped and not found.notes
    assert [prompt.text for prompt in found.prompts] == [prompt.text for prompt in parse_log(BODIES).prompts]
    assert [cost.cause for cost in lint_report(found.prompts).causes] == ["timestamp"]


def test_answers_and_texts_of_litellm_are_read() -> None:
    (found,) = parse_log([litellm_payload(BODIES[0])]).prompts
    assert found.answer is not None and found.answer.content == "Fine." and found.tools
    (text,) = parse_log(
        [{"messages": "Once upon a time", "model_parameters": {}, "call_type": "atext_completion"}]
    ).prompts
    assert text.messages[0].content == "Once upon a time"
    (passed,) = parse_log(
        [{"messages": {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}, "model_parameters": {}}]
    ).prompts
    assert [message.role for message in passed.messages] == ["system", "user"]


def test_what_litellm_has_removed_or_cut_is_told() -> None:
    row = {**spend_row(BODIES[0]), "proxy_server_request": "{}"}
    hidden = litellm_payload({"messages": [{"role": "user", "content": "redacted-by-litellm"}]})
    cut = litellm_payload(
        {"messages": [{"role": "user", "content": "abc... (litellm_truncated skipped 9 chars. x) ...def"}]}
    )
    found = parse_log([row, row, hidden, cut])
    assert found.notes == {NOT_STORED: 2, REDACTED: 1, CUT: 1} and len(found.prompts) == 1 and found.num_skipped == 3


def test_other_records_of_a_json_log_are_no_requests() -> None:
    """LiteLLM puts the fields of a request into records of every step of its work."""
    step = {**BODIES[0], "message": "get_available_deployment for ...", "level": "DEBUG", "component": "LiteLLM Router"}
    own = {"message": "sent a request", "level": "info", "timestamp": "now", "body": BODIES[0]}
    found = parse_log([json.dumps(step), json.dumps(json_record(BODIES[0])), json.dumps(own)])
    assert [prompt.line for prompt in found.prompts] == [2, 3]


# ---------------------------------------------------------------------------------------------------------------- vLLM


def chatml(body: dict[str, Any]) -> str:
    turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in body["messages"]]
    return "".join(turns) + "<|im_start|>assistant\n"


def vllm_new(number: int, prompt: str | None, ids: list[int] | None) -> list[str]:
    """Two lines of vLLM 0.11 and later: the prompt is logged at debug level only."""
    head = "(APIServer pid=7) {} 11-26 10:00:0{} [logger.py:47] "
    return [
        head.format("DEBUG", number % 10)
        + f"Request chatcmpl-{number} details: prompt: {prompt!r}, prompt_token_ids: {ids}, prompt_embeds shape: None.",
        head.format("INFO", number % 10)
        + f"Received request chatcmpl-{number}: params: SamplingParams(n=1, stop=['prompt: x']), lora_request: None.",
        'INFO: 127.0.0.1:5000 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    ]


def vllm_old(number: int, prompt: str | None, ids: list[int] | None) -> list[str]:
    return [
        f"INFO 06-01 10:00:00 [logger.py:41] Received request chatcmpl-{number}: prompt: {prompt!r}, "
        f"params: SamplingParams(n=1, stop=[]), prompt_token_ids: {ids}, prompt_embeds shape: None, lora_request: None."
    ]


@pytest.mark.parametrize("version", [vllm_old, vllm_new])
def test_vllm_logs_are_split_into_messages_and_their_causes_are_named(version: Any) -> None:
    lines = [line for number, body in enumerate(BODIES) for line in version(number, chatml(body), None)]
    found = parse_log(lines)
    assert len(found.prompts) == len(BODIES) and not found.notes
    assert [one.role for one in found.prompts[0].messages] == ["system", "user"]
    assert [cost.cause for cost in lint_report(found.prompts).causes] == ["timestamp"]
    clean = [line for number, body in enumerate(clean_log(Random(3))) for line in version(number, chatml(body), None)]
    assert not lint_report(parse_log(clean).prompts).causes


def test_vllm_without_debug_level_is_told_how_to_log_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for number in range(3) for line in vllm_new(number, "x", None)[1:]]
    assert parse_log(lines).notes == {VLLM_HIDDEN: 3}
    (tmp_path / "vllm.log").write_text("\n".join(lines))
    assert main(["lint", str(tmp_path / "vllm.log")]) == 2
    assert "VLLM_LOGGING_LEVEL=DEBUG" in capsys.readouterr().err


@pytest.mark.parametrize("version", [vllm_old, vllm_new])
def test_token_ids_of_vllm_are_reported_by_ids(
    version: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[*range(100), *range(1000 + 50 * number, 1050 + 50 * number)] for number in range(4)]
    lines = [line for number, ids in enumerate(prompts) for line in version(number, None, ids)]
    found = parse_log(lines)
    assert [list(one.ids) for one in found.id_prompts] == prompts and not found.prompts
    (tmp_path / "log").write_text("\n".join(lines))
    assert main(["lint", str(tmp_path / "log"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["by"], told["prompt_tokens"], told["reused_tokens"]) == ("ids", 600, 3 * 96)
    assert told["causes"] is None and told["avoidable_tokens"] is None


@pytest.mark.parametrize("limit", [100, 0], ids=["cut", "whole"])
def test_prompts_that_vllm_has_cut_are_told(limit: int) -> None:
    """With --max-log-len, all long prompts end at one length."""
    texts = [f"{RULES} {'and so on' * number}" for number in range(5)]
    lines = [
        line
        for number, text in enumerate(texts)
        for line in vllm_new(number, (text + "x" * number)[: limit or None], None)
    ]
    notes = parse_log(lines).notes
    assert [note for note in notes if "--max-log-len" in note] == list(notes)
    assert len(notes) == 0  # what is equal up to the cut is one prompt
    lines = [
        line
        for number, text in enumerate(texts)
        for line in vllm_new(number, f"{number} {text}"[: limit or None], None)
    ]
    assert list(parse_log(lines).notes.values()) == ([5] if limit else [])
    ids = [
        line for number in range(4) for line in vllm_new(number, None, [number, *range(40 if limit else 40 + number)])
    ]
    assert any("41 tokens" in note for note in parse_log(ids).notes) == bool(limit)


QUOTES = st.text(st.sampled_from("a'\"\\\n\tü\u2028, prompt_token_ids: [1]<|im_start|>"), max_size=30)


@given(QUOTES)
def test_any_rendered_prompt_is_read_back_whole(prompt: str) -> None:
    for lines in (vllm_old(1, prompt, [1, 2]), vllm_new(1, prompt, None)):
        entry = parse_log_line(lines[0])
        assert "".join(one["content"] for one in entry.value["messages"]) in (prompt, entry_text(prompt))


def entry_text(prompt: str) -> str:
    return "".join(one["content"] for one in split_rendered_prompt(prompt))


@pytest.mark.parametrize(
    ("prompt", "roles"),
    [
        ("<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n", ["system", "user"]),
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nB<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            ["system", "system", "user"],
        ),
        ("<bos><start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n", ["system", "user"]),
        ("[gMASK]<sop><|system|>\nA<|user|>\nB<|assistant|>\n<think></think>\n", ["system", "system", "user"]),
        ("Once upon a time", ["user"]),
    ],
)
def test_marks_of_known_templates_split_a_prompt(prompt: str, roles: list[str]) -> None:
    found = split_rendered_prompt(prompt)
    assert [one["role"] for one in found] == roles
    assert "B" in found[-1]["content"] or len(found) == 1


# -------------------------------------------------------------------------------------------------------- bytes, forms


def written(path: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    path.write_bytes(data)
    assert main(["lint", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_marks_and_forms_of_files_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(json.dumps(body, ensure_ascii=False) for body in BODIES)
    plain = written(tmp_path / "log", lines.encode(), capsys)
    assert plain["requests"] == len(BODIES) and not plain["skipped_lines"]
    forms = {
        "mark": b"\xef\xbb\xbf" + lines.encode(),
        "a mark in the middle": lines.replace("\n", "\n\ufeff", 1).encode(),
        "UTF-16": lines.encode("utf-16"),
        "CRLF": lines.replace("\n", "\r\n").encode(),
        "a JSON list": json.dumps(BODIES).encode(),
        "a list over many lines": json.dumps(BODIES, indent=1).encode(),
    }
    for name, data in forms.items():
        assert written(tmp_path / "log", data, capsys) == plain, name


def test_separators_of_unicode_do_not_end_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = [{"prompt": f"It is 10:0{digit}.\u2028{RULES}\x85"} for digit in "123"]
    lines = "\n".join(json.dumps(body, ensure_ascii=False) for body in bodies)
    assert written(tmp_path / "log", lines.encode(), capsys)["requests"] == 3


def test_other_bytes_are_counted_and_their_place_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(json.dumps({"prompt": f"Café {digit}\n{RULES}"}, ensure_ascii=False) for digit in "123")
    data = lines.encode("latin-1")
    told = written(tmp_path / "log", data, capsys)
    assert told["requests"] == 3 and not told["skipped_lines"]
    assert f"byte {data.index(0xE9)} (line 1)" in told["notes"][0] and told["notes"][0].startswith("3 requests")


# ------------------------------------------------------------------------------------------------------------- the rule


def billed(number: int) -> dict[str, Any]:
    head = f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch=0{number:04x};"
    system = [{"type": "text", "text": head}, {"type": "text", "text": RULES}]
    return {"system": system, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("x-anthropic-billing-header: cc_version=2.1.{}; cch={};", "billing_header"),
        ("traceparent: 00-4bf92f3577b34da6a3ce929d0e0e47{}-00f067aa0ba902{}-01", "trace_headers"),
        ("Request ID: req_0a1b2c3d{}{}", "request_ids"),
        ("The weather of today is number {} of {}.", ""),
    ],
)
def test_the_rule_that_mends_is_named(line: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = [line.format(number, 3 * number) for number in (31, 42, 57)]
    bodies = [
        {"messages": [{"role": "system", "content": f"{head}\n{RULES}"}, {"role": "user", "content": "Hi"}]}
        for head in heads
    ]
    told = written(tmp_path / "log", "\n".join(map(json.dumps, bodies)).encode(), capsys)
    (cause,) = told["causes"]
    assert cause["rules"] == ([rule] if rule else [])
    assert main(["lint", str(tmp_path / "log")]) == 0
    assert (f"--prompt-rule {rule}" in capsys.readouterr().out) == bool(rule)


def test_the_diagnosis_of_one_request_names_the_rule_for_a_block_of_its_own() -> None:
    this, that = parse_log([billed(4001), billed(3992)]).prompts
    found = find_costly_differences(this, [that], nonce_rule_of_prompt_line)
    assert found and all(one.rule == "billing_header" for one in found)
    assert "tokens: --prompt-rule billing_header, on the server" in found[0].text
    assert not find_costly_differences(this, [that])[0].rule


# ---------------------------------------------------------------------------------------------------------------- ids


def test_the_report_of_ids_says_what_is_continued_and_what_is_left() -> None:
    paths = [[1, 2], [1, 2, 3], [1, 9, 9, 9], [1, 2, 3, 4]]
    sessions = ["a", "a", "a", "b"]
    prompts = [
        IdTracePrompt(line, ids, 64 * len(ids) - 3, 64, session=session)
        for line, (ids, session) in enumerate(zip(paths, sessions, strict=True), 1)
    ]
    found = id_trace_report(prompts)
    assert found.prompt_tokens == 64 * 13 - 12 and found.num_sessions == 2
    full = [ids[:-1] for ids in paths]  # the last block is not full
    assert found.reused_tokens == 64 * sum([0, 1, 1, 2]) == 64 * (len(full[0]) + 1 + 2)
    assert found.own_tokens == 64 * 2 and found.num_continued == 1
    assert [(leave.line, leave.against, leave.at, leave.tokens) for leave in found.leaves] == [(3, 2, 64, 128)]


def test_bodies_are_reported_as_before() -> None:
    assert report(BODIES).num_requests == len(BODIES)
