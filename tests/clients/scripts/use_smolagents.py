"""smolagents: agents that call tools, and agents that write code, over chats."""

import json
from typing import Any

import checks
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from smolagents import ActionStep, ChatMessageStreamDelta, CodeAgent, OpenAIModel, ToolCallingAgent, tool

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "degrees": {"enum": [10, 20, 21]}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return checks.weather(city)


def model(url: str, name: str) -> OpenAIModel:
    return OpenAIModel(name, api_base=f"{url}/v1", api_key="none", client_kwargs={"max_retries": 0}, retry=False)


def agent(kind: Any, servers: Servers, **options: Any) -> Any:
    return kind(tools=[get_weather], model=model(servers.scripted, SCRIPTED), max_steps=3, verbosity_level=0, **options)


def check_text(servers: Servers) -> None:
    asked: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SENTENCE}]
    chosen = model(servers.bundled, BUNDLED)
    whole = chosen.generate(asked)
    assert whole.content == LABEL and whole.token_usage is not None and whole.token_usage.output_tokens > 2
    deltas = list(chosen.generate_stream(asked))
    assert "".join(delta.content or "" for delta in deltas) == LABEL and len(deltas) > 2
    assert deltas[-1].token_usage == whole.token_usage


def check_schema(servers: Servers) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"schema": WEATHER, "name": "weather", "strict": True}}
    asked: Any = [{"role": "user", "content": "Weather in Paris?"}]
    made = json.loads(model(servers.bundled, BUNDLED).generate(asked, response_format=shape).content or "")
    assert made["city"] in ("Paris", "Rome") and made["degrees"] in (10, 20, 21)


def check_required_tool(servers: Servers) -> None:
    """Agents of this library always require a call: a grammar forces it."""
    asked: Any = [{"role": "user", "content": "Weather in Paris?"}]
    answer = model(servers.bundled, BUNDLED).generate(asked, tools_to_call_from=[get_weather], max_tokens=256)
    assert {call.function.name for call in answer.tool_calls or []} == {"get_weather"}


def check_tools(servers: Servers) -> None:
    done = agent(ToolCallingAgent, servers)
    answer = done.run("Weather in both cities? Please think.")
    assert answer in (f"{REPORT}Paris.", f"{REPORT}Rome.")  # it sorts outputs by the random ids of calls
    assert done.run("And in Paris?", reset=False)
    steps = [step for step in done.memory.steps if isinstance(step, ActionStep)]
    assert [len(step.tool_calls or []) for step in steps] == [2, 1, 1] and not any(step.error for step in steps)


def check_tools_streamed(servers: Servers) -> None:
    events = list(agent(ToolCallingAgent, servers, stream_outputs=True).run("Weather in Paris?", stream=True))
    assert sum(isinstance(event, ChatMessageStreamDelta) for event in events) > 4
    assert events[-1].output == f"{REPORT}Paris."


def check_code(servers: Servers) -> None:
    done = agent(CodeAgent, servers)
    assert done.run("Weather in Paris?") == f"{REPORT}Paris."
    steps = [step for step in done.memory.steps if isinstance(step, ActionStep)]
    assert len(steps) == 2 and "21 degrees in Paris." in (steps[0].observations or "")


def check_code_streamed(servers: Servers) -> None:
    events = list(agent(CodeAgent, servers, stream_outputs=True).run("Weather in Paris?", stream=True))
    text = "".join(event.content or "" for event in events if isinstance(event, ChatMessageStreamDelta))
    assert events[-1].output == f"{REPORT}Paris." and "</code>" not in text  # a stop sequence


if __name__ == "__main__":
    checks.run(globals())
