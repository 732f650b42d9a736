"""pydantic-ai: agents with tools and typed outputs, over chats, responses and messages."""

from typing import Any, Literal

import checks
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 21]


def chat(url: str, name: str) -> Any:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def responses(url: str, name: str) -> Any:
    return OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def messages(url: str, name: str) -> Any:
    return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))


def agent(model: Any, **options: Any) -> Agent[None, Any]:
    made: Agent[None, Any] = Agent(model, retries=0, **options)

    @made.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return checks.weather(city)

    return made


async def text(model: Any) -> None:
    plain = Agent(model, instructions=SYSTEM)
    assert (await plain.run(SENTENCE)).output == LABEL
    async with plain.run_stream(SENTENCE) as stream:
        parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(parts) == LABEL and len(parts) > 2


async def tools(model: Any) -> None:
    done = await agent(model).run("How is the weather in both cities? Please think.")
    assert done.output == f"{REPORT}Rome." and done.usage.tool_calls == 2, done.all_messages()
    again = await agent(model).run("And in Paris?", message_history=done.all_messages())
    assert again.output.startswith(REPORT)
    async with agent(model).run_stream("Weather in Paris?") as stream:
        assert await stream.get_output() == f"{REPORT}Paris."


async def tools_and_output(model: Any) -> None:
    done = await agent(model, output_type=ToolOutput(Weather, name="final_result")).run("Weather in Paris?")
    assert done.output == Weather(city="Paris", degrees=21)


async def outputs(model: Any, *output_types: Any) -> None:
    settings: Any = {"parallel_tool_calls": False}
    for output_type in output_types:
        plain = Agent(model, output_type=output_type, model_settings=settings, retries=0)
        assert isinstance((await plain.run("Weather in Paris?")).output, Weather)


async def check_chat_text(servers: Servers) -> None:
    await text(chat(servers.bundled, BUNDLED))


async def check_chat_tools(servers: Servers) -> None:
    await tools(chat(servers.scripted, SCRIPTED))


async def check_chat_tools_and_output(servers: Servers) -> None:
    await tools_and_output(chat(servers.scripted, SCRIPTED))


async def check_chat_outputs(servers: Servers) -> None:
    await outputs(chat(servers.bundled, BUNDLED), ToolOutput(Weather), NativeOutput(Weather))


async def check_responses_text(servers: Servers) -> None:
    await text(responses(servers.bundled, BUNDLED))


async def check_responses_tools(servers: Servers) -> None:
    await tools(responses(servers.scripted, SCRIPTED))


async def check_responses_outputs(servers: Servers) -> None:
    await outputs(responses(servers.bundled, BUNDLED), ToolOutput(Weather), NativeOutput(Weather))


async def check_messages_text(servers: Servers) -> None:
    await text(messages(servers.bundled, BUNDLED))


async def check_messages_tools(servers: Servers) -> None:
    await tools(messages(servers.scripted, SCRIPTED))


async def check_messages_outputs(servers: Servers) -> None:
    await outputs(messages(servers.bundled, BUNDLED), ToolOutput(Weather))


if __name__ == "__main__":
    checks.run(globals())
