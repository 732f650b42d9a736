"""The package without its extra [engine]: routers, pickers, simulations and clients run, and an engine is refused."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.harness import PATIENCE, Server, fake_server, quiet_port, spawn
from tokenizer_folders import BYTE_LEVEL, write

from headstart.engine.engine_checks import ENGINE_PACKAGES

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITHOUT = f"""
import runpy, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
missing = {(*ENGINE_PACKAGES, "matplotlib", "kubernetes_asyncio", "ray", "opentelemetry")!r}
PathFinder.find_spec = staticmethod(lambda name, path=None, target=None: (
    None if name.split(".")[0] in missing else find(name, path, target)))
"""
"""Code after which Python finds none of the packages of the extras."""


def headstart(*words: str) -> list[str]:
    """The command `headstart` where these packages are not installed."""
    code = f"{WITHOUT}\nsys.argv[0] = 'headstart'\nrunpy.run_module('headstart', run_name='__main__')"
    return [sys.executable, "-c", code, *words]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(headstart(*words), capture_output=True, text=True, timeout=PATIENCE)


def names(requirements: list[str]) -> set[str]:
    return {found[0] for one in requirements if (found := re.match(r"[A-Za-z0-9_.-]+", one))}


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    room = tmp_path_factory.mktemp("replica")
    with fake_server(str(write(room / "model", BYTE_LEVEL)), room / "log") as server:
        yield server


def test_the_packages_of_an_engine_are_an_extra_and_no_others() -> None:
    assert names(PROJECT["optional-dependencies"]["engine"]) == set(ENGINE_PACKAGES)
    assert not names(PROJECT["dependencies"]) & set(ENGINE_PACKAGES)


@pytest.mark.parametrize(
    "words",
    [
        ["serve"],
        ["serve", "--replicas", "2"],
        ["generate", "hello"],
        ["doctor"],
        ["init-model", "--shape", "tiny", "unused"],
        ["bench", "decode"],
    ],
)
def test_an_engine_is_refused_in_one_line_that_names_the_extra(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "torch" in line and line.endswith("install it: pip install 'headstart[engine]'")


def test_traces_are_refused_in_one_line_that_names_the_extra() -> None:
    url = "http://127.0.0.1:9"
    done = run("route", "--replica", url, "--port", "0", "--otlp-endpoint", url)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert re.fullmatch(r"headstart: --otlp-endpoint needs opentelemetry\S*: pip install 'headstart\[otlp\]'", line)


def test_the_class_llm_is_refused_alike() -> None:
    code = f"{WITHOUT}\nimport headstart\nprint(headstart.SamplingParams().temperature)\nheadstart.LLM()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "1.0\n" and "ConfigError" in done.stderr.splitlines()[-1]
    assert "pip install 'headstart[engine]'" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--ext-proc"]])
def test_a_router_and_a_picker_route(replica: Server, tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, f"127.0.0.1:{quiet_port()}"] if flags else []
    with spawn(headstart("route", "--port", "0", "--replica", replica.url, *flags), tmp_path / "log") as router:
        router.wait_ready()
        model = router.get("/v1/models").json()["data"][0]["id"]
        chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        for path, body in (("chat/completions", chat), ("completions", {"model": model, "prompt": "Hello"})):
            assert router.post(f"/v1/{path}", json=body).json()["usage"]["prompt_tokens"] > 0
        assert router.stop() == 0


def test_benchmarks_run_against_a_server(replica: Server) -> None:
    sizes = ["--groups", "1", "--prompts", "2", "--prefix-tokens", "16", "--vocab-size", "256", "--runs", "1"]
    assert document(run("bench", "shared-prefix", "--against", replica.url, *sizes))["bench"] == "shared-prefix"


def test_a_fleet_is_simulated_and_planned() -> None:
    fleet = ["--synthetic", "decode-heavy", "--requests", "30"]
    assert document(run("simulate", *fleet, "--replicas", "2"))["points"][0]["requests"] == 30


def document(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """The JSON document on the last line of stdout."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
