"""Tool calls and reasoning through a real server: a scripted model writes what the last user message says."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizer_folders
from server.harness import inside, parse_events

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.engine_requests import chat_for_template, with_chat_output_format
from headstart.openai.generation_params import ParamsKind, parse_params
from headstart.openai.tokenizer.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"]
END = "<|im_end|>"
ECHO = "{{ messages[-1].content }}" + END + "{% if tools %}{% endif %}"  # the fake engine repeats its prompt
MARKS = {
    "hermes": "{# <tool_call> #}",
    "llama3_json": '{# <|start_header_id|> "parameters": #}',
    "mistral": "{# [TOOL_CALLS] #}",
    "pythonic": "{# <|python_start|> #}",
    "qwen3_coder": "{# <tool_call><function=<parameter= #}",
    "glm45": "{# <tool_call><arg_key> #}",
    "unknown": "",
}


class Chats:
    """Answers of a server whose model writes the given text."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def send(self, text: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        end = (await self.client.post("/tokenize", json={"prompt": END, "add_special_tokens": False})).json()
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 300, "stop_token_ids": end["tokens"]}
        return await self.client.post("/v1/chat/completions", json=body | fields)

    async def whole(self, text: str, **fields: Any) -> dict[str, Any]:
        response = await self.send(text, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    async def streamed(self, text: str, **fields: Any) -> dict[str, Any]:
        """The stream, joined to the form of a whole answer; checks the form of its deltas."""
        response = await self.send(text, stream=True, **fields)
        events = parse_events(response.text)
        assert events.pop() == "[DONE]"
        message: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        choices = [choice for event in events for choice in event["choices"]]
        for choice in choices:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for key in ("content", "reasoning"):
                message[key] = message.get(key, "") + delta.get(key, "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        return {"message": message | {"tool_calls": calls}, "finish_reason": choices[-1]["finish_reason"]}


async def check(chats: Chats, text: str, expected: "Expected", **fields: Any) -> None:
    """Sends the text whole and streamed."""
    whole, streamed = await chats.whole(text, **fields), await chats.streamed(text, **fields)
    for answer in (whole, streamed):
        message = answer["message"]
        calls = message.get("tool_calls", [])
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == expected.calls
        assert (message["content"] or "") == expected.content
        assert message.get("reasoning", "") == expected.reasoning
        assert answer["finish_reason"] == expected.finish_reason
        assert len({call["id"] for call in calls}) == len(calls)
        assert all(len(call["id"]) == expected.id_length and call["id"].isascii() for call in calls)
    if expected.calls and not expected.content:
        assert whole["message"]["content"] is None


class Expected:
    def __init__(self, *calls: tuple[str, Any], content: str = "", **others: Any) -> None:
        self.calls = list(calls)
        self.content = content
        self.reasoning: str = others.get("reasoning", "")
        self.finish_reason: str = others.get("finish_reason", "tool_calls" if calls else "stop")
        self.id_length: int = others.get("id_length", len("call_") + 24)


def serve(folder: Path, marks: str, scenario: Any, end: str = "", **options: Any) -> None:
    """Runs the scenario on a server; `end`: what the template writes behind the model's text."""
    template = ECHO + end + marks
    model = tokenizer_folders.write(
        folder / "model", tokenizer_folders.BYTE_LEVEL, chat_template=template, additional_special_tokens=SPECIAL
    )

    async def go() -> None:
        async with inside(f"{model}?vocab=1000", **options) as running:
            await scenario(Chats(running.client))

    asyncio.run(go())


PARIS, TIME = ("weather", {"city": "Pärís"}), ("clock", {})


def test_hermes(tmp_path: Path) -> None:
    one = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pärís"}}\n</tool_call>'
    two = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'

    async def scenario(chats: Chats) -> None:
        await check(chats, one, Expected(PARIS))
        await check(chats, f"I look.\n{one}\n{two}", Expected(PARIS, TIME, content="I look."))
        await check(chats, f"{one}\n{two}", Expected(PARIS), parallel_tool_calls=False)
        await check(chats, "No call.\n", Expected(content="No call.\n"))
        await check(chats, "<tool_call>{oops}</tool_call>", Expected(content="<tool_call>{oops}</tool_call>"))
        await check(chats, one, Expected(content=one), tool_choice="none")
        await check(chats, one, Expected(content=one), tools=[])
        named = {"type": "function", "function": {"name": "weather"}}
        await check(chats, one, Expected(PARIS, finish_reason="stop"), tool_choice=named)
        await check(chats, one + one, Expected(PARIS, finish_reason="stop"), tool_choice=named)
        await check(chats, one, Expected(PARIS), tool_choice="required")
        await check(chats, f"{one} and stop here", Expected(PARIS, content="and "), stop=["stop"])
        cut = await chats.whole(one, max_tokens=50)
        assert cut["finish_reason"] == "length"
        assert cut["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city')
        early = await chats.whole(f"Hm. {one}", max_tokens=24)  # in the name of the function
        assert early["message"]["content"] == "Hm." and "tool_calls" not in early["message"]

    serve(tmp_path, MARKS["hermes"], scenario)


def test_llama3_json(tmp_path: Path) -> None:
    one = '{"name": "weather", "parameters": {"city": "Pärís"}}'

    async def scenario(chats: Chats) -> None:
        await check(chats, one, Expected(PARIS))
        await check(chats, f"Hm. <|python_tag|>{one}", Expected(PARIS, content="Hm."))
        await check(chats, one + '; {"name": "clock", "parameters": {}}', Expected(PARIS, TIME))
        await check(chats, '{"name": "Bob"}', Expected(content='{"name": "Bob"}'))
        await check(chats, "<|python_tag|>search()", Expected(content="search()"))

    serve(tmp_path, MARKS["llama3_json"], scenario)


def test_mistral(tmp_path: Path) -> None:
    async def scenario(chats: Chats) -> None:
        array = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Pärís"}}, {"name": "clock"}]'
        await check(chats, array, Expected(PARIS, TIME, id_length=9))
        named = '[TOOL_CALLS]weather[ARGS]{"city": "Pärís"}[TOOL_CALLS]clock[ARGS]{}'
        await check(chats, f"Hm.{named}", Expected(PARIS, TIME, content="Hm.", id_length=9))
        await check(chats, "[TOOL_CALLS] oops", Expected(content=" oops"))

    serve(tmp_path, MARKS["mistral"], scenario)


def test_pythonic(tmp_path: Path) -> None:
    async def scenario(chats: Chats) -> None:
        await check(chats, "[weather(city='Pärís'), clock()]", Expected(PARIS, TIME))
        await check(chats, "<|python_start|>[clock()]<|python_end|>", Expected(TIME))
        await check(chats, "[weather(city=open('x'))]", Expected(content="[weather(city=open('x'))]"))

    serve(tmp_path, MARKS["pythonic"], scenario)


XML_PARIS = {
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nPärís\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pärís</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("family", XML_PARIS)
def test_arguments_as_elements(tmp_path: Path, family: str) -> None:
    one = XML_PARIS[family]

    async def scenario(chats: Chats) -> None:
        await check(chats, f"I look.\n{one}\n{one}", Expected(PARIS, PARIS, content="I look."))
        await check(chats, one, Expected(PARIS), stop=["</tool_call>"])
        await check(chats, "No </tool_call>", Expected(content="No "), stop=["</tool_call>"])
        await check(chats, one, Expected(content=one), tool_choice="none")
        cut = await chats.whole(one, max_tokens=len(one) - 20)
        assert cut["finish_reason"] == "length" and cut["message"]["content"] is None
        assert not cut["message"]["tool_calls"][0]["function"]["arguments"].endswith("}")

    serve(tmp_path, MARKS[family], scenario)


def test_reasoning_and_then_a_call(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "clock"}</tool_call>'

    async def scenario(chats: Chats) -> None:
        thought = "<think>\nWhich tööl?\n</think>\n\n"
        await check(chats, thought + call, Expected(TIME, reasoning="Which tööl?"))
        await check(chats, thought + "Noon.", Expected(content="Noon.", reasoning="Which tööl?"), tools=[])
        await check(chats, "Noon.", Expected(content="Noon."))
        unfinished = await chats.whole("<think>A long thought", max_tokens=10)
        assert unfinished["message"]["content"] is None and unfinished["finish_reason"] == "length"
        assert unfinished["message"]["reasoning_content"].startswith("A")

    serve(tmp_path, MARKS["hermes"] + "{# <think> #}", scenario)


def test_reasoning_that_the_prompt_opens_or_closes(tmp_path: Path) -> None:
    async def is_open(chats: Chats) -> None:
        await check(chats, "A thought.</think>Noon.", Expected(content="Noon.", reasoning="A thought."))
        await check(chats, "A thought.", Expected(reasoning="A thought."))

    async def is_closed(chats: Chats) -> None:
        await check(chats, "Noon.", Expected(content="Noon."))

    async def is_off(chats: Chats) -> None:
        await check(chats, "<think>A</think>Noon.", Expected(content="<think>A</think>Noon."))

    serve(tmp_path / "open", MARKS["hermes"], is_open, end="<think>\n")
    serve(tmp_path / "closed", MARKS["hermes"], is_closed, "<think>\n\n</think>\n\n", reasoning_parser="deepseek_r1")
    serve(tmp_path / "plain", MARKS["hermes"], is_open, reasoning_parser="deepseek_r1")
    serve(tmp_path / "off", MARKS["hermes"], is_off, end="<think>", reasoning_parser="none")


def test_tokens_and_logprobs_cover_the_whole_text(tmp_path: Path) -> None:
    text = 'Hm.<tool_call>{"name": "clock"}</tool_call>'

    async def scenario(chats: Chats) -> None:
        fields: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
        whole = await chats.whole(text, **fields)
        tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
        assert "".join(tokens) == text + END and len(whole["token_ids"]) == len(tokens)
        events = parse_events((await chats.send(text, stream=True, **fields)).text)[:-1]
        choices = [choice for event in events for choice in event["choices"]]
        parts = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert [entry["token"] for entry in parts] == tokens
        assert [i for choice in choices for i in choice.get("token_ids", [])] == whole["token_ids"]

    serve(tmp_path, MARKS["hermes"], scenario)


def test_a_model_of_no_known_family_answers_with_text(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>'

    async def unknown(chats: Chats) -> None:
        await check(chats, text, Expected(content=text))
        refused = await chats.send(text, tool_choice="required")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"

    async def chosen(chats: Chats) -> None:
        await check(chats, text, Expected(TIME))

    serve(tmp_path / "unknown", MARKS["unknown"], unknown)
    serve(tmp_path / "chosen", MARKS["unknown"], chosen, tool_call_parser="hermes")


def test_a_template_without_tools_gets_them_in_a_system_message_if_a_parser_is_chosen(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f", "description": "Does é."}}]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]

    async def go(model: str, parser: str) -> httpx.Response:
        async with inside(model, tool_call_parser=parser) as running:
            body = {"messages": messages, "tools": tools, "max_tokens": 1}
            chat = await running.client.post("/v1/chat/completions", json=body)
            response = await running.client.post("/tokenize", json={"messages": messages, "tools": tools})
            if response.status_code == 200:
                assert chat.json()["usage"]["prompt_tokens"] == response.json()["count"]
                tokens = {"tokens": response.json()["tokens"]}
                return await running.client.post("/detokenize", json=tokens)
            assert chat.status_code == response.status_code and chat.json() == response.json()
            return response

    model = tokenizer_folders.write(tmp_path / "model", tokenizer_folders.BYTE_LEVEL, chat_template=plain)
    refused = asyncio.run(go(str(model), "auto"))
    assert refused.status_code == 400 and "--tool-call-parser" in refused.json()["error"]["message"]
    text = asyncio.run(go(str(model), "hermes")).json()["prompt"]
    assert text.startswith("<system>Be brief.\n\nYou may call functions")
    assert '{"type": "function", "function": {"name": "f", "description": "Does é."' in text
    assert '<user>go<assistant><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><user>' in text
    assert text.endswith("<tool_response>\n5\n</tool_response>")


@pytest.mark.parametrize(
    ("tools", "part"),
    [
        ({}, "a list"),
        ([WEATHER] * 2, "twice"),
        ([WEATHER | {"function": {"name": "two words"}}], r"tools\[0\].function.name"),
        ([WEATHER | {"function": {"name": "x" * 129}}], r"tools\[0\].function.name"),
        ([WEATHER | {"function": {"name": "f", "parameters": []}}], "JSON schema"),
        ([WEATHER | {"function": {"name": "f", "parameters": {"type": "string"}}}], "object"),
        ([WEATHER | {"function": {"name": "f", "strict": 1}}], "strict"),
        ([WEATHER | {"function": {"name": "f", "description": 1}}], "description"),
        ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)], "512"),
    ],
)
def test_invalid_tools_are_refused(tools: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part) as caught:
        parse_params({"tools": tools}, RequestBounds(100, 100), ParamsKind.CHAT)
    assert (caught.value.param or "").startswith("tools")


def test_a_model_may_be_known_to_write_calls_that_its_template_does_not_mention() -> None:
    """SmolLM2: its template has no tools, and it was trained on those of Hermes."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    backend = tokenizer_folders.build(tokenizer_folders.BYTE_LEVEL)
    known = Tokenizer(backend, chat_template=template, tool_call_parser="hermes")
    plain = Tokenizer(backend, chat_template=template)
    bounds = RequestBounds(1000, 1000)
    params = parse_params({"tools": TOOLS, "tool_choice": "required"}, bounds, ParamsKind.CHAT)
    messages, tools, _ = chat_for_template([{"role": "user", "content": "go"}], params.tools, known, bounds)
    assert not tools and "<tool_call>" in messages[0]["content"] and "weather" in messages[0]["content"]
    chat = with_chat_output_format(params, known.encode("go"), known, bounds).chat
    assert chat is not None and chat.family is not None and chat.family.name == "hermes"
    for tokenizer, own in ((plain, bounds), (known, replace(bounds, tool_call_parser="none"))):
        with pytest.raises(InvalidRequestError, match="--tool-call-parser hermes"):
            chat_for_template([{"role": "user", "content": "go"}], params.tools, tokenizer, own)
