"""LangChain with langchain-openai (chats and responses) and langchain-anthropic: models, schemas, and agents."""

from typing import Any, Literal

import checks
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.tools import tool
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a city. Nothing else is allowed, or the model writes further properties."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 21]


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return checks.weather(city)


def chat(url: str, name: str) -> Any:
    return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0)


def responses(url: str, name: str) -> Any:
    return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=True)


def messages(url: str, name: str) -> Any:
    return ChatAnthropic(model=name, base_url=url, api_key="none", max_retries=0, max_tokens=512)


def text(model: Any, **options: Any) -> None:
    asked = [("system", SYSTEM), ("user", SENTENCE)]
    whole = model.invoke(asked)
    chunks = list(model.stream(asked, **options))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert whole.text == joined.text == LABEL and len(chunks) > 2
    assert whole.usage_metadata["input_tokens"] > 0 and joined.usage_metadata["output_tokens"] > 2


def tools(model: Any) -> None:
    agent = create_agent(model, [get_weather])
    asked: Any = {"messages": [("user", "Weather in both cities? Please think, and say something first.")]}
    done = agent.invoke(asked)["messages"]
    assert done[-1].text == f"{REPORT}Rome." and [m.type for m in done] == ["human", "ai", "tool", "tool", "ai"]
    again = agent.invoke({"messages": [*done, ("user", "And in Paris?")]})["messages"]
    assert again[-1].text.startswith(REPORT)
    parts = [part.text for part, _ in agent.stream(asked, stream_mode="messages") if part.type == "AIMessageChunk"]
    assert "".join(parts).strip().endswith(f"{REPORT}Rome."), parts


def schema(model: Any, *methods: str) -> None:
    for method in methods:
        made = model.with_structured_output(Weather, method=method).invoke("Weather in Paris?")
        assert isinstance(made, Weather), method


def check_chat_text(servers: Servers) -> None:
    text(chat(servers.bundled, BUNDLED), stream_usage=True)


def check_chat_tools(servers: Servers) -> None:
    tools(chat(servers.scripted, SCRIPTED))


def check_chat_schema(servers: Servers) -> None:
    schema(chat(servers.bundled, BUNDLED), "json_schema", "function_calling")


def check_chat_required(servers: Servers) -> None:
    bound = chat(servers.bundled, BUNDLED).bind_tools([get_weather, Weather], tool_choice="Weather", strict=True)
    assert [call["name"] for call in bound.invoke("Weather?").tool_calls] == ["Weather"]


def check_agent_outputs(servers: Servers) -> None:
    for strategy in (ToolStrategy(Weather), ProviderStrategy(Weather)):
        agent = create_agent(chat(servers.bundled, BUNDLED).bind(parallel_tool_calls=False), response_format=strategy)
        asked: Any = {"messages": [("user", "Weather in Paris?")]}
        assert isinstance(agent.invoke(asked)["structured_response"], Weather)


def check_responses_text(servers: Servers) -> None:
    text(responses(servers.bundled, BUNDLED))


def check_responses_tools(servers: Servers) -> None:
    tools(responses(servers.scripted, SCRIPTED))


def check_responses_schema(servers: Servers) -> None:
    schema(responses(servers.bundled, BUNDLED), "json_schema", "function_calling")


def check_messages_text(servers: Servers) -> None:
    text(messages(servers.bundled, BUNDLED))


def check_messages_tools(servers: Servers) -> None:
    tools(messages(servers.scripted, SCRIPTED))


def check_messages_schema(servers: Servers) -> None:
    schema(messages(servers.bundled, BUNDLED), "json_schema", "function_calling")


def check_overflow(servers: Servers) -> None:
    """A prompt beyond the context, by which agents notice that they must shorten the conversation."""
    for model in (chat, responses, messages):
        try:
            model(servers.bundled, BUNDLED).invoke("again and again " * 2000)
        except ContextOverflowError:
            continue
        raise AssertionError(f"{model} was answered")


if __name__ == "__main__":
    checks.run(globals())
