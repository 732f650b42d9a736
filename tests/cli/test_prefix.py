"""`headstart serve` with [[prefix]] tables, and `headstart prefix` against it: the real thing, end to end."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.harness import Server, spawn

from headstart.cli import main as cli
from headstart.model.weights.init_model import write_random_model

SENTENCE = "you sort what people say to their house into one of sixty intents and answer with nothing else; "
CONFIG = """
admin_api_key = "root"
[[tenant]]
name = "acme"
api_keys = ["a"]
[[prefix]]
name = "intent"
file = "intent.txt"
[[prefix]]
name = "broken"
file = "nope.txt"
[[prefix]]
name = "own"
tenant = "acme"
messages = [{role = "system", content = "you answer for acme and for nobody else, in one short and friendly line"}]
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    room = tmp_path_factory.mktemp("prefixes")
    model = write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)
    (room / "headstart.toml").write_text(CONFIG, encoding="utf-8")
    (room / "intent.txt").write_text(SENTENCE * 6, encoding="utf-8")
    options = [
        "--config",
        str(room / "headstart.toml"),
        "--port",
        "0",
        "--num-blocks",
        "256",
        "--max-model-len",
        "1024",
    ]
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options], room / "log") as server:
        yield server.wait_ready()


@pytest.fixture(autouse=True)
def as_administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_ADMIN_API_KEY", "root")
    monkeypatch.setenv("COLUMNS", "160")


def prefix(server: Server, *arguments: str) -> int:
    return cli.main(["prefix", *arguments, "--url", server.url])


def cached(server: Server, text: str, key: str = "a") -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": text, "max_tokens": 1}
    answer = server.post("/v1/completions", json=body, headers=headers)
    return answer.json()["usage"]["prompt_tokens_details"]["pinned_tokens"]


def test_the_first_request_hits_what_the_file_names(running: Server, capsys: pytest.CaptureFixture[str]) -> None:
    lines = running.log
    assert "prefix 'broken' is not there: cannot read" in lines
    assert 0 < lines.index("2 of 3 prefixes are warm") < lines.index("serves tiny")  # ready means warm
    assert prefix(running, "list", "--json") == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["data"]}
    assert [entry["state"] for entry in entries.values()] == ["ready", "ready", "malformed"]
    assert (entries["own"]["tenant"], entries["intent"]["hits"]) == ("acme", 0)
    assert cached(running, SENTENCE * 6 + "play music") == entries["intent"]["tokens"] >= 96


def test_a_prefix_is_added_shown_and_removed(
    running: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "another beginning of many prompts, " * 5
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    assert prefix(running, "add", "later", "--file", str(tmp_path / "text.txt")) == 0
    assert "later" in capsys.readouterr().out
    assert cached(running, text + "one of them") >= 16
    assert prefix(running, "list") == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("tokens saved", "later", "public", "acme", "broken", "malformed", "s ago"))
    assert prefix(running, "remove", "later") == 0
    assert capsys.readouterr().out == "later is no longer pinned\n"
    assert prefix(running, "remove", "later") == 2
    assert "there is no prefix 'later'" in capsys.readouterr().err


def test_messages_come_from_a_json_file_and_a_tenant_may_be_named(
    running: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": SENTENCE}]
    (tmp_path / "system.json").write_text(json.dumps(messages), encoding="utf-8")
    path = str(tmp_path / "system.json")
    assert prefix(running, "add", "chat", "--messages", path, "--tenant", "acme", "--json") == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["state"], entry["tenant"]) == ("ready", "acme")
    assert prefix(running, "remove", "chat", "--json") == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["add", "x"], "give exactly one of TEXT, --file and --messages"),
        (["add", "x", "text", "--file", "y"], "give exactly one of"),
        (["add", "x", "--file", "/nowhere/y"], "cannot read /nowhere/y"),
        (["add", "a/b", SENTENCE], "'a/b' is not a valid prefix name"),
        (["add", "x", SENTENCE, "--tenant", "stranger"], "tenant 'stranger' is not one of those"),
        (["add", "intent", SENTENCE], "there is a prefix 'intent' already"),
    ],
)
def test_a_mistake_is_one_line(
    running: Server, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert prefix(running, *arguments) == 2
    errors = capsys.readouterr().err
    assert complaint in errors and errors.count("\n") == 1


def test_tenants_may_not_administer(
    running: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_ADMIN_API_KEY", "a")
    assert prefix(running, "list") == 2
    assert "not an administrator's" in capsys.readouterr().err
