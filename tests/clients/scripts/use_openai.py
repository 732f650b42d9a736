"""The openai package: chats, parsed answers, tools, responses, each whole and streamed."""

import json
from typing import Any, Literal

import checks
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from openai import AsyncOpenAI, BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-50, le=50)
    sunny: bool


class GetWeather(BaseModel):
    """Current weather of a city"""

    city: Literal["Paris", "Rome"]


MESSAGES: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SENTENCE}]
ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}


def output(arguments: str) -> str:
    return checks.weather(**json.loads(arguments))


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def check_chat(servers: Servers) -> None:
    answer = client(servers.bundled).chat.completions.create(model=BUNDLED, messages=MESSAGES)
    assert answer.choices[0].message.content == LABEL and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens > 0


def check_chat_streamed(servers: Servers) -> None:
    api = client(servers.bundled).chat.completions
    with api.stream(model=BUNDLED, messages=MESSAGES, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == LABEL == final.choices[0].message.content and len(deltas) > 2
    assert final.usage is not None and final.usage.completion_tokens > 2


async def check_chat_async(servers: Servers) -> None:
    async with AsyncOpenAI(base_url=f"{servers.bundled}/v1", api_key="none", max_retries=0) as api:
        text = ""
        async for chunk in await api.chat.completions.create(model=BUNDLED, messages=MESSAGES, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == LABEL


def check_completion(servers: Servers) -> None:
    api = client(servers.bundled).completions
    assert len(api.create(model=BUNDLED, prompt=["Hello", "You"], max_tokens=3).choices) == 2


def check_parse(servers: Servers) -> None:
    api = client(servers.bundled).chat.completions
    parsed = api.parse(model=BUNDLED, messages=ASK, response_format=Weather).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with api.stream(model=BUNDLED, messages=ASK, response_format=Weather) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def check_parse_tools(servers: Servers) -> None:
    tools = [pydantic_function_tool(GetWeather)]
    api = client(servers.bundled).chat.completions
    answer = api.parse(model=BUNDLED, messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False)
    calls = answer.choices[0].message.tool_calls or []
    assert [type(call.function.parsed_arguments) for call in calls] == [GetWeather]
    assert answer.choices[0].finish_reason == "tool_calls"


def check_tool_choices(servers: Servers) -> None:
    api = client(servers.bundled).chat.completions
    other = {**TOOL["function"], "name": "get_time"}
    tools: Any = [{"type": "function", "function": {**TOOL["function"], "strict": True}}, {**TOOL, "function": other}]
    for choice in (
        {"type": "function", "function": {"name": "get_weather"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
    ):
        chosen: Any = choice
        answer = api.create(model=BUNDLED, messages=ASK, tools=tools, tool_choice=chosen, max_completion_tokens=256)
        assert {call.function.name for call in answer.choices[0].message.tool_calls or []} == {"get_weather"}
    assert api.create(model=BUNDLED, messages=ASK, tools=tools, tool_choice="none").choices[0].message.content


def check_tools_round_trip(servers: Servers) -> None:
    api = client(servers.scripted).chat.completions
    messages: Any = [{"role": "user", "content": "Weather in both cities? Please think, and say something first."}]
    message = api.create(model=SCRIPTED, messages=messages, tools=[TOOL]).choices[0].message
    calls = message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert (message.content or "").strip() == "Let me look." and message.reasoning_content == "I look it up."
    messages.append(message)
    for call in calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output(call.function.arguments)})
    final = api.create(model=SCRIPTED, messages=messages, tools=[TOOL]).choices[0]
    assert final.message.content == f"{REPORT}Rome." and final.finish_reason == "stop"


def check_tools_streamed(servers: Servers) -> None:
    api = client(servers.scripted).chat.completions
    with api.stream(model=SCRIPTED, messages=ASK, tools=[TOOL]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [("get_weather", {"city": "Paris"})]
    assert final.finish_reason == "tool_calls"


def check_responses(servers: Servers) -> None:
    api = client(servers.bundled).responses
    whole = api.create(model=BUNDLED, instructions=SYSTEM, input=SENTENCE)
    assert whole.output_text == LABEL and whole.status == "completed"
    with api.stream(model=BUNDLED, instructions=SYSTEM, input=SENTENCE) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == LABEL
    assert api.retrieve(whole.id).output_text == whole.output_text
    again = api.create(model=BUNDLED, instructions=SYSTEM, input="Call Diana.", previous_response_id=whole.id)
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0
    api.delete(whole.id)


def check_responses_parse(servers: Servers) -> None:
    api = client(servers.bundled).responses
    done = api.parse(model=BUNDLED, input="Paris?", text_format=Weather, text={"verbosity": "low"})
    assert isinstance(done.output_parsed, Weather)
    with api.stream(model=BUNDLED, input="Paris?", text_format=Weather) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == done.output_parsed


def check_responses_tool_choices(servers: Servers) -> None:
    api = client(servers.bundled).responses
    tools: Any = [{**FLAT, "strict": True}, {**FLAT, "name": "get_time"}]
    for choice in (
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ):
        chosen: Any = choice
        done = api.create(model=BUNDLED, input="Paris?", tools=tools, tool_choice=chosen, max_output_tokens=256)
        assert {item.name for item in done.output if item.type == "function_call"} == {"get_weather"}


def check_responses_tools(servers: Servers) -> None:
    api = client(servers.scripted).responses
    ask = "Weather in both cities? Please think."
    first = api.create(model=SCRIPTED, input=ask, tools=[FLAT], reasoning={"effort": "low", "summary": "auto"})
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "function_call", "function_call"], kinds
    outputs: Any = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": checks.weather(**json.loads(item.arguments)),
        }
        for item in first.output
        if item.type == "function_call"
    ]
    stored = api.create(model=SCRIPTED, input=outputs, tools=[FLAT], previous_response_id=first.id)
    history: Any = [{"role": "user", "content": ask}, *(item.to_dict() for item in first.output), *outputs]
    sent = api.create(model=SCRIPTED, input=history, tools=[FLAT], store=False)
    assert stored.output_text == sent.output_text == f"{REPORT}Rome."


def check_responses_tools_streamed(servers: Servers) -> None:
    with client(servers.scripted).responses.stream(model=SCRIPTED, input="Paris?", tools=[FLAT]) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    assert json.loads(arguments) == {"city": "Paris"} and final.output[0].type == "function_call"


def check_errors(servers: Servers) -> None:
    api = client(servers.bundled)
    for call in (
        lambda: api.chat.completions.create(model=BUNDLED, messages=ASK, temperature=9),
        lambda: api.responses.create(model=BUNDLED, input="a", temperature=9),
    ):
        try:
            call()
        except BadRequestError as error:
            assert error.param == "temperature" and error.code == "invalid_value"
        else:
            raise AssertionError("it was accepted")


if __name__ == "__main__":
    checks.run(globals())
