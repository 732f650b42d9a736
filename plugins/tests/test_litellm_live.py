"""LiteLLM itself in front of two replicas that serve the bundled model, with the plug-in.

HEADSTART_LITELLM_ENV names an environment that has it; otherwise one is made, which needs PyPI.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.harness import Server, spawn

from headstart_plugins.versions import SUPPORTED

ROOT = Path(__file__).parents[2]
SECONDS = 1800
pytestmark = pytest.mark.long

SCRIPT = """
import asyncio, json, sys
import litellm
from headstart_plugins.litellm.callback import PrefixRouting

routing = PrefixRouting()
litellm.callbacks.append(routing)
fixed = {"model": "openai/headstart-intent", "api_key": "none"}

def router(urls):
    listed = [{"model_name": "m", "litellm_params": {**fixed, "api_base": f"{url}/v1"}} for url in urls]
    return litellm.Router(model_list=listed, num_retries=2)

async def ask(router, system, question, **options):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return await router.acompletion(model="m", messages=messages, max_tokens=2, **options)

async def main(urls):
    found, both = {"cached": [], "prompt": []}, router(urls)
    for n in range(12):
        answer = await ask(both, f"Rules {n % 3}. " + "Answer briefly about trains. " * 20, f"question {n}")
        found["cached"].append(answer.usage.prompt_tokens_details.cached_tokens)
        found["prompt"].append(answer.usage.prompt_tokens)
    usage = {"include_usage": True}
    system = "Rules 0. " + "Answer briefly about trains. " * 20
    async for chunk in await ask(both, system, "s", stream=True, stream_options=usage):
        if getattr(chunk, "usage", None):
            found["streamed"] = chunk.usage.prompt_tokens_details.cached_tokens
    stream = await ask(both, "Rules 1. ", "closed early", stream=True)
    async for chunk in stream:
        break
    await stream.aclose()
    del stream, chunk
    half_dead = router(["http://127.0.0.1:9", urls[0]])
    found["answered"] = 0
    for n in range(6):
        found["answered"] += len((await ask(half_dead, f"{n}", "q")).choices)
    await asyncio.sleep(2)
    await ask(both, "Rules 2. ", "the last")
    found["in_flight"] = routing._router.num_calls
    found["reported"] = routing._router.router.num_reported
    print(json.dumps(found))

asyncio.run(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with LiteLLM."""
    if "HEADSTART_LITELLM_ENV" in os.environ:
        return os.environ["HEADSTART_LITELLM_ENV"] + "/bin/python"
    folder = tmp_path_factory.mktemp("litellm")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=SECONDS)
    packages = [str(ROOT), f"litellm=={SUPPORTED['litellm'][-1]}"]
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True, timeout=SECONDS)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("replicas")
    command = [sys.executable, "-m", "headstart", "serve", "--port", "0", "--num-blocks", "512"]
    with spawn(command, folder / "a") as first, spawn(command, folder / "b") as second:
        yield [first.wait_ready(), second.wait_ready()]


def test_requests_of_the_python_router_go_where_their_prefix_is(python: str, replicas: list[Server]) -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "plugins/src"))
    environment = {**os.environ, "PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [python, "-c", SCRIPT, *(replica.url for replica in replicas)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    later = list(zip(found["cached"], found["prompt"], strict=True))[3:]
    assert all(cached >= prompt // 2 for cached, prompt in later), found  # the first request of each prompt is cold
    assert found["streamed"] > 0
    assert found["answered"] == 6
    assert found["in_flight"] == 0  # not even the stream that was closed early
    assert found["reported"] >= 19
