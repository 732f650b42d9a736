"""A `headstart serve` in a process of its own for the scripts of this folder, and requests to it."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from headstart_lab.structured.checks import Answer

READY_SECONDS = 300
PROMPT = [{"role": "user", "content": "Answer in JSON."}]


class Running(NamedTuple):
    """A running server."""

    url: str
    pid: int

    @property
    def engine_pid(self) -> int:
        """Return the id of the engine's process."""
        children = psutil.Process(self.pid).children(recursive=True)
        return next(child.pid for child in children if any("engine_process" in part for part in child.cmdline()))


@contextmanager
def serving(model: str, log: Path, *flags: str) -> Iterator[Running]:
    """Start a server, yield it when it is ready, and end it."""
    command = [sys.executable, "-m", "headstart", "serve", *filter(None, [model]), "--port", "0", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "GOMP_SPINCOUNT": "0"})
    try:
        yield Running(_address(process, log), process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r" at (http://\S+)/v1", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def metrics(url: str) -> str:
    """Return the text of /metrics."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
        return response.read().decode()


def metric_sum(text: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's samples that contain `label`."""
    samples = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in samples if label in labels)


def schema_request(schema: Any, **sampling: Any) -> dict[str, Any]:
    """Return the body of a chat request that asks for a value of `schema`."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    return {"messages": PROMPT, "response_format": wanted, **sampling}


async def post_chat(session: aiohttp.ClientSession, url: str, data: bytes) -> list[Answer]:
    """Send the body of a chat request, and return an Answer per choice, one for a refusal or a lost connection."""
    headers = {"content-type": "application/json"}
    try:
        async with session.post(url + "/v1/chat/completions", data=data, headers=headers) as response:
            text = await response.text()
            if response.status != 200:
                return [Answer(response.status, _message(text))]
            choices = json.loads(text)["choices"]
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        return [Answer(0, repr(error))]
    return [Answer(200, choice["message"]["content"] or "", choice["finish_reason"]) for choice in choices]


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
