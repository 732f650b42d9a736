"""instructor: a model of pydantic from every mode for OpenAI's and Anthropic's APIs, whole, in parts and in lists."""

from typing import Any, Literal

import checks
import instructor
from anthropic import Anthropic
from checks import BUNDLED, SCRIPTED, Servers
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a city. Nothing else is allowed, or the model writes further properties."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 30]
    sunny: bool


ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]


def client(url: str, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def weather(url: str, mode: Mode, **options: Any) -> None:
    made = client(url, mode).create(model=BUNDLED, messages=ASK, response_model=Weather, max_retries=0, **options)
    assert isinstance(made, Weather)


def check_tools(servers: Servers) -> None:
    weather(servers.bundled, Mode.TOOLS)


def check_tools_strict(servers: Servers) -> None:
    weather(servers.bundled, Mode.TOOLS_STRICT)


def check_json_schema(servers: Servers) -> None:
    weather(servers.bundled, Mode.JSON_SCHEMA)


def check_responses_tools(servers: Servers) -> None:
    weather(servers.bundled, Mode.RESPONSES_TOOLS)


def check_from_provider(servers: Servers) -> None:
    made = instructor.from_provider(f"openai/{BUNDLED}", base_url=f"{servers.bundled}/v1", api_key="none")
    assert isinstance(made.create(messages=ASK, response_model=Weather), Weather)


def check_partial(servers: Servers) -> None:
    parts = list(
        client(servers.bundled, Mode.TOOLS).create_partial(model=BUNDLED, messages=ASK, response_model=Weather)
    )
    assert len(parts) > 1 and parts[-1].city in ("Paris", "Rome") and parts[-1].sunny is not None


def check_auto(servers: Servers) -> None:
    """The scripted model calls the only tool by itself."""

    class City(BaseModel):
        city: str
        degrees: int

    made = client(servers.scripted, Mode.TOOLS).create(model=SCRIPTED, messages=ASK, response_model=City)
    assert made.model_dump() == {"city": "Paris", "degrees": 21}


def check_anthropic_tools(servers: Servers) -> None:
    api = Anthropic(base_url=servers.bundled, api_key="none", max_retries=0)
    made = instructor.from_anthropic(api, mode=Mode.ANTHROPIC_TOOLS)
    assert isinstance(made.create(model=BUNDLED, max_tokens=200, messages=ASK, response_model=Weather), Weather)


if __name__ == "__main__":
    checks.run(globals())
