"""openai-agents: agents with tools, sessions, handoffs and typed outputs, over responses and chats."""

from typing import Any, Literal

import checks
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
MODELS: dict[str, Any] = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 21]


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return checks.weather(city)


def model(url: str, name: str, api: str) -> Any:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return MODELS[api](model=name, openai_client=client)


def agent(servers: Servers, api: str, **options: Any) -> Agent:
    made = model(servers.scripted, SCRIPTED, api)
    given = {"name": "Weather", "instructions": "Be brief.", "tools": [get_weather], **options}
    return Agent(model=made, **given)


async def text(servers: Servers, api: str) -> None:
    plain = Agent(name="Plain", instructions=SYSTEM, model=model(servers.bundled, BUNDLED, api))
    assert (await Runner.run(plain, SENTENCE)).final_output == LABEL
    streamed = Runner.run_streamed(plain, SENTENCE)
    num_deltas = 0
    async for event in streamed.stream_events():
        num_deltas += event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    assert streamed.final_output == LABEL and num_deltas > 2


async def tools(servers: Servers, api: str) -> None:
    done = await Runner.run(agent(servers, api), "Weather in both cities? Please think.")
    assert done.final_output == f"{REPORT}Rome."
    again = await Runner.run(agent(servers, api), [*done.to_input_list(), {"role": "user", "content": "In Paris?"}])
    assert again.final_output.startswith(REPORT)
    streamed = Runner.run_streamed(agent(servers, api), "Weather in Paris?")
    kinds = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
    assert streamed.final_output == f"{REPORT}Paris." and "tool_output" in kinds


async def session(servers: Servers, api: str) -> None:
    memory = SQLiteSession("one")
    await Runner.run(agent(servers, api), "Weather in Paris?", session=memory)
    again = await Runner.run(agent(servers, api), "And in Rome?", session=memory)
    assert again.final_output.startswith(REPORT) and len(await memory.get_items()) == 8


async def outputs(servers: Servers, api: str) -> None:
    plain = Agent(name="Plain", model=model(servers.bundled, BUNDLED, api), output_type=Weather)
    assert isinstance((await Runner.run(plain, "Weather in Paris?")).final_output, Weather)
    both = agent(servers, api, output_type=Weather, instructions="Answer as JSON.")
    assert (await Runner.run(both, "Weather in Paris?")).final_output == Weather(city="Paris", degrees=21)


async def handoff(servers: Servers, api: str) -> None:
    triage = agent(servers, api, name="Triage", tools=[], handoffs=[agent(servers, api)])
    done = await Runner.run(triage, "Weather in Paris?")
    assert done.last_agent.name == "Weather"


async def required(servers: Servers, api: str) -> None:
    settings = ModelSettings(tool_choice="get_weather", max_tokens=200)
    plain = Agent(
        name="Plain",
        model=model(servers.bundled, BUNDLED, api),
        tools=[get_weather],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    assert (await Runner.run(plain, "Weather in Paris?")).final_output.startswith("21 degrees")


async def check_responses_text(servers: Servers) -> None:
    await text(servers, "responses")


async def check_responses_tools(servers: Servers) -> None:
    await tools(servers, "responses")


async def check_responses_session(servers: Servers) -> None:
    await session(servers, "responses")


async def check_responses_stored(servers: Servers) -> None:
    done = await Runner.run(agent(servers, "responses"), "Weather in Paris?")
    again = await Runner.run(agent(servers, "responses"), "And now?", previous_response_id=done.last_response_id)
    assert again.final_output.startswith(REPORT)


async def check_responses_outputs(servers: Servers) -> None:
    await outputs(servers, "responses")


async def check_responses_handoff(servers: Servers) -> None:
    await handoff(servers, "responses")


async def check_responses_required(servers: Servers) -> None:
    await required(servers, "responses")


async def check_chat_text(servers: Servers) -> None:
    await text(servers, "chat")


async def check_chat_tools(servers: Servers) -> None:
    await tools(servers, "chat")


async def check_chat_session(servers: Servers) -> None:
    await session(servers, "chat")


async def check_chat_outputs(servers: Servers) -> None:
    await outputs(servers, "chat")


async def check_chat_handoff(servers: Servers) -> None:
    await handoff(servers, "chat")


async def check_chat_required(servers: Servers) -> None:
    await required(servers, "chat")


if __name__ == "__main__":
    checks.run(globals())
