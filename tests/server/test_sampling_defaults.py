"""Sampling defaults of generation_config.json: what is read of it, and what of it reaches the engine."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizer_folders
from openai import AsyncOpenAI
from server.harness import Inside, inside, spawn

from headstart.bundled import bundled_intent_model_folder
from headstart.config.options import ServerOptions
from headstart.core.errors import ConfigError
from headstart.core.request import Request, SamplingDefaults, SamplingParams
from headstart.model.weights.init_model import write_random_model
from headstart.openai.sampling_defaults import read_sampling_defaults
from headstart.server.banner import startup_banner

PUBLISHED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "max_new_tokens": 40,
    "eos_token_id": [1, 3],
    "bos_token_id": 0,
    "transformers_version": "4.51.0",
}
READ = SamplingDefaults(0.6, 0.95, 20, 0.01, 1.05, 40)
NULLS = dict.fromkeys(
    ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "max_completion_tokens")
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def model(folder: Path, values: object = None) -> Path:
    """Writes a model folder for a fake engine, with a generation_config.json if there are values for it."""
    tokenizer_folders.write(folder, tokenizer_folders.BYTE_LEVEL)
    if values is not None:
        (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


# --------------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (PUBLISHED, READ),
        ({}, SamplingDefaults()),
        ({"eos_token_id": 1, "top_k": None, "temperature": None}, SamplingDefaults()),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingDefaults(temperature=0.0, top_p=0.9)),
        ({"temperature": 0.6}, SamplingDefaults(temperature=0.6)),
        ({"temperature": 1, "top_k": 0}, SamplingDefaults(temperature=1.0, top_k=0)),
    ],
)
def test_the_models_own_file_is_read(tmp_path: Path, values: object, expected: SamplingDefaults) -> None:
    assert read_sampling_defaults(model(tmp_path, values)) == expected


def test_a_model_without_the_file_sets_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(model(tmp_path)) == SamplingDefaults()


@pytest.mark.parametrize("source", ["none", "vllm"])
def test_none_reads_nothing(tmp_path: Path, source: str) -> None:
    assert read_sampling_defaults(model(tmp_path, {"temperature": "broken"}), source) == SamplingDefaults()


def test_another_folder_or_file_may_be_named(tmp_path: Path) -> None:
    own, other = model(tmp_path / "own", {"temperature": 0.1}), model(tmp_path / "other", {"top_p": 0.5})
    for source in (other, other / "generation_config.json"):
        assert read_sampling_defaults(own, str(source)) == SamplingDefaults(top_p=0.5)


@pytest.mark.parametrize("source", ["", "nowhere", "."])
def test_what_is_no_source_is_a_configuration_error(tmp_path: Path, source: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^generation_config is .*; it must be auto, none, or a folder"):
        read_sampling_defaults(tmp_path, source)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": 2.5}, "temperature is 2.5; it must be between 0 and 2"),
        ({"temperature": "0.6"}, "temperature is '0.6'; it must be a number between 0 and 2"),
        ({"temperature": True}, "temperature is true; it must be a number between 0 and 2"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"min_p": -1}, "min_p is -1; it must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0"),
        ({"top_k": 50.0}, "top_k is 50.0; it must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be between 1"),
        ({"do_sample": "no"}, "do_sample is 'no'; it must be true or false"),
        ([], "is not a JSON object"),
    ],
)
def test_what_no_request_could_ask_for_is_a_configuration_error(tmp_path: Path, values: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sampling_defaults(model(tmp_path, values))
    message = str(caught.value)
    assert complaint in message and "generation_config.json" in message and "\n" not in message
    assert "--generation-config none" in message or values == []


@pytest.mark.parametrize(
    "text", ["{broken", '{"temperature": NaN}', "[" * 100_000, "\0", '{"top_k": ' + "9" * 5000 + "}"]
)
def test_what_cannot_be_read_is_a_configuration_error_in_one_line(tmp_path: Path, text: str) -> None:
    (model(tmp_path) / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json") as caught:
        read_sampling_defaults(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


# ---------------------------------------------------------------------------------------------- what reaches the engine


def sampled(folder: Path, ask: Callable[[Inside], Awaitable[object]], source: str = "auto") -> SamplingParams:
    """Return the parameters that the engine gets when `ask` asks a server of that model."""

    async def run() -> SamplingParams:
        async with inside(str(folder), generation_config=source) as server:
            found: list[SamplingParams] = []
            submit = server.engine.submit

            def note(requests: Sequence[Request]) -> Any:
                found.extend(request.sampling for request in requests)
                return submit(requests)

            server.engine.submit = note  # type: ignore[method-assign]
            await ask(server)
            [only] = found
            return only

    return asyncio.run(run())


def defaults_of(sampling: SamplingParams) -> SamplingDefaults:
    return SamplingDefaults(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.max_tokens,
    )


def posting(path: str, **fields: Any) -> Callable[[Inside], Awaitable[object]]:
    async def ask(server: Inside) -> None:
        prompt = (
            {"prompt": "the fox"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "the fox"}]}
        )
        answer = await server.client.post(path, json={**prompt, **fields})
        assert answer.status_code == 200, answer.text

    return ask


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields", [{}, NULLS])
def test_what_a_request_leaves_out_is_the_models(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    assert defaults_of(sampled(model(tmp_path, PUBLISHED), posting(path, **fields))) == READ


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_a_request_says_wins(tmp_path: Path, path: str) -> None:
    said = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 90}
    expected = SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0, 90)
    assert defaults_of(sampled(model(tmp_path, PUBLISHED), posting(path, **said))) == expected
    other = {"temperature": 0, "max_completion_tokens": 3}
    expected = SamplingDefaults(0.0, 0.95, 20, 0.01, 1.05, 3)
    assert defaults_of(sampled(tmp_path, posting(path, **other))) == expected


@pytest.mark.parametrize("source", ["none", "auto"])
def test_without_defaults_the_apis_own_hold(tmp_path: Path, source: str) -> None:
    folder = model(tmp_path, PUBLISHED if source == "none" else None)
    for path, longest in ((COMPLETIONS, 16), (CHAT, None)):
        found = defaults_of(sampled(folder, posting(path), source))
        assert found == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0, longest or found.max_tokens)
        assert longest or (found.max_tokens or 0) > 400  # what the context of 512 leaves


def test_greedy_by_the_model_is_sampled_if_a_request_asks_for_it(tmp_path: Path) -> None:
    folder = model(tmp_path, {"do_sample": False})
    assert sampled(folder, posting(CHAT)).temperature == 0.0
    assert sampled(folder, posting(CHAT, temperature=0.8)).temperature == 0.8


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_models_longest_output_is_limited_by_context_and_min_tokens(tmp_path: Path, path: str) -> None:
    folder = model(tmp_path / "long", {"max_new_tokens": 10_000})
    assert 400 < sampled(folder, posting(path)).max_tokens < 512
    folder = model(tmp_path / "short", {"max_new_tokens": 5})
    assert sampled(folder, posting(path, min_tokens=9)).max_tokens == 9
    assert sampled(folder, posting(path)).max_tokens == 5


def openai(server: Inside) -> AsyncOpenAI:
    over: Any = server.client  # the package's own fork of httpx takes it too
    return AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=over)


def test_the_openai_client_gets_the_models_defaults_for_what_it_does_not_name(tmp_path: Path) -> None:
    async def chat(server: Inside) -> None:
        async with openai(server) as client:
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "the fox"}])

    async def complete(server: Inside) -> None:
        async with openai(server) as client:
            await client.completions.create(model="fake", prompt="the fox", top_p=0.5)

    folder = model(tmp_path, PUBLISHED)
    assert defaults_of(sampled(folder, chat)) == READ
    assert defaults_of(sampled(folder, complete)) == SamplingDefaults(0.6, 0.5, 20, 0.01, 1.05, 40)


def test_the_defaults_in_force_are_told(tmp_path: Path) -> None:
    async def run(folder: Path) -> tuple[dict[str, Any], str]:
        async with inside(str(folder)) as server:
            [told] = (await server.client.get("/v1/models")).json()["data"]
            return told["default_sampling_params"], startup_banner(
                server.state.loaded_model, ServerOptions(), "127.0.0.1", 8000
            )

    told, text = asyncio.run(run(model(tmp_path / "a", {"temperature": 0.6, "max_new_tokens": 40})))
    assert told == {"temperature": 0.6, "max_tokens": 40}
    assert "  default temperature 0.6, max_tokens 40" in text
    told, text = asyncio.run(run(model(tmp_path / "b")))
    assert told == {} and "default" not in text


def test_a_value_out_of_bounds_stops_the_real_server_at_its_start(tmp_path: Path) -> None:
    folder = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 7}))
    command = [sys.executable, "-m", "headstart", "serve", str(folder), "--port", "0"]
    with spawn(command, tmp_path / "log") as server:
        assert server.wait() == 2
        [line] = [line for line in server.log.splitlines() if "temperature" in line]
        assert line.startswith("headstart: ") and "temperature is 7; it must be between 0 and 2" in line
    with spawn([*command, "--generation-config", "none"], tmp_path / "log") as server:
        assert server.wait_ready().get("/v1/models").json()["data"][0]["default_sampling_params"] == {}


def test_the_bundled_model_answers_greedily_by_default() -> None:
    assert read_sampling_defaults(bundled_intent_model_folder()) == SamplingDefaults(temperature=0.0, max_tokens=96)
