"""The ollama package: chats, prompts, schemas, tools, thinking, each whole and streamed; the models; errors."""

from typing import Any, Literal

import checks
from checks import BUNDLED, LABEL, REPORT, SCRIPTED, SENTENCE, SYSTEM, Servers
from ollama import AsyncClient, Client, ResponseError
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "Weather in both cities? Please think."}]
LABELLING: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SENTENCE}]
GREEDY = {"temperature": 0, "num_predict": 96, "num_ctx": 4096}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 30]


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: The city.
    """
    return checks.weather(city)


def check_chat(servers: Servers) -> None:
    answer = Client(servers.bundled).chat(BUNDLED, LABELLING, options=GREEDY, keep_alive="5m")
    assert answer.message.content == LABEL and answer.done and answer.done_reason == "stop"
    assert answer.prompt_eval_count > 50 and answer.eval_count > 3
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0


def check_chat_streamed(servers: Servers) -> None:
    parts = list(Client(servers.bundled).chat(BUNDLED, LABELLING, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == LABEL and len(parts) > 3
    assert parts[-1].done and not any(part.done for part in parts[:-1])


async def check_chat_async(servers: Servers) -> None:
    stream = await AsyncClient(servers.bundled).chat(BUNDLED, LABELLING, options=GREEDY, stream=True)
    assert "".join([part.message.content async for part in stream]) == LABEL


def check_generate(servers: Servers) -> None:
    client = Client(servers.bundled)
    whole = client.generate(BUNDLED, SENTENCE, system=SYSTEM, options=GREEDY)
    parts = list(client.generate(BUNDLED, SENTENCE, system=SYSTEM, options=GREEDY, stream=True))
    assert whole.response == LABEL == "".join(part.response for part in parts)
    raw = client.generate(BUNDLED, "light", raw=True, options={**GREEDY, "num_predict": 4})
    assert raw.response and raw.done_reason == "length" and raw.eval_count == 4


def check_schema(servers: Servers) -> None:
    client = Client(servers.bundled)
    answer = client.chat(BUNDLED, ASK, format={**Weather.model_json_schema(), "additionalProperties": False})
    Weather.model_validate_json(answer.message.content)


def check_tools_round_trip(servers: Servers) -> None:
    client = Client(servers.scripted)
    for is_streamed in (False, True):
        answer: Any = client.chat(SCRIPTED, ASK, tools=[get_weather], think=True, stream=is_streamed)
        parts = list(answer) if is_streamed else [answer]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert "".join(part.message.thinking or "" for part in parts).strip() == "I look it up."
        assert [call.function.arguments for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
        history = [*ASK, {"role": "assistant", "content": "", "tool_calls": calls}]
        for call in calls:
            told = checks.weather(**call.function.arguments)
            history.append({"role": "tool", "tool_name": call.function.name, "content": told})
        final = client.chat(SCRIPTED, history, tools=[get_weather])
        assert final.message.content == f"{REPORT}Rome."


def check_models(servers: Servers) -> None:
    client = Client(servers.bundled)
    assert [model.model for model in client.list().models] == [BUNDLED]
    assert [model.model for model in client.ps().models] == [BUNDLED]
    assert "completion" in client.show(BUNDLED).capabilities


def check_errors(servers: Servers) -> None:
    client = Client(servers.bundled)
    for call, status, word in (
        (lambda: client.chat("other", ASK), 404, "other"),
        (lambda: list(client.chat(BUNDLED, ASK, options={"temperature": 9}, stream=True)), 400, "options.temperature"),
        (lambda: client.embed(BUNDLED, "a"), 400, "embedding"),
    ):
        try:
            call()
        except ResponseError as error:
            assert error.status_code == status and word in error.error, error
        else:
            raise AssertionError("it was accepted")


if __name__ == "__main__":
    checks.run(globals())
