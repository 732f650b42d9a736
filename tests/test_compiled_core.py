"""headstart.core compiled by mypyc, as it is in a wheel (setup.py): that it can be, and that it then does the same.

mypyc keeps the meaning of the source but for three things: a compiled class has no subclass that is not compiled, its
methods cannot be replaced, and of its annotations only those of plain values are left at run time.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from headstart.engine import wire

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "headstart" / "core"
SETUP = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
PLAIN = (int, float, str, bool, bytes)


def strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def constants(name: str) -> list[str]:
    """The strings in the statement of setup.py that assigns to `name`, or defines it."""
    (found,) = (
        node
        for node in SETUP.body
        if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name) or getattr(node, "name", "") == name
    )
    return strings(found)


RECORDS = constants("RECORDS")


def types_within(hint: Any, seen: set[Any]) -> Iterator[Any]:
    """The classes with fields that a hint contains, also those of their fields."""
    if hint in seen:
        return
    seen.add(hint)
    for each in get_args(hint):
        yield from types_within(each, seen)
    if isinstance(hint, type) and get_type_hints(hint):
        yield hint
        for each in get_type_hints(hint).values():
            yield from types_within(each, seen)


def test_mypyc_accepts_the_core() -> None:
    needed = next(value for node in SETUP.body for value in strings(node) if value.startswith("mypy>"))
    assert f'"{needed}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8"), "the core is checked by another mypy"
    (flag,) = (value for value in constants("core_extensions") if value.startswith("--"))
    command = [sys.executable, "-m", "mypy", flag, "--cache-dir", os.devnull, "-p", "headstart.core"]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_processes_send_one_another_keeps_its_types() -> None:
    seen: set[Any] = set()
    found = {
        kind
        for kind in types_within(wire.ToEngine | wire.FromEngine, seen)
        if kind.__module__.startswith("headstart.core")
    }
    assert {"SamplingParams", "RequestStepOutput", "EngineStats", "TokenCounters"} <= {kind.__name__ for kind in found}
    compiled = [kind for kind in found if kind.__module__.rpartition(".")[2] not in RECORDS]
    assert [
        f"{kind.__name__}.{name}"
        for kind in compiled
        for name, hint in get_type_hints(kind).items()
        if hint not in PLAIN
    ] == []


def test_no_class_of_the_core_has_a_subclass_elsewhere() -> None:
    """Errors may: an exception's class stays an ordinary one."""
    kinds = {
        node.name
        for path in CORE.rglob("*.py")
        if path.stem not in (*RECORDS, "errors")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    assert {"Scheduler", "BlockPool"} <= kinds
    found = []
    for folder in ("src", "lab/src", "plugins/src"):
        for path in (ROOT / folder).rglob("*.py"):
            if CORE in path.parents:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {
                alias.asname or alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headstart.core")
                for alias in node.names
            }
            found += [
                f"{path.name}: {node.name}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ClassDef)
                for base in node.bases
                if ast.unparse(base) in names & kinds
            ]
    assert found == []


PATCHING = [
    "tests/core/test_meeting.py::test_any_order_of_arrivals_gives_the_same_tokens",
    "tests/core/test_meeting.py::test_what_arrives_before_its_sequence_is_admitted_is_used",
    "tests/core/test_speculation.py::test_a_planted_bug_is_caught",
    "tests/core/test_speculation.py::test_rejections_are_remembered_for_later_requests_of_their_own_domain_only",
]  # they replace methods of the core


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_compiled_the_core_passes_its_tests_and_serves(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    unwanted = shutil.ignore_patterns("*.egg-info", "__pycache__", ".hypothesis")
    for folder in ("src", "lab", "plugins", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "conftest.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)

    def run(*words: str, **environ: str) -> str:
        settings = {**os.environ, "PYTHONPATH": os.pathsep.join(str(copy / f) for f in ("src", "lab/src")), **environ}
        done = subprocess.run(
            [sys.executable, *words], cwd=copy, env=settings, capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    run("setup.py", "-q", "build_ext", "--inplace", HEADSTART_CORE="compiled")
    code = "from headstart.core.sched import scheduler, token_accounting as t; print(scheduler.__file__, t.__file__)"
    assert run("-c", code).count(".so") == 2
    tested = ("tests/core", "tests/server/test_drain.py")
    assert "100%" in run("-m", "pytest", "-q", *tested, *(f"--deselect={name}" for name in PATCHING))
