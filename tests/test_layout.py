"""The rules that keep the source readable: lines per folder, one name per class, no splinters, no import of benchmarks.

A budget may only fall: raising one, or adding to a list of exceptions, is a commit of its own that says why.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "headstart"
LAB = ROOT / "lab" / "src" / "headstart_lab"


def modules(folder: Path) -> dict[str, str]:
    """Return the Python source below a folder by relative path, but for generated code."""
    found = sorted(path for path in folder.rglob("*.py") if not path.name.endswith("_pb2.py"))
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in found}


SOURCES = modules(SRC)


class Budget(NamedTuple):
    """Folders that share a number of lines; `target` is where they are to be."""

    folders: tuple[str, ...]
    lines: int
    target: int


BUDGETS = {
    "core": Budget(("core",), 7_473, 6_000),
    "model": Budget(("model",), 13_141, 8_000),
    "reuse": Budget(("reuse",), 2_325, 2_000),
    "router": Budget(("router",), 4_400, 4_100),
    "gateway": Budget(("gateway",), 11_241, 9_200),
    "APIs and text": Budget(("openai", "anthropic", "ollama", "apis", "server/apis"), 14_697, 10_100),
    "HTTP, server, engine": Budget(("http", "server", "engine"), 8_809, 7_500),
    "live page": Budget(("page",), 260, 300),
    "store": Budget(("store",), 3_757, 2_300),
    "sim": Budget(("sim",), 2_806, 2_900),
    "all": Budget(("",), 78_259, 58_900),
}
REST = Budget(("",), 9_357, 6_800)  # what no other budget but that of all includes
MAX_SLACK = 500  # lines below a budget at which it is to be lowered


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(not folder or path == folder or path.startswith(f"{folder}/") for folder in folders)


def lines_by_budget(sources: Mapping[str, str], budgets: Mapping[str, Budget]) -> Counter[str]:
    """Return the lines that count against each budget: those of the folder that is named most exactly, and of all."""
    found: Counter[str] = Counter()
    for path, source in sources.items():
        names = [name for name, budget in budgets.items() if name != "all" and is_below(path, budget.folders)]
        longest = max(
            names, key=lambda name: max(len(f) for f in budgets[name].folders if is_below(path, (f,))), default=""
        )
        for name in ("all", longest or "the rest"):
            found[name] += source.count("\n")
    return found


def over_budget(lines: Mapping[str, int], budgets: Mapping[str, Budget]) -> list[str]:
    found: list[str] = []
    for name, budget in budgets.items():
        count = lines.get(name, 0)
        if count > budget.lines:
            found.append(f"{name}: {count} lines, {budget.lines} allowed, target {budget.target}")
        elif count < budget.lines - MAX_SLACK:
            found.append(f"{name}: {count} lines; lower its budget of {budget.lines}")
    return found


def test_every_folder_keeps_to_its_lines() -> None:
    budgets = {**BUDGETS, "the rest": REST}
    assert over_budget(lines_by_budget(SOURCES, BUDGETS), budgets) == []


def test_a_line_too_many_and_a_budget_too_large_are_found() -> None:
    budgets = {"core": Budget(("core",), 2, 2), "all": Budget(("",), 700, 2)}
    lines = lines_by_budget({"core/x.py": "a\nb\nc\n", "server/apis/x.py": "a\n"}, budgets)
    assert lines == {"core": 3, "all": 4, "the rest": 1}
    assert over_budget(lines, budgets) == [
        "core: 3 lines, 2 allowed, target 2",
        "all: 4 lines; lower its budget of 700",
    ]


def public_classes(sources: Mapping[str, str]) -> Counter[str]:
    """Return the public classes by name, with their number."""
    return Counter(
        node.name
        for source in sources.values()
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


SHARED_NAMES: dict[str, int] = {}
SHARED_NAMES_OF_LAB: dict[str, int] = {
    "Answer": 4,
    "Call": 2,
    "Case": 2,
    "Difference": 2,
    "Form": 3,
    "Fuzz": 2,
    "Memory": 2,
    "Outcome": 2,
    "Replica": 2,
    "Served": 3,
    "Server": 2,
    "Turn": 3,
    "Workload": 2,
}


@pytest.mark.parametrize(("folder", "known"), [(SRC, SHARED_NAMES), (LAB, SHARED_NAMES_OF_LAB)], ids=["src", "lab"])
def test_no_two_public_classes_have_one_name(folder: Path, known: dict[str, int]) -> None:
    found = {name: count for name, count in public_classes(modules(folder)).items() if count > 1}
    assert found == known, "rename the new one, or shorten the list"


def test_a_second_class_of_one_name_is_found() -> None:
    sources = {"a.py": "class Plan: ...\nclass _Own: ...", "b.py": "class Plan: ...\nclass _Own: ...\nclass Other: ..."}
    assert public_classes(sources) == {"Plan": 2, "Other": 1}


MIN_LINES = 80  # of a module that only one other imports


def importers(sources: Mapping[str, str], others: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that import each module of the package, by path; `others` are outside of the package."""
    names = {"headstart." + path.removesuffix(".py").replace("/", "."): path for path in sources}
    found: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in (*sources.items(), *((f"lab/{path}", source) for path, source in others.items())):
        for name in _imported(ast.parse(source)):
            if name in names:
                found[names[name]].add(path)
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def splinters(sources: Mapping[str, str], others: Mapping[str, str]) -> set[str]:
    """Return the short modules that a single module imports; verbs of the command line stay apart for a fast --help."""
    return {
        path
        for path, users in importers(sources, others).items()
        if len(users) == 1 and sources[path].count("\n") < MIN_LINES and not path.startswith(("cli/", "__main__"))
    }


KNOWN_SPLINTERS: set[str] = {
    "core/grammars.py",
    "core/sched/queued_block_refs.py",
    "http/protocol/http_refusals.py",
    "http/protocol/write_watch.py",
    "model/layers/quantise.py",
    "model/source_digest.py",
    "router/health.py",
    "router/index/cached_tokens.py",
    "router/policies/weighted.py",
}


def test_a_short_module_with_one_importer_joins_it() -> None:
    found = splinters(SOURCES, modules(LAB))
    assert found - KNOWN_SPLINTERS == set(), "let it join the module that imports it"
    assert KNOWN_SPLINTERS - found == set(), "shorten the list"


def test_a_splinter_is_found() -> None:
    sources = {
        "a/one.py": "x = 1\n",
        "a/two.py": "y = 1\n",
        "b.py": "from headstart.a import one\nfrom headstart.a.two import y\n",
        "c.py": "import headstart.a.two\n",
        "cli/verb.py": "z = 1\n",
        "d.py": "from headstart.cli import verb\n" + "\n" * MIN_LINES,
    }
    assert splinters(sources, {}) == {"a/one.py"}
    assert splinters(sources, {"x.py": "from headstart.a.one import x"}) == set()


OF_BENCHMARKS = re.compile(
    r"""(sys\.path\.insert|run_path|import_module|spec_from_file_location)[^\n]*benchmarks|/ "benchmarks" /"""
)
KNOWN_IMPORTS: set[str] = {  # scripts that run in environments without our packages: drivers of peers, a browser's
    "lab/tests/test_peers.py",
    "lab/tests/test_peers_gguf.py",
    "lab/tests/test_peers_tables.py",
    "tests/page/test_planted_losses.py",
}


def test_no_test_imports_benchmarks() -> None:
    files = [path for folder in ("tests", "lab/tests", "plugins/tests") for path in (ROOT / folder).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path != Path(__file__) and OF_BENCHMARKS.search(path.read_text(encoding="utf-8"))
    }
    assert found - KNOWN_IMPORTS == set(), "move what it imports to lab/src"
    assert KNOWN_IMPORTS - found == set(), "shorten the list"


@pytest.mark.parametrize(
    "line",
    ['sys.path.insert(0, str(ROOT / "benchmarks"))', 'FOLDER = Path(__file__).parents[2] / "benchmarks" / "fuzz"'],
)
def test_an_import_of_benchmarks_is_found(line: str) -> None:
    assert OF_BENCHMARKS.search(line)
