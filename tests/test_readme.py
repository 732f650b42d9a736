"""The examples of README.md, run against the server that `make serve` starts: their answers are those shown there."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server.harness import Server, spawn

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, "-m", "headstart", "serve", "--port", "0", "--num-blocks", "256"]
    with spawn(command, tmp_path_factory.mktemp("server") / "log", truly=True) as started:
        yield started.wait_ready()


def test_the_first_example_gives_the_answers_that_are_shown(server: Server) -> None:
    part = README[README.index("It does one task") :]  # the chat before it: tests/real/test_real_gguf.py
    example = re.search(r"curl -s (\S+/v1/chat/completions) .*? -d '(.*?)'\n```", part, re.DOTALL)
    shown = re.findall(r'^"content": ("\{.*\}")\n"usage": (.*), \.\.\.\}\}$', README, re.MULTILINE)
    assert example is not None and example[1].startswith(ADDRESS) and len(shown) == 2
    body = json.loads(example[2])
    sentences = [body["messages"][1]["content"], "Could you make it dark in the kitchen?"]
    for sentence, (content, usage) in zip(sentences, shown, strict=True):
        body["messages"][1]["content"] = sentence
        answer = server.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == json.loads(content)
        expected = json.loads(usage + "}}")
        details = expected.pop("prompt_tokens_details")
        assert details.items() <= answer["usage"].pop("prompt_tokens_details").items()
        assert answer["usage"] == expected and sentence in README


def run_example(server: Server, word: str) -> str:
    """Runs the first Python example with `word` against the server, and returns its output."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in block)
    assert ADDRESS in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace(ADDRESS, server.url)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_with_the_openai_client_runs(server: Server) -> None:
    assert run_example(server, "cached_tokens)").split()[-1].isdecimal()


def test_the_example_with_a_schema_runs(server: Server) -> None:
    assert re.fullmatch(r"room='(kitchen|hall)' on=(True|False)\n", run_example(server, "class Lamp"))


def test_the_client_of_the_example_is_answered_rightly(server: Server) -> None:
    command = [sys.executable, str(ROOT / "examples/intent/client.py"), "--base-url", f"{server.url}/v1", "--num", "5"]
    done = subprocess.run([*command, "--min-accuracy", "0.8"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
