"""LangGraph: a graph of a model and its tools, with checkpoints, streams and an interrupt, over chats and responses."""

from typing import Any

import checks
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

BOTH: Any = {"messages": [("user", "Weather in both cities? Please think, and say something first.")]}
PARIS: Any = {"messages": [("user", "And in Paris?")]}
THREAD: Any = {"configurable": {"thread_id": "one"}}


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return checks.weather(city)


def model(url: str, name: str, uses_responses: bool) -> Any:
    return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=uses_responses)


def graph(servers: Servers, uses_responses: bool = False, used: Any = get_weather) -> Any:
    """A model that calls tools until it answers."""
    bound = model(servers.scripted, SCRIPTED, uses_responses).bind_tools([used])
    built = StateGraph(MessagesState)
    built.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    built.add_node("tools", ToolNode([used]))
    built.add_edge(START, "model")
    built.add_conditional_edges("model", tools_condition)
    built.add_edge("tools", "model")
    return built.compile(checkpointer=InMemorySaver())


def loop(servers: Servers, uses_responses: bool) -> None:
    made = graph(servers, uses_responses)
    done = made.invoke(BOTH, THREAD)["messages"]
    assert [message.type for message in done] == ["human", "ai", "tool", "tool", "ai"]
    assert done[-1].text == f"{REPORT}Rome." and done[-1].usage_metadata["input_tokens"] > 0
    again = made.invoke(PARIS, THREAD)["messages"]  # the conversation of the thread goes on
    assert len(again) > len(done) and again[-1].text.startswith(REPORT)


def stream(servers: Servers, uses_responses: bool) -> None:
    made, parts, nodes = graph(servers, uses_responses), [], []
    for mode, event in made.stream(BOTH, THREAD, stream_mode=["messages", "updates"]):
        if mode == "updates":
            nodes += event
        elif isinstance(event[0], AIMessageChunk):
            parts.append(event[0].text)
    assert nodes == ["model", "tools", "model"], nodes
    assert "".join(parts).strip().endswith(f"{REPORT}Rome.") and len(parts) > 4


def check_text(servers: Servers) -> None:
    plain = model(servers.bundled, BUNDLED, False)
    built = StateGraph(MessagesState)
    built.add_node("model", lambda state: {"messages": [plain.invoke([("system", SYSTEM), *state["messages"]])]})
    built.add_edge(START, "model")
    made: Any = built.compile()
    asked: Any = {"messages": [("user", SENTENCE)]}
    assert made.invoke(asked)["messages"][-1].text == LABEL
    parts = [part.text for part, _ in made.stream(asked, stream_mode="messages")]
    assert "".join(parts) == LABEL and len(parts) > 2


def check_chat_tools(servers: Servers) -> None:
    loop(servers, uses_responses=False)


def check_chat_tools_streamed(servers: Servers) -> None:
    stream(servers, uses_responses=False)


def check_responses_tools(servers: Servers) -> None:
    loop(servers, uses_responses=True)


def check_responses_tools_streamed(servers: Servers) -> None:
    stream(servers, uses_responses=True)


def check_interrupt(servers: Servers) -> None:
    """A person answers in place of the tool, while the conversation waits in a checkpoint."""

    @tool("get_weather")
    def asks(city: str) -> str:
        """Get the weather of a city."""
        return interrupt(city)

    made = graph(servers, used=asks)
    waiting = made.invoke(PARIS, THREAD)
    assert waiting["__interrupt__"][0].value == "Paris"
    done = made.invoke(Command(resume="21 degrees in Oslo."), THREAD)["messages"]
    assert done[-1].text == f"{REPORT}Oslo."


async def check_async(servers: Servers) -> None:
    done = await graph(servers).ainvoke(BOTH, THREAD)
    assert done["messages"][-1].text == f"{REPORT}Rome."


if __name__ == "__main__":
    checks.run(globals())
