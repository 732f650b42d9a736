"""The anthropic package: messages, tools, thinking, schemas, token counts, each whole and streamed."""

from typing import Any, Literal

import checks
from anthropic import Anthropic, AsyncAnthropic, BadRequestError, beta_tool
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "Weather in both cities? Please think."}]
PROPERTIES = {"city": {"enum": ["Paris", "Rome"]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city"], "additionalProperties": False}
TOOL: Any = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 30]


def client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0)


def sentence() -> Any:
    return {"model": BUNDLED, "max_tokens": 96, "system": SYSTEM, "messages": [{"role": "user", "content": SENTENCE}]}


def check_message(servers: Servers) -> None:
    message = client(servers.bundled).messages.create(**sentence())
    assert message.content[0].text == LABEL and message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 3


def check_message_streamed(servers: Servers) -> None:
    api = client(servers.bundled).messages
    with api.stream(**sentence()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == LABEL == final.content[0].text and len(texts) > 2


async def check_message_async(servers: Servers) -> None:
    async with AsyncAnthropic(base_url=servers.bundled, api_key="none", max_retries=0) as api:
        message = await api.messages.create(**sentence())
    assert message.stop_reason == "end_turn"


def check_cache_control(servers: Servers) -> None:
    cached = [{"type": "text", "text": SYSTEM * 3, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    api = client(servers.bundled).messages
    api.create(**{**sentence(), "system": cached})
    assert api.create(**{**sentence(), "system": cached}).usage.cache_read_input_tokens > 16


def check_count_tokens(servers: Servers) -> None:
    counted = client(servers.scripted).messages.count_tokens(model=SCRIPTED, messages=ASK, tools=[TOOL])
    assert counted.input_tokens > 5


def check_schema(servers: Servers) -> None:
    api = client(servers.bundled).messages
    options: Any = {"model": BUNDLED, "max_tokens": 96, "messages": ASK, "output_format": Weather}
    parsed = api.parse(**options).parsed_output
    assert isinstance(parsed, Weather)
    with api.stream(**options) as stream:
        stream.until_done()
        assert stream.get_final_message().parsed_output == parsed


def check_tool_choices(servers: Servers) -> None:
    api = client(servers.bundled).messages
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        chosen: Any = choice
        message = api.create(model=BUNDLED, max_tokens=200, messages=ASK, tools=[TOOL], tool_choice=chosen)
        block = message.content[0]
        assert block.type == "tool_use" and block.input["city"] in ("Paris", "Rome")
        assert message.stop_reason == "tool_use"


def check_tools_round_trip(servers: Servers) -> None:
    api = client(servers.scripted).messages
    options: Any = {"model": SCRIPTED, "max_tokens": 1024, "tools": [TOOL]}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    for is_streamed in (False, True):
        if is_streamed:
            with api.stream(messages=ASK, **{**options, "max_tokens": 2048}) as stream:
                message = stream.get_final_message()
        else:
            message = api.create(messages=ASK, **{**options, "max_tokens": 2048})
        assert [block.type for block in message.content] == ["thinking", "tool_use", "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": checks.weather(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        history: Any = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        final = api.create(messages=history, **{**options, "max_tokens": 2048})
        assert final.content[-1].text == f"{REPORT}Rome." and final.stop_reason == "end_turn"


def check_tool_runner(servers: Servers) -> None:
    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather.

        Args:
            city: The city.
        """
        return checks.weather(city)

    ask: Any = [{"role": "user", "content": "Paris?"}]
    runner = client(servers.scripted).beta.messages.tool_runner(
        model=SCRIPTED, max_tokens=512, messages=ask, tools=[get_weather]
    )
    messages = list(runner)
    assert len(messages) == 2 and messages[-1].content[0].text == f"{REPORT}Paris."


def check_errors(servers: Servers) -> None:
    try:
        client(servers.bundled).messages.create(
            model=BUNDLED, max_tokens=9, messages=ASK, extra_body={"temperature": 9}
        )
    except BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error"
    else:
        raise AssertionError("it was accepted")


if __name__ == "__main__":
    checks.run(globals())
