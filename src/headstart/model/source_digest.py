"""Digest of the model code and its kernels: part of the key of every stored KV block.

The release number stays the same while the code changes, so it cannot tell two builds apart. The digest covers every
Python and C++ source in this folder and below. Comments, docstrings and layout do not count, so cosmetic edits keep
stores valid; anything else voids them. The digest of one source may differ between minor versions of Python.
"""

import ast
import functools
import hashlib
import re
from pathlib import Path

SUFFIXES = (".py", ".cpp", ".h")
_FOLDER = Path(__file__).parent
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A raw string, a string or character literal, a comment, or a run of white space. Literals are matched so that `//`
# within one is not taken for a comment.
_CPP_PIECE = re.compile(
    r"""(?P<keep>R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<drop>//(?:\\\n|[^\n])*|/\*.*?\*/)""",
    re.DOTALL,
)


@functools.cache
def source_digest(folder: Path = _FOLDER) -> bytes:
    """Return the SHA-256 of the sources in `folder` and below it. Computed once per process and folder."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        text = file.read_text(encoding="utf-8")
        code = _python_code(text) if file.suffix == ".py" else _cpp_code(text)
        for part in (file.relative_to(folder).as_posix(), code):
            digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return digest.digest()


def _python_code(text: str) -> str:
    """Return the syntax tree of `text` without docstrings, as text."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def _cpp_code(text: str) -> str:
    """Return `text` without comments, surrounding white space of lines, and empty lines."""
    bare = _CPP_PIECE.sub(lambda found: found["keep"] or " ", text)
    lines = (line.strip() for line in bare.splitlines())
    return "\n".join(line for line in lines if line)
