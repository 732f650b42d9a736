"""Answers come back: whatever this server can send, cut anywhere, is accepted as history in every API and template."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import tokenizer_folders
from conversations import FOLDER, Shown, all_templates
from hypothesis import example, given, settings
from hypothesis import strategies as st
from real.smollm2 import UnreachableError
from server.harness import inside
from tools.scripted_engine import PROMPT, SCRIPT, build_scripted

from headstart.anthropic.message_events import CacheBreakpointSummary, MessageEventBuilder
from headstart.anthropic.messages_request import MessagesRequest, translate_messages_body
from headstart.ollama.ollama_answers import OllamaAnswerBuilder, RequestDurations
from headstart.ollama.ollama_request import translate_chat_body
from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_delta import ChatDelta, join_deltas
from headstart.openai.request_bodies import parse_chat
from headstart.openai.responses import CACHE_SOURCES
from headstart.openai.responses_api.response_events import ResponseEventBuilder
from headstart.openai.responses_api.response_objects import ResponseTemplate
from headstart.openai.responses_api.responses_request import parse_responses, responses_to_chat_request
from headstart.openai.text.generation import OutputDelta
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.call_arguments import parse_call_arguments
from headstart.openai.tools.chat_format import TOOL_FAMILIES
from headstart.openai.tools.parsers.call_writer import ToolCallRules
from headstart.openai.tools.parsers.chat_parser import ChatParser
from headstart.server.apis.choice_apis import message_fields

BOUNDS = RequestBounds(10**6, 4096)
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
CITY = json.dumps({"city": 'Pär"ís', "days": [1, 2.5], "deep": {"x": None, "ok": True}}, ensure_ascii=False)
NAMED, PARAMETERS = f'{{"name": "weather", "arguments": {CITY}}}', f'{{"name": "weather", "parameters": {CITY}}}'
HERMES = f"<tool_call>\n{NAMED}\n</tool_call>"
PYTHON = "[weather(city='Pär', days=[1, 2]), weather()]"
CODER = """<tool_call>
<function=weather>
<parameter=city>
Pär"ís
</parameter>
<parameter=days>
[1, 2.5]
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Pär"ís</arg_value>
<arg_key>days</arg_key>
<arg_value>[1, 2.5]</arg_value>
</tool_call>"""
ANSWERS = {  # by family: what its models write
    "hermes": (f"<think>\nÄ plan.\n</think>\n\nWait.\n{HERMES}\n{HERMES}", HERMES),
    "llama3_json": (f"{PARAMETERS}; {PARAMETERS}", f"Wait. <|python_tag|>{PARAMETERS}"),
    "mistral": (f"Wait. [TOOL_CALLS][{NAMED}, {NAMED}]", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{CITY}"),
    "pythonic": (PYTHON, f"Wait. <|python_start|>{PYTHON}<|python_end|>"),
    "qwen3_coder": (f"<think>\nÄ plan.\n</think>\n\nWait.\n{CODER}\n{CODER}", CODER),
    "glm45": (f"<think>Ä plan.</think>\nWait.\n{GLM}\n{GLM}", GLM),
}
USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "total_tokens": 2,
    "prompt_tokens_details": dict.fromkeys(
        ("cached_tokens", "cache_write_tokens", *(f"{source}_tokens" for source in CACHE_SOURCES)), 0
    ),
}
QUESTION = "How is the weather?"
Read = Callable[[ChatDelta, list[str]], list[dict[str, Any]]]


def parsed(family: str, text: str, *, is_forced: bool = False, step: int = 7) -> ChatDelta:
    """Return the answer that is cut behind `text`."""
    ids = (f"id{number:07d}" for number in count())
    rules = ToolCallRules(frozenset(("weather",)), lambda: next(ids), is_forced=is_forced)
    parser = ChatParser(TOOL_FAMILIES[family].read_calls, rules, is_reasoning=True)
    deltas = [parser.feed(text[at : at + step]) for at in range(0, len(text), step)]
    return join_deltas(*deltas, parser.finish(is_cut=True))


def of_chat(answer: ChatDelta, texts: list[str]) -> list[dict[str, Any]]:
    """Return the conversation that a client of the chat API continues."""
    message = {"role": "assistant", "content": answer.content, **message_fields(answer)}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(message.get("tool_calls", ()), texts, strict=False)
    ]
    sent = [{"role": "user", "content": QUESTION}, message, *results, {"role": "user", "content": "Go on."}]
    return parse_chat({"messages": sent}, BOUNDS).messages


def of_responses(answer: ChatDelta, texts: list[str]) -> list[dict[str, Any]]:
    """Return the conversation that a client of the Responses API continues, with a stored response or items."""
    events = ResponseEventBuilder(ResponseTemplate("resp_1", 1, "m", {}), generates=True)
    events.parts.add_delta(OutputDelta(text="x", token_ids=(1,), finish_reason="length", chat=answer))
    output = msgspec.json.decode(msgspec.json.encode(events.finished_response(USAGE)["output"]))
    calls = [item for item in output if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": text}
        for call, text in zip(calls, texts, strict=False)
    ]
    items = [{"role": "user", "content": QUESTION}, *output, *results, {"role": "user", "content": "Go on."}]
    body = {"input": items}
    return responses_to_chat_request(parse_responses(body, BOUNDS), body).to_chat_body(BOUNDS).messages


def of_messages(answer: ChatDelta, texts: list[str]) -> list[dict[str, Any]]:
    """Return the conversation that a client of the Messages API continues."""
    events = MessageEventBuilder("msg_1", "m", CacheBreakpointSummary())
    events.parts.add_delta(OutputDelta(text="x", token_ids=(1,), finish_reason="length", chat=answer))
    message = msgspec.json.decode(msgspec.json.encode(events.message(USAGE)))
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        for call, text in zip(calls, texts, strict=False)
    ]
    sent = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    return (
        translate_messages_body(MessagesRequest, {"messages": sent, "max_tokens": 1}, BOUNDS)
        .chat.to_chat_body(BOUNDS)
        .messages
    )


def of_ollama(answer: ChatDelta, texts: list[str]) -> list[dict[str, Any]]:
    """Return the conversation that a client of Ollama's API continues."""
    events = OllamaAnswerBuilder("m", 0, is_chat=True)
    events.add(OutputDelta(text="x", token_ids=(1,), finish_reason="length", chat=answer))
    message = msgspec.json.decode(msgspec.json.encode(events.whole(USAGE, RequestDurations(0, 0, 0))["message"]))
    results = [
        {"role": "tool", "tool_name": "weather", "content": text}
        for _, text in zip(message.get("tool_calls", ()), texts, strict=False)
    ]
    sent = [{"role": "user", "content": QUESTION}, message, *results, {"role": "user", "content": "Go on."}]
    return translate_chat_body({"messages": sent}, BOUNDS).to_chat_body(BOUNDS).messages


APIS = {"chat": of_chat, "responses": of_responses, "messages": of_messages, "ollama": of_ollama}
TEMPLATES: dict[str, Shown] = {}


def template(name: str) -> Shown:
    if name not in TEMPLATES:
        TEMPLATES[name] = Shown(FOLDER / f"{name}.jinja")
    return TEMPLATES[name]


CUTS = [
    (family, text[:end]) for family, texts in ANSWERS.items() for text in texts for end in range(0, len(text) + 1, 3)
]


class History(NamedTuple):
    """A conversation with an answer of ours. `shown`: what its prompt must contain."""

    messages: list[dict[str, Any]]
    shown: tuple[str, ...]


def history(read: Read, answer: ChatDelta, texts: list[str]) -> History:
    shown = (
        QUESTION,
        "Go on.",
        answer.content.strip(),
        *(["weather", *texts[: len(calls)]] if (calls := answer.tool_calls) else []),
    )
    return History(read(answer, texts), shown)


@cache
def histories(step: int) -> list[History]:
    """Return the answers that are cut at every step-th place, in every API; those that are read alike once."""
    found = {}
    for family, text in CUTS[::step]:
        answer = parsed(family, text)
        for texts in ([], ["Snow"], ["Snow", "Sun"]):
            for read in APIS.values():
                one = history(read, answer, texts)
                found.setdefault(re.sub(r"call\d+|id\d+", "id", repr(one.messages)), one)
    return list(found.values())


def check(shown: Shown, sent: Iterable[History]) -> None:
    for one in sent:
        prompt = shown.render(one.messages)
        assert [text for text in one.shown if text not in prompt] == [], (shown.name, one.messages)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_anywhere_is_history_in_every_api_and_template(name: str) -> None:
    check(template(name), histories(11))


@pytest.mark.long
def test_an_answer_that_was_cut_anywhere_is_history_in_every_template_of_llama_cpp() -> None:
    try:
        paths = sorted(all_templates().glob("*.jinja"))
    except UnreachableError as error:
        pytest.skip(str(error))
    for path in paths:
        if not path.stem.startswith("fireworks"):  # refuses every conversation without variables of its own
            check(Shown(path), histories(3))


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("family", ANSWERS)
def test_nothing_of_a_forced_call_is_content_wherever_it_is_cut(family: str, step: int) -> None:
    for text in ANSWERS[family]:
        text = text.partition("Wait.\n")[2] or text.removeprefix("Wait. ")
        for end in range(len(text) + 1):
            assert parsed(family, text[:end], is_forced=True, step=step).content == "", text[:end]


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("family", ANSWERS)
def test_behind_its_marker_nothing_of_a_call_that_was_cut_is_content(family: str, step: int) -> None:
    openers = {"llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "pythonic": "<|python_start|>"}
    opener = openers.get(family, "<tool_call>")
    for text in ANSWERS[family]:
        start = text.find(opener)
        for end in range(start + len(opener), len(text) + 1) if start >= 0 else ():
            assert parsed(family, text[:end], step=step).content.strip() in ("", "Wait."), text[:end]


def test_what_only_looks_like_a_call_stays_content() -> None:
    for family, text in [("hermes", "See <tool_call> tags"), ("llama3_json", '{"x": 1'), ("pythonic", "[1, 2")]:
        assert parsed(family, text).content == text
    assert parsed("hermes", "a <").content == "a <"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (None, {}),
        ("null", {}),
        ('"null"', {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("[1]", {"arguments": [1]}),
        ('"[1]"', {"arguments": [1]}),
        ("7", {"arguments": 7}),
        ("city Oslo", {"arguments": "city Oslo"}),
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "Par\\', {"city": "Par"}),
        ('{"city": "Par\\u00', {"city": "Par"}),
        ('{"city": "Paris", "da', {"city": "Paris", "da": None}),
        ('{"city": "Paris",', {"city": "Paris"}),
        ('{"city":', {"city": None}),
        ('{"city"', {"city": None}),
        ("{", {}),
        ('{"a": [1, {"b": tr', {"a": [1, {"b": "tr"}]}),
        ('{"a": -', {"a": "-"}),
        ('{"a": NaN}', {"a": "NaN"}),
        ('{"a": 1e999}', {"a": "Infinity"}),
        ('{"a": "x\ny\x01"}', {"a": "x\ny\x01"}),
        ('{"a": "\\ud800"}', {"a": "?"}),
        ('{"a": 1} trailing', {"arguments": '{"a": 1} trailing'}),
        ("[" * 100, {"arguments": "[" * 100}),
    ],
)
def test_arguments_of_any_form_are_an_object(text: Any, expected: dict[str, Any]) -> None:
    assert parse_call_arguments(text) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(0, 200))
@example("\ud800", 200)
def test_arguments_cut_anywhere_are_plain_json_and_whole_ones_stay(value: Any, end: int) -> None:
    found = parse_call_arguments(json.dumps(value)[:end])
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    if isinstance(value, dict) and "NaN" not in repr(found) and len(json.dumps(value)) <= end:
        assert found.keys() == {key.encode("utf-8", "replace").decode() for key in value}


def written(family: str, arguments: dict[str, Any]) -> str:
    """Return a call as a model of the family writes it."""
    text = json.dumps(arguments)
    if family == "hermes":
        return f'<tool_call>\n{{"name": "weather", "arguments": {text}}}\n</tool_call>'
    if family == "mistral":
        return f'[TOOL_CALLS][{{"name": "weather", "arguments": {text}}}]'
    if family == "llama3_json":
        return f'<|python_tag|>{{"name": "weather", "parameters": {text}}}'
    pairs = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()]
    if family == "glm45":
        inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
        return f"<tool_call>weather\n{inner}</tool_call>"
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function=weather>\n{inner}</function>\n</tool_call>"


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["hermes", "mistral", "llama3_json", "glm45", "qwen3_coder"]),
    st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=3),
    st.text(max_size=12),
    st.booleans(),
    st.integers(0, 300),
    st.sampled_from(NAMES),
)
def test_any_answer_cut_anywhere_is_history(
    family: str, calls: list[dict[str, Any]], content: str, thinks: bool, end: int, name: str
) -> None:
    """Texts and values at random, in every API: what a client was sent is accepted, and nothing of the rest is lost."""
    text = ("<think>\nHm.\n</think>\n\n" if thinks else "") + content
    text += "\n".join(written(family, arguments) for arguments in calls)
    answer = parsed(family, text.encode("utf-8", "replace").decode()[:end])
    check(template(name), [history(read, answer, ["Snow"]) for read in APIS.values()])


@pytest.mark.parametrize("api", APIS)
def test_an_answer_of_hundreds_of_calls_is_history(api: str) -> None:
    answer = parsed("hermes", "\n".join(written("hermes", {"city": f"city{number}"}) for number in range(300)))
    messages = history(APIS[api], answer, ["Snow"]).messages
    assert sum(len(message.get("tool_calls", ())) for message in messages) == 300


@pytest.mark.parametrize("arguments", ["", None, "null", '"null"', "[1]", '{"a": NaN}', '{"a": "\x01', {"a": 1}])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_any_arguments_is_rendered(name: str, arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    sent = [{"role": "user", "content": QUESTION}, {"role": "assistant", "tool_calls": [call]}]
    sent.append({"role": "tool", "tool_call_id": "c1", "content": "Snow"})
    prompt = template(name).render(parse_chat({"messages": sent}, BOUNDS).messages)
    assert "weather" in prompt and "Snow" in prompt


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_with_reasoning_only_is_history(name: str) -> None:
    message = {"role": "assistant", "content": "", **message_fields(ChatDelta(reasoning="Hm."))}
    assert message["content"] is None
    sent = [{"role": "user", "content": QUESTION}, message, {"role": "user", "content": "Go on."}]
    assert "Go on." in template(name).render(parse_chat({"messages": sent}, BOUNDS).messages)


@pytest.mark.parametrize("value", [None, "", '{"city": "Par', [1], {"city": "Oslo"}])
def test_messages_take_any_input_of_a_call(value: Any) -> None:
    block = {"type": "tool_use", "id": "c1", "name": "weather", "input": value}
    sent = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [block]}]
    read = translate_messages_body(MessagesRequest, {"messages": sent, "max_tokens": 1}, BOUNDS).chat.to_chat_body(
        BOUNDS
    )
    assert isinstance(read.messages[1]["tool_calls"][0]["function"]["arguments"], dict)


def test_a_message_keeps_the_arguments_of_a_call_that_was_cut() -> None:
    events = MessageEventBuilder("msg_1", "m", CacheBreakpointSummary())
    events.parts.add_delta(OutputDelta(finish_reason="length", chat=parsed("hermes", HERMES[: HERMES.index("ís")])))
    assert events.message(USAGE)["content"][0]["input"] == {"city": 'Pär"'}


def test_a_call_that_max_tokens_cut_comes_back_to_a_server(tmp_path: Path) -> None:
    """The answer as it was sent, in three APIs, and a stored response."""
    folder = tokenizer_folders.write(
        tmp_path / "model",
        tokenizer_folders.BYTE_LEVEL,
        chat_template=(FOLDER / "Qwen3-Coder.jinja").read_text(encoding="utf-8"),
        bos_token="<|im_start|>",
    )
    tokenizer = Tokenizer.from_folder(str(folder))
    tokens = list(tokenizer.encode(HERMES, add_special_tokens=False))
    num_tokens = len(tokenizer.encode(HERMES[: HERMES.index("ís")], add_special_tokens=False))
    (folder / SCRIPT).write_text(json.dumps(tokens), encoding="utf-8")
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    question, more = {"role": "user", "content": QUESTION}, {"role": "user", "content": "Go on."}

    async def run() -> None:
        options = {"tool_call_parser": "hermes"}
        async with inside(f"{folder}?vocab=1000&length=9000", build_scripted, **options) as server:

            async def ask(path: str, **body: Any) -> Any:
                answer = await server.client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            def prompt() -> str:
                sent = json.loads((folder / PROMPT).read_text(encoding="utf-8"))
                return tokenizer.decode(sent, skip_special_tokens=False)

            tools = {"tools": [{"type": "function", "function": function}]}
            chat = await ask("/v1/chat/completions", messages=[question], max_tokens=num_tokens, **tools)
            message = chat["choices"][0]["message"]
            assert message["tool_calls"][0]["function"]["arguments"].startswith('{"city": "P')
            await ask("/v1/chat/completions", messages=[question, message, more], max_tokens=1, **tools)
            assert "<parameter=city>\nP" in prompt() and "Go on." in prompt()

            tools = {"tools": [{"type": "function", **function}]}
            cut = await ask("/v1/responses", input=[question], max_output_tokens=num_tokens, **tools)
            assert cut["status"] == "incomplete" and cut["output"][0]["type"] == "function_call"
            await ask("/v1/responses", input=[more], previous_response_id=cut["id"], max_output_tokens=1, **tools)
            assert "<parameter=city>\nP" in prompt()
            await ask("/v1/responses", input=[question, *cut["output"], more], max_output_tokens=1, **tools)

            tools = {"tools": [{"name": "weather", "input_schema": function["parameters"]}]}
            whole = await ask("/v1/messages", messages=[question], max_tokens=num_tokens, **tools)
            assert whole["content"][0]["input"]["city"].startswith("P")
            answer = {"role": "assistant", "content": whole["content"]}
            await ask("/v1/messages", messages=[question, answer, more], max_tokens=1, **tools)
            assert "<parameter=city>\nP" in prompt()

    asyncio.run(run())
