"""Published chat templates in a real server, with a scripted model: the loop of an agent from question to answer.

The family is detected from the template; the script is what models of that family write.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizer_folders
from server.harness import inside, parse_events
from tools.scripted_engine import PROMPT, SCRIPT, build_scripted

from headstart.openai.tokenizer.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
CHAT, END = "/v1/chat/completions", "<|im_end|>"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}
CITY = json.dumps({"city": 'Pär"ís'}, ensure_ascii=False)
HERMES = "<tool_call>\n%s\n</tool_call>"
THOUGHT = "Ä plan.\n</think>\n\n"
NAMED = f'{{"name": "weather", "arguments": {CITY}}}'
ELEMENTS = '<tool_call>\n<function=weather>\n<parameter=city>\nPär"ís\n</parameter>\n</function>\n</tool_call>'
PAIRS = '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pär"ís</arg_value>\n</tool_call>'
CALLS = {  # of weather in Pär"ís, as the models of each template write them
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": HERMES % NAMED,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES % f'{{"arguments": {CITY}, "name": "weather"}}' + "\n",
    "Qwen-Qwen2.5-7B-Instruct": HERMES % NAMED,
    "Qwen-Qwen3-0.6B": f"<think>\n{THOUGHT}{HERMES % NAMED}",
    "Qwen-QwQ-32B": THOUGHT + HERMES % NAMED,
    "meta-llama-Llama-3.1-8B-Instruct": f'{{"name": "weather", "parameters": {CITY}}}',
    "meta-llama-Llama-3.2-3B-Instruct": f'<|python_tag|>{{"name": "weather", "parameters": {CITY}}}',
    "mistralai-Mistral-Nemo-Instruct-2407": f"[TOOL_CALLS][{NAMED}]",
    "Mistral-Small-3.2-24B-Instruct-2506": f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{CITY}",
    "Qwen3-Coder": ELEMENTS,
    "Qwen3.5-4B": THOUGHT + ELEMENTS,
    "GLM-4.6": f"<think>\n{THOUGHT}{PAIRS}",
    "GLM-4.7-Flash": THOUGHT + PAIRS.replace("\n", ""),
}
MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|eot_id|>", "[INST]", "[/INST]")


class Agent:
    """A client of a server whose model writes what the test says."""

    def __init__(self, client: httpx.AsyncClient, folder: Path) -> None:
        self._client, self._folder = client, folder
        self._tokenizer = Tokenizer.from_folder(str(folder))

    async def ask(self, messages: list[Any], text: str, **fields: Any) -> tuple[dict[str, Any], str]:
        """The choice if the model writes `text`, and the prompt; checks that the stream joins to the same message."""
        tokens = list(self._tokenizer.encode(text + END, add_special_tokens=False))
        (self._folder / SCRIPT).write_text(json.dumps(tokens), encoding="utf-8")
        body = {"messages": messages, "tools": [WEATHER], "max_tokens": 300, "stop_token_ids": tokens[-1:], **fields}
        body["chat_template_kwargs"] = {"enable_thinking": True}  # QwQ's template here does not think by default
        whole = await self._client.post(CHAT, json=body)
        assert whole.status_code == 200, whole.text
        prompt = json.loads((self._folder / PROMPT).read_text(encoding="utf-8"))
        choice = whole.json()["choices"][0]
        streamed = await self._client.post(CHAT, json={**body, "stream": True})
        message = _joined(parse_events(streamed.text)[:-1])
        assert message["content"] == (choice["message"]["content"] or "")
        assert message["reasoning"] == (choice["message"].get("reasoning_content") or "")
        calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        assert message["calls"] == [(call["name"], call["arguments"]) for call in calls]
        return choice, self._tokenizer.decode(prompt, skip_special_tokens=False)


def _joined(events: list[Any]) -> dict[str, Any]:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls: dict[int, tuple[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        name, arguments = calls.get(call["index"], ("", ""))
        function = call["function"]
        calls[call["index"]] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
    texts = {
        key: "".join(delta.get(field) or "" for delta in deltas)
        for key, field in (("content", "content"), ("reasoning", "reasoning_content"))
    }
    return {**texts, "calls": [*calls.values()]}


def serve(folder: Path, source: str, scenario: Any, **options: Any) -> None:
    model = tokenizer_folders.write(
        folder / "model",
        tokenizer_folders.BYTE_LEVEL,
        chat_template=source,
        bos_token="<|im_start|>",
        additional_special_tokens=[marker for marker in MARKERS if marker in source],
    )

    async def go() -> None:
        async with inside(f"{model}?vocab=1000&length=9000", build_scripted, **options) as running:
            await scenario(Agent(running.client, model))

    asyncio.run(go())


@pytest.mark.parametrize("name", CALLS)
def test_an_agent_asks_calls_a_tool_and_gets_an_answer(tmp_path: Path, name: str) -> None:
    question = {"role": "user", "content": "How is the weather?"}
    reasoning = "Ä plan." if "</think>" in CALLS[name] else ""
    before = CALLS[name].split("</think>")[0] + "</think>\n\n" if reasoning else ""

    async def scenario(agent: Agent) -> None:
        called, prompt = await agent.ask([question], CALLS[name])
        assert "Tells the weather." in prompt and "How is the weather?" in prompt
        assert called["finish_reason"] == "tool_calls" and not called["message"]["content"]
        assert (called["message"].get("reasoning_content") or "") == reasoning
        (call,) = called["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": call["function"]["arguments"]}
        assert json.loads(call["function"]["arguments"]) == json.loads(CITY)

        result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
        answered, later = await agent.ask([question, called["message"], result], before + "Take an umbrella, Zoë.")
        assert later.index("How is the weather?") < later.rindex("weather") < later.index("It rains.")
        assert answered["message"]["content"] == "Take an umbrella, Zoë." and answered["finish_reason"] == "stop"
        assert not answered["message"].get("tool_calls")

        text = "No call: " + CALLS[name].removeprefix(before)[:14]
        plain, _ = await agent.ask([question], before + text, tool_choice="none")
        assert plain["finish_reason"] == "stop" and not plain["message"].get("tool_calls")

    serve(tmp_path, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), scenario)


def test_without_tools_in_the_template_every_tool_choice_has_the_same_prompt_and_earlier_calls_stay(
    tmp_path: Path,
) -> None:
    """As SmolLM2's: the tools are shown in a system message, also if the model may not or need not call them."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    question = {"role": "user", "content": "How is the weather?"}

    async def scenario(agent: Agent) -> None:
        called, prompt = await agent.ask([question], HERMES % NAMED)
        for choice in ("none", "required", {"type": "function", "function": {"name": "weather"}}):
            assert (await agent.ask([question], HERMES % NAMED, tool_choice=choice))[1] == prompt
        (call,) = called["message"]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
        for fields in ({"tool_choice": "none"}, {"tools": None}):
            _, later = await agent.ask([question, called["message"], result], "Zoë.", **fields)
            assert "<assistant><tool_call>" in later and later.endswith("It rains.\n</tool_response><assistant>")
            assert later.startswith(prompt) == ("tools" not in fields)

    serve(tmp_path, template, scenario, tool_call_parser="hermes")
