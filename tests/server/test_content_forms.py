"""Contents reach a chat template as it would print them: text parts without added newlines, null, tools as sent."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from server.harness import inside
from server.test_chat_template import BLOCKS, LLAMA2, QWEN3, TRIMMED
from tokenizer_folders import BYTE_LEVEL, TEMPLATE, write

from headstart.anthropic.messages_request import MessagesRequest, translate_messages_body
from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_renderer import ChatRenderer
from headstart.openai.chat.chat_template import ChatTemplate
from headstart.openai.chat.template_forms import ONE_TEXT
from headstart.openai.engine_requests import encode_chat
from headstart.openai.request_bodies import parse_chat, parse_tokenize
from headstart.openai.responses_api.responses_request import parse_responses, responses_to_chat_request
from headstart.openai.tokenizer.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
# The shapes that published templates have: a macro for all contents, a loop for some roles, separators of their own.
MACRO = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% elif c is none %}<null>{% else %}{% for p in c %}"
    "{{ p.text if p.type == 'text' else p }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}{% endfor %}"
)
USER_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ p['text'] }} {% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
JOINING = (
    "{% for m in messages %}{{ m.content if m.content is string else m.content | map(attribute='text') | join(' ') }}"
    "{% endfor %}"
)
SPLIT = {"macro": MACRO, "joining": JOINING}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}, {"type": "text", "text": "three"}]


def bounds_of(source: str) -> RequestBounds:
    return RequestBounds(10**6, 4096, content_forms=ChatTemplate(source, NAMED).content_forms)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("source", [MACRO, JOINING, (FOLDER / "Mistral-Small-3.2-24B-Instruct-2506.jinja").read_text()])
def test_text_parts_are_printed_as_the_template_prints_them(source: str, role: str) -> None:
    template = ChatTemplate(source, NAMED)
    sent: list[dict[str, Any]] = [{"role": role, "content": PARTS}]
    if role == "assistant":
        sent = [{"role": "user", "content": "a"}, *sent]
    if role != "user":
        sent = [*sent, {"role": "user", "content": "b"}]
    ours = parse_chat({"messages": sent}, bounds_of(source)).messages
    assert template.render(ours) == expected_of(template, sent)


def expected_of(template: ChatTemplate, sent: list[dict[str, Any]]) -> str:
    """Return the rendered parts; rendered lines, if the template refuses the parts or drops some."""
    with suppress(InvalidRequestError):
        if "three" in (rendered := template.render(sent)):
            return rendered
    return template.render([{**m, "content": "one\ntwo \nthree"} if m["content"] is PARTS else m for m in sent])


@pytest.mark.parametrize("source", [TEMPLATE, LLAMA2, QWEN3, TRIMMED, BLOCKS])
def test_where_a_template_would_print_a_list_parts_are_lines(source: str) -> None:
    messages = parse_chat({"messages": [{"role": "user", "content": PARTS}]}, bounds_of(source)).messages
    assert messages[0]["content"] == "one\ntwo \nthree"


def test_separators_are_those_of_each_role() -> None:
    assert ChatTemplate(MACRO, NAMED).content_forms().separators == dict.fromkeys(
        ("system", "developer", "user", "assistant", "tool"), ""
    )
    assert ChatTemplate(USER_ONLY, NAMED).content_forms().separators == {}  # a blank behind the last part, too
    assert ChatTemplate(JOINING, NAMED).content_forms().separators["tool"] == " "
    assert ChatTemplate(LLAMA2, NAMED).content_forms().separators == {}


@pytest.mark.parametrize("source", [MACRO, TEMPLATE, "{{ 1 / 0 }}"])
def test_forms_are_the_same_through_the_process(source: str) -> None:
    renderer = ChatRenderer(source, NAMED)
    assert renderer.content_forms() == ChatTemplate(source, NAMED).content_forms()
    renderer.close()


@pytest.mark.parametrize("answer", ["", "[]", "[1, 2, 3]", '[{"user": 1}, "yes", 1]', '[{"user": "evil"}, 0, 0]'])
def test_an_answer_of_the_process_that_is_none_is_not_trusted(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(MACRO, NAMED)
    monkeypatch.setattr(renderer, "_ask", lambda request: answer)
    assert renderer.content_forms() == ONE_TEXT


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]


@pytest.mark.parametrize(
    ("source", "expected"), [(MACRO, None), (TEMPLATE, ""), ("{{ messages[1].content + '' }}", ""), (TRIMMED, "")]
)
def test_null_beside_calls_stays_null_where_the_template_takes_it(source: str, expected: str | None) -> None:
    assert parse_chat({"messages": CALLED}, bounds_of(source)).messages[1]["content"] == expected
    absent = [CALLED[0], {key: value for key, value in CALLED[1].items() if key != "content"}, CALLED[2]]
    assert parse_chat({"messages": absent}, bounds_of(source)).messages[1]["content"] == expected


def test_a_call_alone_is_the_same_in_all_three_apis() -> None:
    bounds = bounds_of(MACRO)
    chat = parse_chat({"messages": CALLED}, bounds).messages
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    fields = parse_responses({"input": items}, bounds)
    responses = responses_to_chat_request(fields, {"input": items}).to_chat_body(bounds).messages
    blocks = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7"}]},
    ]
    anthropic = (
        translate_messages_body(MessagesRequest, {"messages": blocks, "max_tokens": 1}, bounds)
        .chat.to_chat_body(bounds)
        .messages
    )
    assert chat == responses == anthropic


def test_results_of_several_parts_are_the_same_in_all_three_apis() -> None:
    bounds = bounds_of(MACRO)
    items = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{**part, "type": "input_text"} for part in PARTS]},
    ]
    fields = parse_responses({"input": items}, bounds)
    responses = responses_to_chat_request(fields, {"input": items}).to_chat_body(bounds).messages
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": PARTS}]},
    ]
    anthropic = (
        translate_messages_body(MessagesRequest, {"messages": blocks, "max_tokens": 1}, bounds)
        .chat.to_chat_body(bounds)
        .messages
    )
    assert responses[-1]["content"] == anthropic[-1]["content"] == "onetwo three"


TOOLS = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": True},
        {"name": "f", "parameters": {"type": "object"}, "strict": False},
    ],
)
def test_tools_are_shown_as_they_were_sent(function: dict[str, Any]) -> None:
    tool = {"type": "function", "function": function}
    tools = parse_chat({"messages": [{"role": "user", "content": "a"}], "tools": [tool]}, bounds_of(TOOLS)).params.tools
    assert tools is not None and tools.definitions == [tool]


def test_a_template_that_needs_parameters_gets_none_at_all_as_an_empty_object() -> None:
    source = "{% for t in tools or [] %}{% for n, p in t.function.parameters.properties | items %}{{ n }}{% endfor %}"
    source += "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "f"}}
    tools = parse_chat({"messages": CALLED[:1], "tools": [tool]}, bounds_of(source)).params.tools
    assert tools is not None
    assert tools.definitions[0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_lines_that_rules_move_do_not_touch_the_text_before_them() -> None:
    rules = frozenset({"billing_header", "request_ids"})
    bounds = RequestBounds(10**6, 4096, prompt_rules=rules, content_forms=ChatTemplate(MACRO, NAMED).content_forms)
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "Be brief."},
    ]
    sent = [{"role": "system", "content": system}, {"role": "user", "content": PARTS}]
    assert [m["content"] for m in parse_chat({"messages": sent}, bounds).messages] == ["Be brief.", "onetwo three"]


def test_prompts_and_tokenize_agree_and_a_tokenizer_knows_its_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, BYTE_LEVEL, chat_template=MACRO))
    bounds = RequestBounds(10**6, 4096, content_forms=tokenizer.content_forms)
    values = {"messages": [{"role": "user", "content": PARTS}]}
    prompt = encode_chat(parse_chat(values, bounds), tokenizer, bounds)
    assert tokenizer.decode(prompt) == "<user>onetwo three"
    assert (parse_tokenize(values, bounds).messages or [{}])[0]["content"] == "onetwo three"


def test_a_server_renders_parts_and_null_as_its_template_does(tmp_path: Path) -> None:
    called = "{% for c in m.tool_calls or [] %}({{ c.function.arguments }}){% endfor %}{% endfor %}"
    folder = write(tmp_path / "model", BYTE_LEVEL, chat_template=MACRO.removesuffix("{% endfor %}") + called)

    async def run() -> None:
        async with inside(str(folder)) as server:
            sent = [{"role": "user", "content": PARTS}, *CALLED[1:]]
            answer = await server.client.post("/tokenize", json={"messages": sent, "add_generation_prompt": False})
            text = (await server.client.post("/detokenize", json={"tokens": answer.json()["tokens"]})).json()["prompt"]
            assert text == "<user>onetwo three<assistant><null>({})<tool>7"
            chat = await server.client.post("/v1/chat/completions", json={"messages": sent, "max_tokens": 1})
            assert chat.json()["usage"]["prompt_tokens"] == answer.json()["count"]

    asyncio.run(run())
