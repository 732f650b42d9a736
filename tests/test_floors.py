"""The floors of docs/architecture.md: a file imports only its own room and lower floors, and at the top of the file."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "headstart"
FLOORS = {  # any other file is on the top floor, where the concrete pieces meet
    **dict.fromkeys(["__init__", "__version__", "core", "config", "gguf", "allocator", "common_prefix"], 0),
    **dict.fromkeys(["model", "store", "router", "workload", "reuse", "bundled"], 1),
    **dict.fromkeys(["openai", "measurement"], 2),
    # chats of openai, translated; a simulation; HTTP without any API's rules; engines built from options
    **dict.fromkeys(["anthropic", "ollama", "sim", "http", "engine"], 3),
    **dict.fromkeys(["apis", "page"], 4),
    **dict.fromkeys(["server", "gateway"], 5),
}
TOP = 6
# Beyond the floors. core decides from its arguments alone; the HTTP process never loads torch.
IMPURE = {"time", "datetime", "random", "secrets", "os", "socket", "subprocess", "asyncio", "threading"}
NO_TORCH = {"torch", "headstart.model", "headstart.engine.assembly"}
FORBIDDEN = {
    "core": IMPURE,
    "reuse": IMPURE - {"secrets"},  # fingerprints mean nothing outside of their process
    "router": IMPURE - {"random"},
    **dict.fromkeys(["openai", "anthropic", "ollama", "http", "apis", "page", "server", "gateway"], NO_TORCH),
}
# Lazy on purpose: the command line (Ctrl-C while it is imported), its verbs (fast --help, threads before torch), the
# attention table, `headstart.LLM`.
LAZY = ("__init__.py", "__main__.py", "cli/", "bench/cli/", "model/attention/__init__.py")
# extras; a fallback that would bring torch along
OPTIONAL = {"matplotlib", "kubernetes_asyncio", "transformers", "headstart.http.tracing.otlp_exporter"}


def _imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "headstart":  # from headstart import core
                yield from ((node, f"headstart.{alias.name}") for alias in node.names)
            else:
                yield node, module if not node.level else f"relative:{module}"


def violations(path: str, source: str) -> list[str]:
    """Return the forbidden imports of one file; `path` is relative to src/headstart."""
    tree = ast.parse(source)
    room = path.split("/")[0].removesuffix(".py")
    floor = FLOORS.get(room, TOP)
    top_level = {id(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            top_level -= {id(node) for node in ast.walk(function)}
    found: list[str] = []
    for node, name in _imports(tree):
        where = f"{path}:{node.lineno}: {name}"
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if name.startswith("relative:"):
            found.append(f"{where}: write the import absolutely")
        if package == "headstart" and target:
            above = FLOORS.get(target, TOP)
            if above > floor or (above == floor and floor in (1, 2, 3, 4, 5) and target != room):
                found.append(f"{where}: {room} (floor {floor}) must not import {target} (floor {above})")
        elif floor == 0 and package not in sys.stdlib_module_names and package != "headstart":
            found.append(f"{where}: floor 0 is standard library only")
        if package == "headstart_lab":
            found.append(f"{where}: the package does without the laboratory; see bench/cli/laboratory.py")
        if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN.get(room, ())):
            found.append(f"{where}: forbidden in {room}")
        if id(node) not in top_level and not path.startswith(LAZY) and not {package, name} & OPTIONAL:
            found.append(f"{where}: imported inside a function")
    return found


def test_every_file_keeps_to_its_floor() -> None:
    files = sorted(SRC.rglob("*.py"))
    found = [line for f in files for line in violations(f.relative_to(SRC).as_posix(), f.read_text(encoding="utf-8"))]
    assert files and not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("core/x.py", "import torch", "standard library only"),
        ("core/x.py", "import time", "forbidden in core"),
        ("core/x.py", "from headstart.model.step_inputs import f", "must not import model"),
        ("config/x.py", "import headstart.server.app", "must not import server"),
        ("workload/x.py", "from headstart import model", "must not import model"),
        ("model/x.py", "from headstart.cli.main import main", "must not import cli"),
        ("server/x.py", "from headstart.model.setup.sizing import f", "forbidden in server"),
        ("server/x.py", "from headstart.engine.assembly import f", "forbidden in server"),
        ("server/x.py", "if True:\n import torch.nn", "forbidden in server"),
        ("model/x.py", "def f():\n  import torch", "inside a function"),
        ("model/x.py", "from . import y", "absolutely"),
        ("bench/x.py", "from headstart_lab.engine.scan import run_scan", "without the laboratory"),
        ("cli/x.py", "def f():\n  import headstart_lab", "without the laboratory"),
        ("workload/x.py", "from headstart.measurement.report import BenchmarkReport", "must not import measurement"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str, complaint: str) -> None:
    assert any(complaint in line for line in violations(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/x.py", "import hashlib\nfrom headstart.core.errors import ConfigError"),
        (
            "model/x.py",
            "import torch\nfrom headstart.core.batch import Batch\nfrom headstart.config.options import EngineOptions",
        ),
        ("server/x.py", "import asyncio\nfrom headstart.core.request import Request"),
        ("model/x.py", "from headstart import __version__"),
        ("cli/x.py", "def serve():\n  from headstart.server.run_server import serve"),
        ("bench/x.py", "from headstart.engine.llm import LLM"),
    ],
)
def test_what_the_floors_allow_is_not_complained_of(path: str, source: str) -> None:
    assert violations(path, source) == []


API_PATHS = re.compile(r"""["'](?:/v1/(?:completions|chat|responses|messages)|/api/)""")
"""Paths that stand only in apis/ and in the tables of routes of server and router."""


def test_http_knows_no_path_of_an_api() -> None:
    found = [path.name for path in (SRC / "http").rglob("*.py") if API_PATHS.search(path.read_text(encoding="utf-8"))]
    assert not found
    assert API_PATHS.search('ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")')


MAX_MODULES = 15  # of a folder; a subject with more has subfolders


def test_no_folder_holds_too_many_modules() -> None:
    counts = Counter(path.parent for path in SRC.rglob("*.py") if path.name != "__init__.py")
    assert counts and [f"{folder}: {count}" for folder, count in counts.items() if count > MAX_MODULES] == []


def test_no_two_modules_have_one_name() -> None:
    counts = Counter(path.name for path in SRC.rglob("*.py") if path.name != "__init__.py")
    assert counts and [name for name, count in counts.items() if count > 1] == []
