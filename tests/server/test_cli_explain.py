"""`headstart explain` against `headstart serve`, and the openai package reading where its tokens came from."""

import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from server.harness import Server

from headstart.cli import main as cli
from headstart.cli.client_request import KEY_VARIABLES, api_key_from_environ
from headstart.cli.explain import wrap_first_paragraph

PROMPT = "Nobody but this file begins a prompt like this, so what it finds is what it left. The day is "


@pytest.fixture(scope="module")
def answers(real_server: Server) -> list[Any]:
    """One prompt twice, then one that parts from it."""
    with OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        days = ("Monday, and all is well", "Monday, and all is well", "Tuesday, and all is well")
        return [client.completions.create(model="tiny", prompt=PROMPT + day, max_tokens=1) for day in days]


def explained(capsys: pytest.CaptureFixture[str], server: Server, *arguments: str) -> str:
    assert cli.main(["explain", *arguments, "--url", server.url]) == 0
    return capsys.readouterr().out


def test_the_openai_client_reads_the_sources(answers: list[Any]) -> None:
    for answer, is_cold in zip(answers, (True, False, False), strict=True):
        details = answer.usage.prompt_tokens_details
        sources = details.model_extra
        assert set(sources) == {"pinned_tokens", "shared_tokens", "store_tokens", "followed_tokens"}
        assert sum(sources.values()) == details.cached_tokens and (details.cached_tokens == 0) is is_cold


def test_people_read_what_differs(capsys: pytest.CaptureFixture[str], real_server: Server, answers: list[Any]) -> None:
    _, twin, other = answers
    told = explained(capsys, real_server, other.id)
    cached, total = other.usage.prompt_tokens_details.cached_tokens, other.usage.prompt_tokens
    assert told.startswith(f"{cached:,} of {total:,} prompt tokens were cached ({cached:,} shared).")
    assert twin.id in told and "Mon" in told and "Tue" in told and max(map(len, told.splitlines())) <= 110


def test_programs_read_json(capsys: pytest.CaptureFixture[str], real_server: Server, answers: list[Any]) -> None:
    found = json.loads(explained(capsys, real_server, answers[2].id, "--json"))
    assert (found["reason"], found["near_match"]["request_id"]) == ("diverged", answers[1].id)


def test_a_prompt_comes_as_text_from_a_file_or_from_stdin(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    real_server: Server,
    answers: list[Any],
    tmp_path: Path,
) -> None:
    text = PROMPT + "Monday, and all is well"
    told = explained(capsys, real_server, "--prompt", text)
    assert "would be cached if it began now" in told
    plain, body = tmp_path / "prompt.txt", tmp_path / "body.json"
    plain.write_text(text, encoding="utf-8")
    body.write_text(json.dumps({"prompt": text, "max_tokens": 3}), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    for source in (plain, body, "-"):
        assert explained(capsys, real_server, "--file", str(source)) == told
    chat = json.loads(explained(capsys, real_server, "--chat", "--prompt", text, "--json"))
    assert chat["prompt_tokens"] != answers[0].usage.prompt_tokens


def test_mistakes_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], real_server: Server, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
        for arguments, said in (
            (["--url", nowhere, "x"], "no server answers"),
            (["--url", real_server.url, "cmpl-nobody"], "not among the recent ones"),
            (["--url", "nonsense", "x"], "not an address"),
            ([], "give one of ID, --prompt and --file"),
            (["x", "--prompt", "y"], "2 were given"),
            (["x", "--chat"], "--chat applies to --prompt and --file only"),
            (["--file", str(tmp_path / "none")], "cannot read"),
        ):
            assert cli.main(["explain", *arguments]) == 2
            shown = capsys.readouterr()
            assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_the_key_comes_from_the_environment() -> None:
    admin, tenant = KEY_VARIABLES
    assert api_key_from_environ({}) is None and api_key_from_environ({tenant: " a , b"}) == "a"
    assert (
        api_key_from_environ({tenant: "a", admin: "root"}) == "root"
        and api_key_from_environ({tenant: "a", admin: ""}) == "a"
    )


def test_only_the_paragraph_is_wrapped() -> None:
    message = "word " * 60 + "end.\n  this:  '" + "x" * 130 + "'"
    *paragraph, below = wrap_first_paragraph(message).split("\n")
    assert len(paragraph) == 4 and max(map(len, paragraph)) <= 100 and below.endswith("x'")
