"""CrewAI: a model, and crews of agents with tools, streams and typed outputs, over chats and responses."""

from typing import Any, Literal

import checks
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from crewai.types.streaming import StreamChunkType
from crewai.utilities.agent_utils import is_context_length_exceeded
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 21]


@tool("get_weather")
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return checks.weather(city)


def model(url: str, name: str, **options: Any) -> LLM:
    return LLM(model=f"openai/{name}", base_url=f"{url}/v1", api_key="none", max_retries=0, **options)


def crew(servers: Servers, **options: Any) -> Crew:
    agent = Agent(
        role="Reporter",
        goal="Tell the weather.",
        backstory="You look out of the window.",
        tools=[get_weather],
        llm=model(servers.scripted, SCRIPTED, **options),
    )
    task = Task(description="Weather in {city}?", expected_output="A sentence.", agent=agent)
    return Crew(agents=[agent], tasks=[task], stream=bool(options.get("stream")))


def text(servers: Servers, **options: Any) -> None:
    asked: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SENTENCE}]
    for stream in (False, True):
        assert model(servers.bundled, BUNDLED, stream=stream, **options).call(asked) == LABEL


def tools(servers: Servers, **options: Any) -> None:
    done = crew(servers, **options).kickoff(inputs={"city": "Paris"})
    assert done.raw == f"{REPORT}Paris." and done.token_usage.prompt_tokens > 0, done


def check_chat_text(servers: Servers) -> None:
    text(servers)


def check_chat_schema(servers: Servers) -> None:
    made: Any = model(servers.bundled, BUNDLED, response_format=Weather).call("Weather in Paris?")
    assert isinstance(made if isinstance(made, Weather) else Weather.model_validate_json(made), Weather)


def check_chat_tools(servers: Servers) -> None:
    tools(servers)


def check_chat_tools_streamed(servers: Servers) -> None:
    streamed: Any = crew(servers, stream=True).kickoff(inputs={"city": "Paris"})
    chunks = list(streamed)
    parts = [chunk.content for chunk in chunks if chunk.chunk_type is StreamChunkType.TEXT]
    assert "".join(parts).endswith(f"{REPORT}Paris.") and len(parts) > 4, parts
    assert streamed.result.raw == f"{REPORT}Paris."


def check_responses_text(servers: Servers) -> None:
    text(servers, api="responses")


def check_responses_tools(servers: Servers) -> None:
    tools(servers, api="responses")


def check_overflow(servers: Servers) -> None:
    """A prompt beyond the context: agents then summarise the conversation."""
    for api in ("completions", "responses"):
        try:
            model(servers.bundled, BUNDLED, api=api).call("again and again " * 2000)
        except Exception as error:
            assert is_context_length_exceeded(error), error
        else:
            raise AssertionError(f"{api} was answered")


async def check_async(servers: Servers) -> None:
    done: Any = await crew(servers).kickoff_async(inputs={"city": "Rome"})
    assert done.raw.startswith(REPORT)


if __name__ == "__main__":
    checks.run(globals())
