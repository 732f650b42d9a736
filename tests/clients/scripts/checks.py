"""Runs the checks of a client's script: python use_NAME.py BUNDLED_URL SCRIPTED_URL.

A check is a function `check_*` of the script that gets the two servers. Each prints one line of JSON: its name, and the
error, or null. This file and the scripts run in the client's own environment, without Headstart.
"""

import asyncio
import contextlib
import inspect
import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

REPORT = "The weather report: 21 degrees in "
"""Answer of the scripted model when it has got the tool's output, which is the rest."""
SYSTEM = (
    "You label what people ask of a home and travel assistant. Find the intent of the sentence and answer with one "
    "line of JSON: the name, the code that the list gives, and the slots. Copy each slot from the sentence word "
    "for word.\n"
    "lights_off R8: darkness in a room. Slots: room (which room). Example: I want you to make it dark in the vekflous\n"
    "call_person J1: to talk on the phone. Slots: person (who). Example: hey, start a call to Diana"
)
SENTENCE = "Could you make it dark in the kitchen?"
LABEL = '{"name":"lights_off","code":"R8","slots":{"room":"kitchen"}}'
"""Answers of the bundled model to the two."""


class Servers(NamedTuple):
    """Base URLs without /v1."""

    bundled: str  # the bundled model
    scripted: str  # the model of scripted_agent.py


BUNDLED, SCRIPTED = "headstart-intent", "fake"
"""The names of the two models."""


def weather(city: str) -> str:
    """The tool of all agents."""
    return f"21 degrees in {city}."


def run(script: Mapping[str, Any]) -> None:
    """Run the checks of a script: of its globals."""
    servers = Servers(*sys.argv[1:3])
    for name, check in list(script.items()):
        if not name.startswith("check_"):
            continue
        error = None
        try:
            with contextlib.redirect_stdout(sys.stderr):  # some clients print what the model writes
                asyncio.run(check(servers)) if inspect.iscoroutinefunction(check) else check(servers)
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error}), flush=True)
