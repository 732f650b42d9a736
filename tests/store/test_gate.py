"""The static gate of store/ (T-40): what other people's caches were broken through is not in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

STORE = Path(__file__).parents[2] / "src" / "headstart" / "store"
# A file cut under a mapping kills its reader; the others run what they read.
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "joblib", "shelve", "mmap", "ctypes"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"import_module", "system", "popen", "memmap", "eval", "exec"}


def findings(path: str, source: str) -> Iterator[str]:
    """Return the forbidden imports and calls in one file of store/."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name.split(".")[0] for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names.append((node.module or "").split(".")[0])
            yield from (f"{path}:{node.lineno}: imports {name}" for name in names if name in MODULES)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield f"{path}:{node.lineno}: calls {node.func.id}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield f"{path}:{node.lineno}: calls {node.func.attr}"


def test_the_store_neither_runs_nor_maps_what_it_reads() -> None:
    files = sorted(STORE.rglob("*.py"))
    assert len(files) > 5
    assert [line for file in files for line in findings(file.name, file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import mmap as m",
        "from marshal import loads",
        "import shelve",
        "from multiprocessing import dill",
        "def f(x):\n  return eval(x)",
        "import numpy as np\nnp.memmap('x')",
        "import importlib\nimportlib.import_module('pickle')",
    ],
)
def test_a_planted_one_is_found(source: str) -> None:
    assert list(findings("x.py", source))


def test_what_the_store_needs_is_not_complained_of() -> None:
    assert list(findings("x.py", "import os, struct, hashlib\nfrom pathlib import Path\nos.pread(3, 8, 0)")) == []
