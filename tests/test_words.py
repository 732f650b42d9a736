"""The words of docs and code: plain technical English, as engineers of other inference servers read it."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIALECT = re.compile(
    r"\b((?:no|some)bod(?:y|ys|ies)|whoever|became of|gives? way|gave way|giving way)\b", re.IGNORECASE
)
OPENING = re.compile(r"(What|Who|Whose|How)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FILES = [path for folder in ("src", "lab/src", "plugins/src", "docs") for path in (ROOT / folder).rglob("*")]
INTENT = ROOT / "lab/src/headstart_lab/intent"  # has sentences of a synthetic workload
DATA = (INTENT / "intent_travel_home.py", INTENT / "intent_people_things.py")
SOURCES = sorted(path for path in FILES if path.suffix in (".py", ".md") and path not in DATA)
TESTS = sorted(
    path for name in ("tests", "lab/tests", "plugins/tests", "benchmarks") for path in (ROOT / name).rglob("*.py")
)


def dialect(text: str) -> Iterator[str]:
    """Yield the private words of a text, with their line."""
    for number, line in enumerate(text.split("\n"), 1):
        yield from (f"{number}: {found[0]}" for found in DIALECT.finditer(line))


def prose(source: str) -> str:
    """Return the comments, docstrings and names of functions of Python code in their lines, all else left out."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            lines[getattr(node, "lineno", 1)] += f" {getattr(node, 'name', '').replace('_', ' ')}"
            if node.body and isinstance(node.body[0], ast.Expr) and (text := ast.get_docstring(node, clean=False)):
                for number, line in enumerate(text.split("\n"), node.body[0].lineno):
                    lines[number] += line
    return "\n".join(lines[1:])


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


def test_no_private_words_in_comments_docstrings_and_names_of_tests() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in TESTS
        for line in dialect(prose(path.read_text(encoding="utf-8")))
    ]
    assert TESTS and not found, "\n" + "\n".join(found)


def test_docstrings_of_tests_begin_with_no_question_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in TESTS for line in openings(path.read_text(encoding="utf-8"))
    ]
    assert TESTS and not found, "\n" + "\n".join(found)


def test_private_words_are_found() -> None:
    assert list(dialect("fine\nwhoever came first Gives way")) == ["2: whoever", "2: Gives way"]
    source = 'def test_nobody_waits():\n  """A\n  somebody."""\n  return "nobody"  # harms nobodys share\n'
    assert list(dialect(prose(source))) == ["1: nobody", "3: somebody", "4: nobodys"]
    assert len(list(openings('"""What it is."""\ndef f():\n  """How so."""\ndef g():\n  """Return 1."""'))) == 2
