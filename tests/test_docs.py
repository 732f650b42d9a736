"""The pages say what is so: generated parts are current, links lead somewhere, commands and flags exist."""

import ast
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from model.tiny import FAMILIES

from headstart.cli import main as cli
from headstart.openai.openapi import request_body
from headstart.openai.request_bodies import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of every bash block, without comments, continued lines joined."""
    text = "\n".join(block for page in PAGES for block in blocks(page, "bash"))
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [command for line in lines if (command := re.split(r"\s#", line)[0].strip())]


def test_generated_parts_are_current() -> None:
    outdated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["outdated"]()
    assert [path.name for path in outdated] == [], "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_make_targets_in_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {word for command in commands() if command.startswith("make ") for word in [command.split()[1]]}
    assert named and named <= targets


HEADSTART_COMMANDS = [command for command in commands() if command.startswith("headstart ")]


@pytest.mark.parametrize("command", HEADSTART_COMMANDS)
def test_headstart_commands_in_the_pages_have_that_verb_and_those_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)[1:]
    verb = (
        words[: {"bench": 3 if words[1] == "lab" else 2, "prefix": 2, "store": 2}.get(words[0], 1)]
        if len(words) > 1
        else words
    )
    assert cli.main([*verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in shown] == []


def test_the_pages_show_every_verb() -> None:
    shown = {command.split()[1] for command in HEADSTART_COMMANDS}
    assert shown >= {"serve", "generate", "doctor", "init-model", "bench", "explain"}


def test_python_in_the_pages_compiles_and_imports_what_exists() -> None:
    code = [block for page in PAGES for block in blocks(page, "python")]
    assert len(code) >= 2
    for block in code:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "headstart":
                assert {alias.name for alias in node.names} <= {"LLM", "Completion", "SamplingParams"}


def test_parameters_and_paths_of_the_api_page_are_known_to_the_server() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    files = [
        path
        for folder in ("openai", "ollama", "apis", "server")
        for path in (ROOT / "src/headstart" / folder).rglob("*.py")
    ]
    bodies = json.dumps(request_body(CompletionRequest, ChatRequest))
    sources = "\n".join([bodies, *(path.read_text(encoding="utf-8") for path in files)])
    rows = re.findall(r"^\| (.*?) \|", page.split("## Usage")[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`\.?([a-z_]+)`", row)]
    paths = [path for row in rows for path in re.findall(r"`(/[a-z0-9_/]+)", row)]
    assert len(names) > 30 and len(paths) > 8
    assert [name for name in names if f'"{name}"' not in sources] == []
    assert [path for path in paths if f'"{path}' not in sources] == []


def test_error_codes_of_the_api_page_are_sent_by_someone() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("## Errors")[1]
    codes = re.findall(r"`([a-z]+_[a-z_]+)`", " ".join(re.findall(r"^\| [\d, ]+ \| (.*?) \|", page, re.MULTILINE)))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/headstart").rglob("*.py"))
    assert len(codes) > 10
    assert [code for code in codes if f'"{code}"' not in sources] == []


def test_the_models_page_lists_the_families_that_are_tested() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([a-z0-9_]+)` \|", (ROOT / "docs" / "models.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(FAMILIES)
