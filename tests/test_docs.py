"""The pages say what is so: generated parts are current, links lead somewhere, commands and flags exist."""

import ast
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from model.tiny import FAMILIES, HYBRIDS

from headstart.apis.openapi import request_body_schema
from headstart.cli import main as cli
from headstart.config.config_file import OPTION_CLASSES, all_option_fields, merge_option_sources
from headstart.config.option_hints import HINTS
from headstart.config.options import flag_name
from headstart.openai.request_bodies import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
START = ROOT / "docs" / "README.md"
PATH = re.compile(r"https?://127\.0\.0\.1:8000(/[a-z0-9_/]*[a-z0-9_])")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(*pages: Path) -> list[str]:
    """Every line of every shell block, without comments, continued lines joined, variables before a command removed."""
    text = "\n".join(block for page in pages for language in ("bash", "sh") for block in blocks(page, language))
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = (re.split(r"(?:^|\s)#", line)[0].strip() for line in lines)
    return [re.sub(r"^([A-Z_]+=\S+ )+", "", command) for command in found if command]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them from its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_generated_parts_are_current() -> None:
    outdated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["outdated"]()
    assert [path.name for path in outdated] == [], "run: make docs"


def broken(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead to no file, or to no heading of one."""
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        target = target / "README.md" if target.is_dir() and anchor else target
        if not target.exists() or (anchor and anchor not in headings(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(broken(page)) == []


def test_every_page_can_be_reached_from_the_first() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", START.read_text(encoding="utf-8"))
    named = {(START.parent / link).resolve() for link in links}
    assert [page.name for page in PAGES if page != START and page not in named] == []


def test_make_targets_in_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {word for command in commands(*PAGES) if command.startswith("make ") for word in [command.split()[1]]}
    assert named and named <= targets


HEADSTART_COMMANDS = [command for command in commands(*PAGES) if command.startswith("headstart ")]


def parsed(command: str) -> dict[str, Any]:
    """The values of a command line, read by the parser of its verb, which does not run."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words = list(lexer)
    ends = (number for number, word in enumerate(words) if set(word) <= set("|&;<>"))
    context: Any = typer.main.get_command(cli.app).make_context("headstart", words[1 : next(ends, None)])
    while hasattr(context.command, "commands") and (rest := [*context._protected_args, *context.args]):
        _, verb, rest = context.command.resolve_command(context, rest)
        context = verb.make_context(verb.name, rest, parent=context)
    return context.params


@pytest.mark.parametrize("command", HEADSTART_COMMANDS)
def test_headstart_commands_in_the_pages_are_read_by_their_parsers(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = parsed(command)
    if "config" in values:  # a verb with options, which have bounds
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v not in (None, [])}
        for options in OPTION_CLASSES:
            merge_option_sources(options, given)
    assert capsys.readouterr().err == ""  # no flag is left out as not needed


@pytest.mark.parametrize("command", ["headstart serve --prot 80", "headstart sreve", "headstart bench lab pik"])
def test_a_mistyped_command_is_found(command: str) -> None:
    with pytest.raises(typer.BadParameter.__mro__[1]):
        parsed(command)


def flags(text: str) -> set[str]:
    return {flag for code in re.findall(r"`([^`]+)`", text) for flag in re.findall(r"(?<![\w-])-[-a-z]+", code)}


def test_flags_of_other_servers_have_the_replacement_that_the_first_page_names() -> None:
    table = START.read_text(encoding="utf-8").split("| vLLM | llama.cpp |")[1].split("\n\n")[0]
    own = {flag_name(field.name) for field in all_option_fields()} | {"--no-enable-prefix-caching"}
    rows = [re.split(r" *\| *", line.strip("|")) for line in table.splitlines()[2:]]
    assert len(rows) > 20
    for vllm, llama_cpp, _, here in (row[-5:-1] if row[-1] == "" else row[-4:] for row in rows):
        assert flags(here) <= own
        for flag in (flags(vllm) | flags(llama_cpp)) - own:
            named = set(re.findall(r"--[a-z-]+", HINTS[flag]))
            assert not flags(here) or not named or named & flags(here), (flag, HINTS[flag], here)


def test_requests_of_the_first_page_are_json_to_paths_that_are_served() -> None:
    asked = [command for command in commands(START) if command.startswith("curl ")]
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for command in asked:
        words = shlex.split(command)
        for body in (after for word, after in pairwise(words) if word == "-d"):
            assert isinstance(json.loads(body), dict), command
    paths = {path for command in asked for path in PATH.findall(command)}
    assert paths and [path for path in paths if f"`{path}`" not in api] == []


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
    bodies = json.dumps(request_body_schema(CompletionRequest, ChatRequest))
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
    assert sorted(rows) == sorted(FAMILIES | HYBRIDS)


def texts(source: str) -> Iterator[str]:
    """Yield the text constants of Python code, those of an f-string joined, with a mark where a value stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src/headstart").rglob("*.py"))
    said = "\n".join(text for source in sources for text in texts(source))
    quoted = [text for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)]
    parts = [part.strip(" ;") for text in quoted if " " in text for part in text.split("...")]
    assert len(parts) > 60
    assert [part for part in parts if part not in said] == []


def test_files_that_contributing_names_exist() -> None:
    named = re.findall(r"`([\w/.-]+\.(?:py|h|cpp|toml|jinja|md))`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    known = {
        path.as_posix() for folder in ("src", "lab", "tests", "docs", ".ci") for path in (ROOT / folder).rglob("*.*")
    }
    assert len(named) > 30
    for name in set(named) - {"headstart.toml"}:
        assert (ROOT / name).exists() or any(path.endswith(f"/{name}") for path in known), name


def test_tests_that_the_reliability_page_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", (ROOT / "docs" / "reliability.md").read_text("utf-8")))
    known = {path.name for folder in ("tests", "lab/tests", "plugins/tests") for path in (ROOT / folder).rglob("*.py")}
    assert len(named) > 100
    assert sorted(named - known) == []


def test_no_page_is_too_long_to_read() -> None:
    """Generated tables do not count. Figures belong into benchmarks/, history into git; else make two pages."""
    words = {
        page.relative_to(ROOT).as_posix(): len(
            re.sub(r"<!-- generated.*?end -->", "", page.read_text("utf-8"), flags=re.DOTALL).split()
        )
        for page in PAGES
    }
    assert {name: count for name, count in words.items() if count > 5_500} == {}
