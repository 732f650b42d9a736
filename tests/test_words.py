"""The words of docs and code: plain technical English, as engineers of other inference servers read it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIALECT = re.compile(r"\b(nobody|whoever|became of|gives? way|gave way|giving way)\b", re.IGNORECASE)
OPENING = re.compile(r"(What|Who|Whose|How)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FILES = [path for folder in ("src", "lab/src", "plugins/src", "docs") for path in (ROOT / folder).rglob("*")]
DATA = ROOT / "lab/src/headstart_lab/intent/intent_travel_home.py"  # sentences of a synthetic workload
SOURCES = sorted(path for path in FILES if path.suffix in (".py", ".md") and path != DATA)
TESTS = sorted(
    path for name in ("tests", "lab/tests", "plugins/tests", "benchmarks") for path in (ROOT / name).rglob("*.py")
)


def dialect(text: str) -> Iterator[str]:
    """Yield the private words of a text, with their line."""
    for number, line in enumerate(text.split("\n"), 1):
        yield from (f"{number}: {found[0]}" for found in DIALECT.finditer(line))


def openings(source: str) -> Iterator[str]:
    """Yield the docstrings of Python code that begin with a question word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and OPENING.match(ast.get_docstring(node) or ""):
            yield f"{getattr(node, 'lineno', 1)}: {(ast.get_docstring(node) or '')[:60]}"


def violations(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [*dialect(text), *(openings(text) if path.suffix == ".py" else ())]


def test_no_private_words() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in violations(path)]
    assert SOURCES and not found, "\n" + "\n".join(found)


def test_docstrings_of_tests_begin_with_no_question_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in TESTS for line in openings(path.read_text(encoding="utf-8"))
    ]
    assert TESTS and not found, "\n" + "\n".join(found)


def test_private_words_are_found() -> None:
    assert list(dialect("fine\nwhoever came first Gives way")) == ["2: whoever", "2: Gives way"]
    assert len(list(openings('"""What it is."""\ndef f():\n  """How so."""\ndef g():\n  """Return 1."""'))) == 2
