"""LiteLLM as a library: chats through its openai, hosted_vllm and anthropic providers, and its responses."""

import json
from functools import partial
from typing import Any, Literal

import checks
import litellm
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from pydantic import BaseModel

litellm.num_retries = 0
litellm.telemetry = False
ASKED: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SENTENCE}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": WEATHER}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 21]


def options(provider: str, url: str, name: str) -> dict[str, Any]:
    base = url if provider == "anthropic" else f"{url}/v1"
    return {"model": f"{provider}/{name}", "api_base": base, "api_key": "none", "max_tokens": 200}


def text(servers: Servers, provider: str) -> None:
    chosen = options(provider, servers.bundled, BUNDLED)
    assert litellm.completion(messages=ASKED, **chosen).choices[0].message.content == LABEL
    parts = [
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=ASKED, stream=True, **chosen)
    ]
    assert "".join(parts) == LABEL and len(parts) > 2


def tools(servers: Servers, provider: str) -> None:
    chosen = {**options(provider, servers.scripted, SCRIPTED), "tools": [TOOL]}
    messages: Any = [{"role": "user", "content": "Weather in both cities? Please think."}]
    message = litellm.completion(messages=messages, **chosen).choices[0].message
    assert message.reasoning_content.strip() == "I look it up." and len(message.tool_calls) == 2
    messages.append(message)
    for call in message.tool_calls:
        output = checks.weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    assert litellm.completion(messages=messages, **chosen).choices[0].message.content == f"{REPORT}Rome."
    chunks = list(litellm.completion(messages=messages[:1], stream=True, **chosen))
    built = litellm.stream_chunk_builder(chunks)
    assert len(built.choices[0].message.tool_calls) == 2, built


def schema(servers: Servers, provider: str) -> None:
    chosen = options(provider, servers.bundled, BUNDLED)
    answer = litellm.completion(messages=ASKED[1:], response_format=Weather, **chosen)
    Weather.model_validate_json(answer.choices[0].message.content)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    strict = {**WEATHER, "parameters": Weather.model_json_schema()}
    answer = litellm.completion(
        messages=ASKED[1:], tools=[{"type": "function", "function": strict}], tool_choice=named, **chosen
    )
    [call] = answer.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)


def check_openai_text(servers: Servers) -> None:
    text(servers, "openai")


def check_openai_tools(servers: Servers) -> None:
    tools(servers, "openai")


def check_openai_schema(servers: Servers) -> None:
    schema(servers, "openai")


def check_hosted_vllm_text(servers: Servers) -> None:
    text(servers, "hosted_vllm")


def check_hosted_vllm_tools(servers: Servers) -> None:
    tools(servers, "hosted_vllm")


def check_hosted_vllm_schema(servers: Servers) -> None:
    schema(servers, "hosted_vllm")


def check_anthropic_text(servers: Servers) -> None:
    text(servers, "anthropic")


def check_anthropic_tools(servers: Servers) -> None:
    tools(servers, "anthropic")


def check_anthropic_schema(servers: Servers) -> None:
    schema(servers, "anthropic")


def check_responses(servers: Servers) -> None:
    common = {"model": f"openai/{BUNDLED}", "api_base": f"{servers.bundled}/v1", "api_key": "none"}
    done = litellm.responses(input=SENTENCE, instructions=SYSTEM, **common)
    assert done.output[0].content[0].text == LABEL
    events = list(litellm.responses(input=SENTENCE, instructions=SYSTEM, stream=True, **common))
    assert events[-1].type == "response.completed"
    common = {"model": f"openai/{SCRIPTED}", "api_base": f"{servers.scripted}/v1", "api_key": "none"}
    tool: Any = {"type": "function", **WEATHER}
    first = litellm.responses(input="Weather in Paris?", tools=[tool], **common)
    [call] = [item for item in first.output if item.type == "function_call"]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": checks.weather("Paris")}
    last = litellm.responses(input=[output], tools=[tool], previous_response_id=first.id, **common)
    assert last.output[0].content[0].text == f"{REPORT}Paris."


def check_overflow(servers: Servers) -> None:
    """A prompt beyond the context: five of five providers and APIs know what it is."""
    question, server = "again and again " * 2000, servers.bundled
    asked: Any = [{"role": "user", "content": question}]
    calls = [
        partial(litellm.completion, messages=asked, **options("openai", server, BUNDLED)),
        partial(litellm.completion, messages=asked, **options("hosted_vllm", server, BUNDLED)),
        partial(litellm.completion, messages=asked, **options("anthropic", server, BUNDLED)),
        partial(litellm.text_completion, prompt=question, **options("text-completion-openai", server, BUNDLED)),
        partial(litellm.responses, input=question, **options("openai", server, BUNDLED) | {"max_tokens": None}),
    ]
    for call in calls:
        try:
            call()
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{call} was answered")


async def check_async(servers: Servers) -> None:
    chosen = options("openai", servers.bundled, BUNDLED)
    assert (await litellm.acompletion(messages=ASKED, **chosen)).choices[0].message.content == LABEL


if __name__ == "__main__":
    checks.run(globals())
